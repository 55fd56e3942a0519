# SPDX-License-Identifier: Apache-2.0
"""Exact acceptance of an EAGLE-3 drafter on stored greedy responses, with neither a server nor a target."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from pilotfish.rounds import Round, count_rounds, walk
from pilotfish.shards import ShardReader

# Shape suffixes: T tokens, S slots, L conditioning layers, H hidden size, A attention heads, K key/value
# heads, D head size, V draft vocabulary, k drafted tokens a round.
ROWS_PER_BATCH = 8  # rows that share one matrix product
SLOTS_PER_BLOCK = 512  # slots whose scores or logits are in memory at once

REQUIRED = ("draft_vocab_size", "vocab_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
REQUIRED += ("norm_before_residual",)  # where it is absent, speculators takes false and vLLM true
IMPLEMENTED = {  # the one value that the replay has a forward pass for; absent means the same
    "speculators_model_type": "eagle3",
    "model_type": "llama",
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "hidden_act": "silu",
    "rope_type": "default",
    **dict.fromkeys(("rope_scaling", "mrope_section")),
    "partial_rotary_factor": 1.0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm"), False),
}
LAYER = "layers.0."
NORMS = (f"{LAYER}input_layernorm", f"{LAYER}hidden_norm", f"{LAYER}post_attention_layernorm", "norm")
PROJECTIONS = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down"))
WEIGHTS = {f"{name}.weight" for name in (*NORMS, *PROJECTIONS, *MLP, "embed_tokens", "fc", "lm_head")}


@dataclass(frozen=True)
class ReplayRow:
    """One stored greedy response: the prompt's tokens and then the target's own, with nothing after them.

    `states_TLH` holds all tokens but the very last, at the drafter's conditioning layers in its order.
    `n_out` is how many response tokens to replay; more may be stored (see `count_rounds`).
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
        """Slots with a true feature that some round attends to."""
        return self.prompt_length + self.n_out - 2


class Eagle3Drafter:
    """The forward pass of a drafter folder that speculators saved, after its Eagle3DraftModel and vLLM's.

    Slot t takes token x[t+1] and the feature of position t, at RoPE position t, and predicts x[t+2]. Logits
    are fp32 whatever `dtype` is; the lowest index wins a tie. ValueError where another forward is asked for.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= config.get("transformer_layer_config", {})
        config |= config.get("rope_parameters") or {}
        for key in REQUIRED:
            if key not in config:
                raise ValueError(f"{path}: {key} is missing, and defaults differ; write it out")
        for key, value in IMPLEMENTED.items():
            if config.get(key, value) != value:
                raise ValueError(f"{path}: {key} = {config[key]!r} cannot be replayed, only {value!r}")
        self.config, self.dtype, self.head_dim = config, dtype, config["head_dim"]
        self.frequencies_D = config["rope_theta"] ** (torch.arange(0, self.head_dim, 2) / -self.head_dim)
        mapped = config["draft_vocab_size"] != config["vocab_size"]
        tensors = load_file(folder / "model.safetensors")
        if different := tensors.keys() ^ (WEIGHTS | ({"d2t", "t2d"} if mapped else set())):
            raise ValueError(f"{folder}: {sorted(different)} missing or unknown; export it again")
        self.target_ids_V = torch.arange(config["draft_vocab_size"]) + tensors.get("d2t", 0)
        self.head_VH = tensors["lm_head.weight"].float()
        self.weights = {name: tensors[name].to(dtype) for name in WEIGHTS}

    def project(self, states_SLH: Tensor) -> Tensor:
        """The target's states at the conditioning layers, as features [S, H]."""
        flat, width = states_SLH.to(self.dtype).flatten(1), self.weights["fc.weight"].shape[1]
        if flat.shape[1] != width:
            raise ValueError(f"{flat.shape[1]} values a position, not {width}: not the drafter's own layers")
        return self._linear(flat, "fc")

    def qkv(self, tokens_S: Tensor, features_SH: Tensor, positions_S: Tensor) -> tuple[Tensor, ...]:
        """Residual [S, H], rotated query [S, A, D], rotated key [S, K, D], value [S, K, D]."""
        embedded_SH = self._norm(self.weights["embed_tokens.weight"][tokens_S], NORMS[0])
        normed_SH = self._norm(features_SH, NORMS[1])
        inputs = torch.cat([embedded_SH, normed_SH], -1)
        projected = (self._linear(inputs, name) for name in PROJECTIONS[:3])
        query, key, value = (x.unflatten(1, (-1, self.head_dim)) for x in projected)
        residual_SH = normed_SH if self.config["norm_before_residual"] else features_SH
        return residual_SH, self._rotate(query, positions_S), self._rotate(key, positions_S), value

    def features(self, residual_SH: Tensor, attended_SAD: Tensor) -> tuple[Tensor, Tensor]:
        """What a slot's layer gives [S, H]: before the final norm, and after it, where the head reads."""
        residual_SH = residual_SH + self._linear(attended_SAD.flatten(1), PROJECTIONS[3])
        normed_SH = self._norm(residual_SH, NORMS[2])
        gate, up = (self._linear(normed_SH, name) for name in MLP[:2])
        feature_SH = residual_SH + self._linear(F.silu(gate) * up, MLP[2])
        return feature_SH, self._norm(feature_SH, NORMS[3])

    def logits(self, output_SH: Tensor) -> Tensor:
        """Logits [S, V] over the draft vocabulary, fp32."""
        return F.linear(output_SH.float(), self.head_VH)

    def finish(self, residual_SH: Tensor, attended_SAD: Tensor) -> tuple[Tensor, Tensor]:
        """The feature [S, H] to feed back, and the drafted token [S] as the target's id."""
        feature_SH, output_SH = self.features(residual_SH, attended_SAD)
        drafted_S = torch.cat([self.logits(block).argmax(-1) for block in output_SH.split(SLOTS_PER_BLOCK)])
        return output_SH if self.config.get("norm_output") else feature_SH, self.target_ids_V[drafted_S]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        assert x.dim() == 2, "on the CPU a sliced 3-D input becomes a batched product with the weight copied"
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = F.rms_norm(x.float(), x.shape[-1:], eps=self.config["rms_norm_eps"])
        return (x * self.weights[f"{name}.weight"].float()).to(self.dtype)

    def _rotate(self, x: Tensor, positions_S: Tensor) -> Tensor:
        angles = (positions_S[:, None] * self.frequencies_D).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def visible(slots_S: Tensor, n_true: int, n_steps: int) -> Tensor:
    """Mask [S, n_true + n_steps * S]: true keys up to the own slot, and the own key of each drafted step."""
    true = torch.arange(n_true) <= slots_S[:, None]
    own = torch.eye(len(slots_S), dtype=torch.bool).repeat(1, n_steps)
    return torch.cat([true, own], 1)


def _attention(query_SAD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    query, keys, values = (x.transpose(0, 1)[None] for x in (query_SAD, keys, values))
    return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)[0].transpose(0, 1)


def _attend(query_SAD: Tensor, true: tuple, own: list[tuple], slots_S: Tensor) -> Tensor:
    """One row's attention; `true` and each drafted step of `own` are (keys, values)."""
    blocks = []
    for block in torch.arange(len(slots_S)).split(SLOTS_PER_BLOCK):
        keys, values = (torch.cat([true[i], *(step[i][block] for step in own)]) for i in (0, 1))
        mask = visible(slots_S[block], len(true[0]), len(own))
        blocks.append(_attention(query_SAD[block], keys, values, mask))
    return torch.cat(blocks)


def _accept_batch(drafter: Eagle3Drafter, rows: Sequence[ReplayRow], k: int) -> list[Tensor]:
    """Draft from every start at once; step s runs only where all earlier steps were right."""
    lengths, n_starts = [row.n_true for row in rows], [row.n_out - 1 for row in rows]
    tokens = torch.cat([row.tokens_T[1 : row.n_true + 1] for row in rows])
    positions = torch.cat([torch.arange(length) for length in lengths])
    features = torch.cat([drafter.project(row.states_TLH[: row.n_true]) for row in rows])
    residual, query, keys, values = drafter.qkv(tokens, features, positions)
    true = list(zip(keys.split(lengths), values.split(lengths), strict=True))
    is_start = torch.cat([torch.arange(row.n_true) >= row.prompt_length - 1 for row in rows])
    residual, query, slots = residual[is_start], query[is_start], positions[is_start]
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(n_starts))
    following_Sk = torch.cat([_following(row, k) for row in rows])
    accepted, live, own = torch.zeros_like(slots), torch.arange(len(slots)), []
    for step in range(k):
        attended, counts = [], torch.bincount(row_of[live], minlength=len(rows)).tolist()
        for row, span in enumerate(torch.arange(len(live)).split(counts)):
            steps = [(keys[span], values[span]) for keys, values in own]
            attended.append(_attend(query[span], true[row], steps, slots[live[span]]))
        features, drafts = drafter.finish(residual, torch.cat(attended))
        right = drafts == following_Sk[live, step]
        live = live[right]
        accepted[live] += 1
        if step + 1 == k or not len(live):
            break
        residual, query, *drafted = drafter.qkv(drafts[right], features[right], slots[live] + step + 1)
        own = [(keys[right], values[right]) for keys, values in own] + [tuple(drafted)]
    return list(accepted.split(n_starts))


def _following(row: ReplayRow, k: int) -> Tensor:
    """The k tokens after each start [n_out - 1, k]; -1, which no drafter proposes, where none is stored."""
    tokens = torch.cat([row.tokens_T[row.prompt_length + 1 :], torch.full((k,), -1)])
    return tokens.unfold(0, k, 1)[: row.n_out - 1]


@torch.no_grad()
def acceptance_table(drafter: Eagle3Drafter, rows: Sequence[ReplayRow], k: int) -> list[Tensor]:
    """For each row, how many of k drafted tokens hold [n_out - 1] if a round starts at 0, 1, ..."""
    batches = (rows[first : first + ROWS_PER_BATCH] for first in range(0, len(rows), ROWS_PER_BATCH))
    return [table for batch in batches for table in _accept_batch(drafter, batch, k)]


@torch.no_grad()
def first_drafts(drafter: Eagle3Drafter, tokens_T: Tensor, states_TLH: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T - 1, V] of the first drafted step at every slot of one row, and the drafted target ids [T - 1]."""
    slots_S = torch.arange(len(tokens_T) - 1)
    residual, query, keys, values = drafter.qkv(tokens_T[1:], drafter.project(states_TLH[:-1]), slots_S)
    attended = _attend(query, (keys, values), [], slots_S)
    logits_SV = drafter.logits(drafter.features(residual, attended)[1])
    return logits_SV, drafter.target_ids_V[logits_SV.argmax(-1)]


@torch.no_grad()
def replay_sequential(drafter: Eagle3Drafter, row: ReplayRow, k: int) -> list[Round]:
    """One round at a time with a key/value cache, as an engine does: the slow oracle for table and walk."""
    following_Sk, steps, start, filled = _following(row, k), [], 0, 0
    kv_heads = drafter.config["num_key_value_heads"]
    keys, values = torch.zeros(2, row.n_true + k, kv_heads, drafter.head_dim, dtype=drafter.dtype)
    while start + 1 < row.n_out:
        slot = row.prompt_length - 1 + start
        # True features overwrite the keys and values that the last round drafted.
        first, tokens, drafts = filled, row.tokens_T[filled + 1 : slot + 2], []
        features = drafter.project(row.states_TLH[filled : slot + 1])
        for end in range(slot + 1, slot + k + 1):
            residual, query, key, value = drafter.qkv(tokens, features, torch.arange(first, end))
            keys[first:end], values[first:end] = key, value
            attended = _attention(query[-1:], keys[:end], values[:end], None)
            features, tokens = drafter.finish(residual[-1:], attended)
            first = end
            drafts.append(int(tokens))
        steps.append(int((torch.tensor(drafts) == following_Sk[start]).long().cumprod(0).sum()))
        start, filled = start + steps[-1] + 1, slot + 1
    return count_rounds(steps, row.n_stored)


def replay_samples(drafter: Eagle3Drafter, reader: ShardReader, every: Dataset, k: int) -> dict[int, list[Round]]:
    """Rounds of each sample's response by row number; a batch of rows is in memory at a time.

    A response of one token, which came from prefill, has no round.
    """
    found: dict[int, list[Round]] = {}
    for start in range(0, len(every), ROWS_PER_BATCH):
        numbers, batch = [], []
        for sample in every.select(range(start, min(start + ROWS_PER_BATCH, len(every)))):
            found[sample["row"]] = []
            n_out = len(sample["input_ids"]) - sample["prompt_length"]
            if n_out > 1:
                numbers.append(sample["row"])
                states = reader.read(sample["row"]).hidden_states
                batch.append(ReplayRow(torch.tensor(sample["input_ids"]), states, sample["prompt_length"], n_out))
        tables = acceptance_table(drafter, batch, k) if batch else []
        for row, stored, table in zip(numbers, batch, tables, strict=True):
            found[row] = walk(table, stored.n_stored)
    return found
