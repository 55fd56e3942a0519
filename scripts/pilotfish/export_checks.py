# SPDX-License-Identifier: Apache-2.0
"""What an exported drafter must be: whole, of the verified checkpoint bit for bit, and the same drafter to a server."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from pilotfish import constants, export, replay, tensors
from pilotfish.constants import Constants
from pilotfish.device import DTYPE

SLOTS = 32  # of a held-out row, drafted from by the checkpoint and by the export


def schema(made: Constants) -> tensors.Schema:
    """Every tensor of an export, none besides, as speculators writes a drafter of these constants.

    The width of the MLP is free, the same in all three of its projections. DFlash takes its embedding, and with the
    whole vocabulary its head, from the target.
    """
    hidden, query, keys = made.hidden_size, made.heads * made.head_dim, made.kv_heads * made.head_dim
    mapped, of_layer = made.draft_vocab_size != made.target_vocab_size, {}
    ends: dict[str, tuple[int | str, ...]] = {
        "norm": (hidden,),
        "fc": (hidden, len(made.capture_layers) * hidden),
        "lm_head": (made.draft_vocab_size, hidden),
    }
    if made.algorithm == "dflash":
        inputs, ends["hidden_norm"] = hidden, (hidden,)
        of_layer |= {"self_attn.q_norm": (made.head_dim,), "self_attn.k_norm": (made.head_dim,)}
        if not mapped:
            del ends["lm_head"]
    else:
        inputs, ends["embed_tokens"] = 2 * hidden, (made.target_vocab_size, hidden)
        of_layer["hidden_norm"] = (hidden,)
    of_layer |= {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
        **{f"self_attn.{name}_proj": (rows, inputs) for name, rows in (("q", query), ("k", keys), ("v", keys))},
        "self_attn.o_proj": (hidden, query),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ("width", hidden)),
        "mlp.down_proj": (hidden, "width"),
    }
    layers = {f"layers.{n}.{name}": shape for n in range(made.draft_layers) for name, shape in of_layer.items()}
    wanted = {f"{name}.weight": tensors.Tensor(DTYPE, shape) for name, shape in (ends | layers).items()}
    if mapped:
        wanted["d2t"] = tensors.Tensor(torch.int64, (made.draft_vocab_size,), low=0)
        wanted["t2d"] = tensors.Tensor(torch.bool, (made.target_vocab_size,))
    return wanted


def tensor_faults(held: Mapping, checkpoint: Mapping, vocabulary: Mapping) -> Iterator[str]:
    """Tensors that are not bit for bit the checkpoint's, or not the vocabulary map's."""
    for name in sorted(held.keys() & checkpoint.keys()):
        if not bit_equal(held[name], checkpoint[name]):
            yield f"{name}: not bit for bit the verified checkpoint's"
    for name in ("d2t", "t2d"):
        if name in held and not bit_equal(held[name], vocabulary[name]):
            yield f"{name}: not the vocabulary map's"


def bit_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; NaN equals itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (left, right)))


def config_faults(config: dict, served: Constants, trained: Constants, spec: dict, target: str) -> Iterator[str]:
    """What config.json asks a server for that is not what was trained, or not what this run serves.

    `spec` holds `speculative_tokens` (k) and `max_model_len` of the engine; `target` is the target's name.
    """
    for difference in constants.differences(served, trained):
        yield f"config.json: {difference} as trained"
    for key in export.CODE_KEYS:
        if key in config:
            yield f"config.json: {key} asks a server to run Python beside the weights"
    asked = config["speculators_config"]
    if (k := asked["proposal_methods"][0]["speculative_tokens"]) != spec["speculative_tokens"]:
        yield f"config.json: speculative_tokens {k}, not {spec['speculative_tokens']} as configured"
    if (name := asked["verifier"]["name_or_path"]) != target:
        yield f"config.json: the target is {name!r}, not {target!r}"
    if served.max_position_embeddings < spec["max_model_len"]:
        yield (
            f"config.json: max_position_embeddings {served.max_position_embeddings} is below engine.max_model_len "
            f"{spec['max_model_len']}; lower the latter, or mend the target's config.json and train again"
        )


@torch.no_grad()
def drafting_faults(
    folder: Path, checkpoint: Path, target: Path, tokens_T: torch.Tensor, states_TLH: torch.Tensor
) -> Iterator[str]:
    """Whether an export, read back, drafts from stored states what its checkpoint does, logits to the last bit.

    `tokens_T` are a row's first tokens, `states_TLH` their states at the conditioning layers.
    """
    (ours, drafts), (theirs, _) = (
        replay.open_drafter(each, target).first_drafts(tokens_T, states_TLH) for each in (folder, checkpoint)
    )
    if not bit_equal(ours, theirs):
        slot = int((ours != theirs).any(1).nonzero()[0])
        yield f"read back, its logits differ from the checkpoint's, first at slot {slot}"
    held = load_file(folder / "model.safetensors")
    if "t2d" in held and not held["t2d"][drafts].all():
        yield "d2t, t2d: it drafts tokens that t2d does not hold"
