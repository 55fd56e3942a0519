# SPDX-License-Identifier: Apache-2.0
"""What the replays of all drafters share: a stored row, a drafter's folder, and the parts of a forward pass."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from pilotfish import files

# Shape suffixes: T tokens, S slots, L conditioning layers, H hidden size, A attention heads, K key/value
# heads, D head size, V draft vocabulary, k drafted tokens a round.
SLOTS_AT_ONCE = 512  # slots whose scores or logits are in memory at once

REQUIRED = ("draft_vocab_size", "vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
REQUIRED += ("rms_norm_eps", "rope_theta")
IMPLEMENTED = {  # the one value that the replays have a forward pass for; absent means the same
    "hidden_act": "silu",
    "rope_type": "default",
    **dict.fromkeys(("rope_scaling", "mrope_section")),
    "partial_rotary_factor": 1.0,
    **dict.fromkeys(("attention_bias", "mlp_bias"), False),
}


@dataclass(frozen=True)
class ReplayRow:
    """One stored greedy response: the prompt's tokens and then the target's own, with nothing after them.

    `states_TLH` holds all tokens but the very last, at the drafter's conditioning layers in its order.
    `n_out` is how many response tokens to replay; more may be stored (see `rounds.count_rounds`).
    """

    tokens_T: Tensor
    states_TLH: Tensor
    prompt_length: int
    n_out: int

    def __post_init__(self) -> None:
        tokens, states = len(self.tokens_T), len(self.states_TLH)
        if self.prompt_length < 1 or not 1 <= self.n_out <= self.n_stored or states != tokens - 1:
            sizes = f"{tokens} tokens, {states} states, prompt {self.prompt_length}, response {self.n_out}"
            cure = "prompt and response need a token, all tokens but the last a state; capture it again"
            raise ValueError(f"a row of {sizes}: {cure}")

    @property
    def n_stored(self) -> int:
        """Response tokens that are stored: at least `n_out`."""
        return len(self.tokens_T) - self.prompt_length

    @property
    def n_true(self) -> int:
        """Positions with a true state that some round attends to."""
        return self.prompt_length + self.n_out - 2

    def following(self, k: int) -> Tensor:
        """The k tokens after each start [n_out - 1, k]; -1, which no drafter proposes, where none is stored."""
        tokens = torch.cat([self.tokens_T[self.prompt_length + 1 :], torch.full((k,), -1)])
        return tokens.unfold(0, k, 1)[: self.n_out - 1]


class Drafter:
    """A drafter's folder as speculators saved it: config, weights, draft vocabulary, and parts of the forward pass.

    Logits are fp32 whatever `dtype` is; `capture_layers` are the h(k) numbers that it is conditioned on, in its
    order. ValueError where the folder asks for another forward pass than the
    class has: a key of `required` is missing, or one of `implemented` has another value.
    """

    capture_layers: list[int]
    weights: dict[str, Tensor]
    head_VH: Tensor
    target_ids_V: Tensor  # of each draft token

    def __init__(self, folder: Path, dtype: torch.dtype, required: Collection[str], implemented: Mapping) -> None:
        path = folder / "config.json"
        config = files.read_json(path)
        config |= config.get("transformer_layer_config", {})
        config |= config.get("rope_parameters") or {}
        for key in (*REQUIRED, *required):
            if config.get(key) is None:
                raise ValueError(f"{path}: {key} is missing, and defaults differ; write it out")
        layer_types = {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
        for key, value in (IMPLEMENTED | implemented | layer_types).items():
            if config.get(key, value) != value:
                raise ValueError(f"{path}: {key} = {config[key]!r} cannot be replayed, only {value!r}")
        self.folder, self.config, self.dtype, self.head_dim = folder, config, dtype, config["head_dim"]
        self.mapped = config["draft_vocab_size"] != config["vocab_size"]
        self.frequencies_D = config["rope_theta"] ** (torch.arange(0, self.head_dim, 2) / -self.head_dim)

    def load(self, names: set[str]) -> dict[str, Tensor]:
        """Read the weights of exactly these names, and the map of a reduced vocabulary; returns all as stored."""
        tensors = load_file(self.folder / "model.safetensors")
        if different := tensors.keys() ^ (names | ({"d2t", "t2d"} if self.mapped else set())):
            raise ValueError(f"{self.folder}: {sorted(different)} missing or unknown; export it again")
        self.target_ids_V = torch.arange(self.config["draft_vocab_size"]) + tensors.get("d2t", 0)
        self.weights = {name: tensors[name].to(self.dtype) for name in names}
        return tensors

    def project(self, states_SLH: Tensor) -> Tensor:
        """The target's states at the conditioning layers, as features [S, H]."""
        flat, width = states_SLH.to(self.dtype).flatten(1), self.weights["fc.weight"].shape[1]
        if flat.shape[1] != width:
            raise ValueError(f"{flat.shape[1]} values a position, not {width}: not the drafter's own layers")
        return self._linear(flat, "fc")

    def logits(self, output_SH: Tensor) -> Tensor:
        """Logits [S, V] over the draft vocabulary, fp32."""
        return F.linear(output_SH.float(), self.head_VH)

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return self._linear(x, name).unflatten(1, (-1, self.head_dim))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        assert x.dim() == 2, "on the CPU a sliced 3-D input becomes a batched product with the weight copied"
        return F.linear(x, self.weights[f"{name}.weight"])

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"].float()
        return F.rms_norm(x.float(), weight.shape, weight, self.config["rms_norm_eps"]).to(self.dtype)

    def _rotate(self, x: Tensor, positions_S: Tensor) -> Tensor:
        angles = (positions_S[:, None] * self.frequencies_D).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def attention(query_SAD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [S, A, D] over keys and values [N, K, D]; `mask` [S, N] is true where a slot may look."""
    query, keys, values = (x.transpose(0, 1)[None] for x in (query_SAD, keys, values))
    return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)[0].transpose(0, 1)
