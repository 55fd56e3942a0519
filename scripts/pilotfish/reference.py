# SPDX-License-Identifier: Apache-2.0
"""A published drafter, adopted: in the one format that replay and server read, its tensors bit for bit as they came.

| format | known by | its layer ids |
|---|---|---|
| speculators | `speculators_model_type` eagle3 or dflash | h(k) |
| SGLang, SpecForge | LlamaForCausalLMEagle3, `midlayer.*` | outputs, k - 1; none means {2, L//2, L-3}, as h(k) |
| z-lab | DFlashDraftModel | outputs, k - 1 |

An embedding or a head that is not there is the target's. After SGLang's llama_eagle3.py, z-lab's dflash/model.py and
speculators' models; code beside the weights is never run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pilotfish import constants, export, export_checks, files, tensors
from pilotfish.constants import Constants
from pilotfish.errors import UserError
from pilotfish.heads import TargetTensors

RECORD = "adopted.json"  # what the source held, and what was done to it
FILES = (*export.FILES, RECORD)
INDEX = "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"  # vLLM takes it in place of the mask token's embedding, the replay does not
FROM_HUB = ("*.json", "*.safetensors", MASK_EMBEDDING)
ALGORITHMS = {"eagle3": "llama", "dflash": "qwen3"}  # and the model type of their layers
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CONVERTED = (torch.float64, torch.float32, torch.float16)  # to bf16, which all targets are served in
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# Keys that change a forward pass, and the only value that is replayed and served here; absent means the same.
NEUTRAL = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "sample_from_anchor", "use_swa", "causal"), False),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias"), False),
    **dict.fromkeys(("use_aux_hidden_state", "is_neox_style"), True),
    **dict.fromkeys(("logit_scale", "input_embedding_scale", "output_multiplier", "attention_value_scale"), 1.0),
    **dict.fromkeys(("final_logit_softcapping", "quantization_config"), None),
    "hidden_act": "silu",
}
NESTED = {"eagle_aux_hidden_state_layer_ids", "target_layer_ids", "mask_token_id", "block_size"}


def locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    """The folder of a drafter, and the commit of a hub id; UserError where there is neither."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder, None
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(f"references: no folder {source!r}; give an existing folder or a hub id ORG/NAME as `source`")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(source, revision=revision, allow_patterns=list(FROM_HUB)))
    except Exception as error:
        raise UserError(
            f"references: {source!r} is no folder here, and the hub did not give it ({type(error).__name__}: {error}); "
            "check the name, the revision, HF_TOKEN and the network"
        ) from None
    return snapshot, snapshot.name


def adopt(
    source: Path,
    folder: Path,
    *,
    model: Path,
    facts: Mapping,
    target: str,
    speculative_tokens: int,
    revision: str | None = None,
) -> dict:
    """Write the drafter in `source` to `folder` for the target in `model`, and return what RECORD holds.

    `facts` are the statistics of the target's manifest, `target` what exports call it, `speculative_tokens` is k.
    Raises UserError for a format, a config or tensors that do not fit, each with the file and the cure.
    """
    path = source / "config.json"
    config, held = files.read_json(path), _weights(source)
    kind = _format(config, held, path)
    made = READERS[kind](config, facts, path)
    made["speculators_config"] = _served_as(made["speculators_model_type"], facts, target, speculative_tokens)
    stated = constants.of_config(made, path)
    found = tensors.Faults(path)
    for fault in (*_config_faults(config, stated.algorithm), *_fit_faults(stated, facts)):
        found.add(fault)
    found.refuse("nothing was adopted; name another `source`, or mend its config.json")
    if (source / MASK_EMBEDDING).exists():
        raise UserError(f"{source / MASK_EMBEDDING}: a mask embedding of its own, which is not replayed; leave it out")
    record = {"format": kind, "revision": revision, "verifier": _verifier(config)}
    held = {name.replace("midlayer.", "layers.0.") if kind == "sglang" else name: held[name] for name in held}
    held, record["converted"] = _converted(held)
    record |= _completed(held, stated, TargetTensors(model), source)
    record["sha256"] = {name: tensors.digest(held[name]) for name in sorted(held)}
    files.write_json(folder / "config.json", made)
    with files.replacing(folder / "model.safetensors") as temporary:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, temporary, {"format": "pt"})
    files.write_json(folder / RECORD, record)
    return record


def _named(index: Path) -> set[str]:
    """The files beside an index that it names."""
    names = files.read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and n == Path(n).name for n in names.values()):
        raise UserError(f"{index}: `weight_map` does not name files beside it; fetch the drafter's files again")
    return set(names.values())


def _weights(source: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder: of model.safetensors, of the shards in its index, or of the only file there is."""
    paths = [source / "model.safetensors"]
    if not paths[0].is_file() and (source / INDEX).is_file():
        paths = sorted(source / name for name in _named(source / INDEX))
    elif not paths[0].is_file():
        paths = sorted(source.glob("*.safetensors"))
        if len(paths) != 1:
            raise UserError(
                f"{source}: {len(paths)} .safetensors files where model.safetensors, its index or one file is needed; "
                "pickled weights (.bin, .pt) are never loaded: convert them to safetensors first"
            )
    held: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            held |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); fetch the drafter's files again") from None
    return held


def _format(config: dict, names: Mapping, path: Path) -> str:
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type") in ALGORITHMS:
        return "speculators"
    if "speculators_model_type" not in config:
        if "LlamaForCausalLMEagle3" in architectures and any(name.startswith("midlayer.") for name in names):
            return "sglang"
        if "DFlashDraftModel" in architectures:
            return "z-lab"
    found = config.get("speculators_model_type") or ", ".join(architectures) or "no architecture"
    code = "; the Python that its auto_map names is never run" if "auto_map" in config else ""
    raise UserError(
        f"{path}: {found} is no known format{code}; give a drafter of speculators (eagle3, dflash), of SGLang "
        "(LlamaForCausalLMEagle3 with midlayer.* tensors) or of z-lab (DFlashDraftModel)"
    )


def _of_speculators(config: dict, facts: Mapping, path: Path) -> dict:
    """As it is, but without code, and with what servers have other defaults for written out."""
    made = {key: value for key, value in config.items() if key not in export.CODE_KEYS}
    if not config.get("transformer_layer_config"):
        raise UserError(f"{path}: transformer_layer_config is missing; fetch the drafter's files again")
    layer = _layer(config["transformer_layer_config"], config["speculators_model_type"], path)
    made["transformer_layer_config"] = layer
    if made["speculators_model_type"] == "eagle3":
        # speculators and vLLM take the same ones where there are none.
        ids = made.get("eagle_aux_hidden_state_layer_ids")
        return made | {"eagle_aux_hidden_state_layer_ids": ids or facts["default_capture_layers"]}
    # Full attention is bidirectional in speculators whatever this says; vLLM 0.32 makes it causal unless it is true.
    return {"sample_from_anchor": False, **made, "sliding_window_non_causal": True}


def _of_sglang(config: dict, facts: Mapping, path: Path) -> dict:
    """SGLang adds 1 to the ids of `eagle_config`; vLLM reads those beside it, and as h(k)."""
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    stated = config.get("eagle_aux_hidden_state_layer_ids") or facts["default_capture_layers"]
    if config.get("tie_word_embeddings"):
        raise UserError(f"{path}: tie_word_embeddings is true; only drafters with a head of their own are replayed")
    return {
        **_common(config, "eagle3", path),
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": [output + 1 for output in outputs] if outputs else stated,
        **{flag: config.get(flag, False) for flag in NORM_FLAGS},
    }


def _of_zlab(config: dict, facts: Mapping, path: Path) -> dict:
    """z-lab's reads hidden_states[id + 1] of Hugging Face; newer configs have the block size among the nested."""
    nested = {"block_size": config.get("block_size"), **(config.get("dflash_config") or {})}
    wanted = ("block_size", "mask_token_id", "target_layer_ids")
    if lacking := [key for key in wanted if nested.get(key) in (None, [])]:
        raise UserError(f"{path}: {', '.join(lacking)} missing; write what it was trained with into dflash_config")
    return {
        **_common(config, "dflash", path),
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [output + 1 for output in nested["target_layer_ids"]],
        "block_size": nested["block_size"],
        "mask_token_id": nested["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }


def _common(config: Mapping, algorithm: str, path: Path) -> dict:
    """What a config of speculators states whatever the algorithm, out of one that has it at the top."""
    layer = _layer(config, algorithm, path)
    return {
        "speculators_model_type": algorithm,
        "dtype": "bfloat16",
        "draft_vocab_size": config.get("draft_vocab_size") or layer["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        "transformer_layer_config": layer,
    }


READERS = {"speculators": _of_speculators, "sglang": _of_sglang, "z-lab": _of_zlab}


def _layer(given: Mapping, algorithm: str, path: Path) -> dict:
    """The draft layers' part of config.json, with every default of transformers' config written out."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

    kind = ALGORITHMS[algorithm]
    if given.get("model_type", kind) != kind:
        raise UserError(
            f"{path}: layers of model_type {given['model_type']!r}; only {kind!r} is replayed for {algorithm}"
        )
    try:
        full = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**given)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: transformers cannot read it ({error}); mend the config") from None
    if "sliding_attention" in (getattr(full, "layer_types", None) or []):
        raise UserError(f"{path}: layers with sliding attention, which are not replayed; choose another drafter")
    own = type(full)().to_dict().keys() - PreTrainedConfig().to_dict().keys() | {"model_type"}
    made = {key: value for key, value in full.to_dict().items() if key in own}
    # A window that no layer uses; and a block drafter's head is never its embedding, but the target's or its own.
    made |= {"sliding_window": None, "use_sliding_window": False} if "sliding_window" in own else {}
    return made | ({"tie_word_embeddings": False} if algorithm == "dflash" else {})


def _served_as(algorithm: str, facts: Mapping, target: str, speculative_tokens: int) -> dict:
    greedy = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**greedy, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {"architectures": [facts["architecture"]], "name_or_path": target},
    }


def _verifier(config: Mapping) -> str | None:
    """The target that the source names, if it names one."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def _config_faults(config: Mapping, algorithm: str) -> Iterator[str]:
    """What a source's config asks for that replay and server do not do, and what nobody here has heard of."""
    neutral = {**NEUTRAL, "is_causal": algorithm == "eagle3"}
    nested = {**(config.get("eagle_config") or {}), **(config.get("dflash_config") or {})}
    unknown = nested.keys() - NESTED - neutral.keys()
    for key, value in {**config, **(config.get("transformer_layer_config") or {}), **nested}.items():
        if value is not None and (key in unknown or value != neutral.get(key, value)):
            yield f"{key} is {value!r}, which neither the replay nor the server heeds; choose another drafter"


def _fit_faults(stated: Constants, facts: Mapping) -> Iterator[str]:
    """Sizes, layers and tokens that are not the target's."""
    cure = "it was made for another target"
    for name, size in (("hidden_size", stated.hidden_size), ("vocab_size", stated.target_vocab_size)):
        if size != facts[name]:
            yield f"{name} {size} where the target has {facts[name]}: {cure}"
    layers = stated.capture_layers
    if sorted(set(layers)) != list(layers) or not 1 <= min(layers) <= max(layers) < facts["layers"]:
        yield f"layers {list(layers)} in h(k) numbering must rise and lie in 1..{facts['layers'] - 1}: {cure}"
    if not 0 < stated.draft_vocab_size <= facts["vocab_size"]:
        yield f"draft_vocab_size {stated.draft_vocab_size} where the target has {facts['vocab_size']} tokens: {cure}"
    if stated.mask_token_id is not None and not 0 <= stated.mask_token_id < facts["vocab_size"]:
        yield f"mask_token_id {stated.mask_token_id} is none of the target's {facts['vocab_size']} tokens: {cure}"


def _converted(held: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors with floats in bf16, and how many of which type were not."""
    others = Counter(str(each.dtype).removeprefix("torch.") for each in held.values() if each.dtype in CONVERTED)
    made = {name: each.bfloat16() if each.dtype in CONVERTED else each for name, each in held.items()}
    return made, dict(sorted(others.items()))


def _completed(held: dict[str, torch.Tensor], stated: Constants, target: TargetTensors, source: Path) -> dict:
    """Fill in what a format leaves to the target, drop copies of what is the target's; which, by name.

    An absent t2d says what d2t says; maps of the whole vocabulary to itself say nothing.
    Raises UserError for tensors that are missing, and for those that nobody would read.
    """
    wanted, filled, dropped = export_checks.schema(stated), [], []
    whole = stated.draft_vocab_size == stated.target_vocab_size
    for name in (EMBEDDING, *([HEAD] if whole else [])):
        if (name in wanted) != (name in held):
            rows = target.head() if name == HEAD else (rows for _, rows in target.embedding())
            theirs = torch.cat(list(rows)).bfloat16()
            if name in wanted:
                held[name] = theirs
                filled.append(name)
            elif export_checks.bit_equal(held[name], theirs):
                del held[name]
                dropped.append(name)
    every = torch.arange(stated.target_vocab_size)
    if not whole and "d2t" in held and "t2d" not in held:
        held["t2d"] = torch.isin(every, torch.arange(len(held["d2t"])) + held["d2t"])
        filled.append("t2d")
    if whole and not any(held[name].any() for name in {"d2t"} & held.keys()):
        dropped += [name for name in ("d2t", "t2d") if held.pop(name, None) is not None]
    if missing := sorted(wanted.keys() - held.keys()):
        raise UserError(f"{source}: tensors {', '.join(missing)} are missing; fetch the drafter's files again")
    if unknown := sorted(held.keys() - wanted.keys()):
        raise UserError(
            f"{source}: nobody would read its tensors {', '.join(unknown)}: it is a drafter of another kind, or one "
            "with an embedding or a head that is not the target's; choose another drafter"
        )
    return {"filled": filled, "dropped": dropped}


def faults(folder: Path, held: Mapping[str, torch.Tensor], stated: Constants, facts: Mapping) -> Iterator[str]:
    """What is wrong with an adopted folder whose tensors fit their schema: its files, its tensors, its map."""
    for path in sorted(folder.iterdir()):
        if path.name not in {*FILES, "manifest.json"} and not path.name.startswith("."):
            yield f"{path.name}: no file of an adopted drafter, and an engine might load it"
    yield from (f"config.json: {fault}" for fault in _fit_faults(stated, facts))
    digests = files.read_json(folder / RECORD)["sha256"]
    for name in sorted(digests.keys() | held.keys()):
        if name not in held or tensors.digest(held[name]) != digests.get(name):
            yield f"{name}: not bit for bit what was read from the source"
    if "d2t" in held and not torch.equal(torch.arange(len(held["d2t"])) + held["d2t"], held["t2d"].nonzero().flatten()):
        yield "arange + d2t is not where t2d is true: d2t must be offsets of rising target ids"


def declared_faults(config: Mapping, stated: Constants, spec: Mapping) -> Iterator[str]:
    """Where the drafter is not what the run's configuration says; states are captured and k is served by the latter.

    `spec` holds `algorithm`, `capture_layers` in h(k) numbering and `speculative_tokens`.
    """
    if stated.algorithm != spec["algorithm"]:
        yield f"it is a drafter of {stated.algorithm}, not {spec['algorithm']}; set `algorithm: {stated.algorithm}`"
    if list(stated.capture_layers) != list(spec["capture_layers"]):
        yield (
            f"its layers in h(k) numbering are {list(stated.capture_layers)}, not {list(spec['capture_layers'])}; set "
            f"`capture_layers: {list(stated.capture_layers)}`"
        )
    if stated.block_size and spec["speculative_tokens"] != stated.block_size - 1:
        yield (
            f"it drafts blocks of {stated.block_size}, and every slot changes with another length; set "
            f"`speculative_tokens: {stated.block_size - 1}`, not {spec['speculative_tokens']}"
        )
    if stated.algorithm == "dflash" and config.get("sliding_window_non_causal") is not True:
        yield "sliding_window_non_causal is not true, so the engine would make every layer causal; adopt it again"
