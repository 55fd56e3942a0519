# SPDX-License-Identifier: Apache-2.0
"""What must be equal where a drafter is trained, in its export and in the engine; each of the three is asked."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from pilotfish import files
from pilotfish.errors import UserError

if TYPE_CHECKING:
    from speculators.model import SpeculatorModel
    from vllm.config import VllmConfig

FILE = "constants.json"
ENGINE_ROPE_THETA = 10_000.0  # what vLLM takes where a config has none
OF_ROPE = ("rope_theta", "rope_type", "partial_rotary_factor")
# Where one of these is absent speculators and vLLM take different defaults, or an engine falls back silently.
WRITTEN_OUT = {
    "eagle3": ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "norm_before_residual"),
    "dflash": (
        *("aux_hidden_state_layer_ids", "draft_vocab_size", "block_size", "mask_token_id"),
        *("sliding_window_non_causal", "sample_from_anchor"),
    ),
}
WRITTEN_OUT_OF_LAYER = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings"),
)


class Constants(BaseModel):
    """Constants of a drafter; sizes count tokens of a vocabulary, channels, heads, layers or positions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: str
    capture_layers: tuple[int, ...]  # h(k) numbers, in the order in which the projection takes them
    draft_vocab_size: int
    target_vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_layers: int
    rms_norm_eps: float
    rope_theta: float
    rope_type: str
    rope_scaling: dict[str, int | float | bool | str | list]  # what the type wants besides theta
    partial_rotary_factor: float
    sliding_window: int | None
    causal: bool
    max_position_embeddings: int
    tied_head: bool  # the head is the embedding
    # Of EAGLE-3 alone:
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    # Of DFlash alone:
    mask_token_id: int | None = None
    block_size: int | None = None


def _rope(parameters: dict) -> dict:
    """The rope's part of the constants, from `rope_parameters`."""
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_type": parameters["rope_type"],
        "partial_rotary_factor": parameters.get("partial_rotary_factor") or 1.0,
        "rope_scaling": {key: value for key, value in parameters.items() if key not in OF_ROPE},
    }


def of_model(model: "SpeculatorModel") -> Constants:
    """Constants of a drafter in training: its modules are asked, its config where they do not know."""
    config, attention, rotary = model.config, model.layers[0].self_attn, model.rotary_emb
    common = {
        "algorithm": config.speculators_model_type,
        "capture_layers": tuple(model.target_layer_ids),
        "draft_vocab_size": model.lm_head.out_features,
        "target_vocab_size": model.embed_tokens.num_embeddings,
        "hidden_size": model.embed_tokens.embedding_dim,
        "heads": attention.q_proj.out_features // attention.head_dim,
        "kv_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "draft_layers": len(model.layers),
        "rms_norm_eps": model.norm.variance_epsilon,
        **_rope(dict(rotary.config.rope_parameters)),
        "sliding_window": model.sliding_window if model.uses_sliding_window_attn else None,
        "causal": _sees_no_future(model),
        "max_position_embeddings": config.transformer_layer_config.max_position_embeddings,
        "tied_head": model.lm_head.weight is model.embed_tokens.weight,
    }
    if config.speculators_model_type == "dflash":
        return Constants(**common, mask_token_id=model.mask_token_id, block_size=model.block_size)
    layer = model.layers[0]
    return Constants(
        **common,
        norm_before_residual=layer.norm_before_residual,
        norm_before_fc=model.input_norm is not None,
        fc_norm=model.fc_norm is not None,
        norm_output=config.norm_output,
    )


def _sees_no_future(model: "SpeculatorModel") -> bool:
    """Whether the model's own mask keeps a token of its draft from those behind it."""
    import torch

    if model.config.speculators_model_type == "dflash":
        from speculators.models.dflash.attention import create_anchor_block_mask_mod

        sliding = model.uses_sliding_window_attn
        mask, _, _ = create_anchor_block_mask_mod(
            torch.zeros(2, dtype=torch.long), 2, torch.tensor([1]), 2,
            sliding_window=model.sliding_window if sliding else None,
            sliding_window_non_causal=model.sliding_window_non_causal,
        )  # fmt: skip
        # Batch, head, query (the block's first), key (its second, behind the two of the context).
        return not bool(mask(*torch.tensor([0, 0, 0, 3])))
    from speculators.models.eagle3.attention import create_combined_mask_mod

    return not bool(create_combined_mask_mod(torch.zeros(2, dtype=torch.long), 2)(*torch.tensor([0, 0, 0, 1])))


def of_config(config: dict, where: Path | str = "config.json") -> Constants:
    """Constants that an exported config.json asks a server for.

    Raises UserError for a missing key whose default differs between speculators and vLLM.
    """
    layer = config.get("transformer_layer_config") or {}
    rope = layer.get("rope_parameters") or {}
    algorithm = config.get("speculators_model_type")
    lacking = [] if algorithm in WRITTEN_OUT else ["speculators_model_type"]
    lacking += [key for key in WRITTEN_OUT.get(algorithm, ()) if config.get(key) in (None, [])]
    lacking += [f"transformer_layer_config.{key}" for key in WRITTEN_OUT_OF_LAYER if layer.get(key) is None]
    lacking += [f"rope_parameters.{key}" for key in OF_ROPE[:2] if key not in rope]
    if lacking:
        raise UserError(
            f"{where}: {', '.join(lacking)} missing, and a server would silently take its own default; "
            "export the drafter again"
        )
    common = {
        "algorithm": algorithm,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_vocab_size": layer["vocab_size"],
        "hidden_size": layer["hidden_size"],
        "heads": layer["num_attention_heads"],
        "kv_heads": layer["num_key_value_heads"],
        "head_dim": layer["head_dim"],
        "draft_layers": layer["num_hidden_layers"],
        "rms_norm_eps": layer["rms_norm_eps"],
        **_rope(rope | {key: layer[key] for key in OF_ROPE if key in layer}),
        "sliding_window": layer.get("sliding_window"),
        "max_position_embeddings": layer["max_position_embeddings"],
        "tied_head": layer["tie_word_embeddings"],
    }
    if algorithm == "dflash":
        return Constants(
            **common,
            capture_layers=tuple(config["aux_hidden_state_layer_ids"]),
            # vLLM 0.32 takes the one for the other, also where no layer slides (its issue 56692).
            causal=layer.get("is_causal", not config["sliding_window_non_causal"]),
            mask_token_id=config["mask_token_id"],
            block_size=config["block_size"],
        )
    return Constants(
        **common,
        capture_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        causal=layer.get("is_causal", True),
        norm_before_residual=config["norm_before_residual"],
        norm_before_fc=config.get("norm_before_fc", False),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
    )


def of_engine(config: "VllmConfig") -> Constants:
    """Constants of the drafter that vLLM has resolved for itself, with its defaults for what it was not told.

    After vLLM's LlamaAttention, Eagle3 and DFlash models, which read them from `draft_model_config.hf_config`.
    """
    speculative = config.speculative_config
    drafter = speculative.draft_model_config
    held = drafter.hf_config
    rope = dict(getattr(held, "rope_parameters", None) or {})
    sliding = "sliding_attention" in (getattr(held, "layer_types", None) or [])
    common = {
        "algorithm": speculative.method,
        "capture_layers": tuple(getattr(held, "eagle_aux_hidden_state_layer_ids", None) or ()),
        "draft_vocab_size": getattr(held, "draft_vocab_size", None) or held.vocab_size,
        "target_vocab_size": config.model_config.get_vocab_size(),
        "hidden_size": held.hidden_size,
        "heads": held.num_attention_heads,
        "kv_heads": drafter.get_total_num_kv_heads(),
        "head_dim": getattr(held, "head_dim", None) or held.hidden_size // held.num_attention_heads,
        "draft_layers": held.num_hidden_layers,
        "rms_norm_eps": held.rms_norm_eps,
        **_rope({"rope_theta": ENGINE_ROPE_THETA, "rope_type": "default"} | rope),
        "sliding_window": getattr(held, "sliding_window", None) if sliding else None,
        "max_position_embeddings": held.max_position_embeddings,
        "tied_head": held.tie_word_embeddings,
    }
    if speculative.method == "dflash":
        from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

        return Constants(
            **common,
            causal=not dflash_has_any_non_causal(held),
            mask_token_id=held.dflash_config["mask_token_id"],
            # The engine knows no block but that of the tokens it is asked to draft, and the one before them.
            block_size=speculative.num_speculative_tokens + 1,
        )
    return Constants(
        **common,
        causal=getattr(held, "is_causal", True),
        norm_before_residual=getattr(held, "norm_before_residual", False),
        norm_before_fc=getattr(held, "norm_before_fc", False),
        fc_norm=getattr(held, "fc_norm", False),
        norm_output=getattr(held, "norm_output", False),
    )


def read(value: dict, where: Path | str) -> Constants:
    """A record read back from JSON; UserError when it is none."""
    try:
        return Constants.model_validate(value)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, fault["loc"])) for fault in error.errors())
        raise UserError(f"{where}: not the constants of a drafter ({fields}); delete it and run again") from None


def write(folder: Path, made: Constants) -> None:
    """Write constants.json into a folder."""
    files.write_json(folder / FILE, made.model_dump())


def differences(left: Constants, right: Constants) -> list[str]:
    """Each field that differs, with both values: `rope_theta 10000.0, not 500000.0`, the left one first."""
    ours, theirs = left.model_dump(), right.model_dump()
    return [f"{name} {ours[name]!r}, not {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]
