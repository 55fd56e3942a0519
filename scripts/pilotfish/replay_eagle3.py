# SPDX-License-Identifier: Apache-2.0
"""Exact acceptance of an EAGLE-3 drafter on stored greedy responses: the true features, then its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pilotfish import drafting
from pilotfish.drafting import Drafter, ReplayRow, attention
from pilotfish.rounds import Round, count_rounds

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
REQUIRED = (LAYERS_KEY, "norm_before_residual")  # speculators takes false for the latter, vLLM true
IMPLEMENTED = {
    "speculators_model_type": "eagle3",
    "model_type": "llama",
    "num_hidden_layers": 1,
    **dict.fromkeys(("norm_before_fc", "fc_norm"), False),
}
LAYER = "layers.0."
NORMS = (f"{LAYER}input_layernorm", f"{LAYER}hidden_norm", f"{LAYER}post_attention_layernorm", "norm")
PROJECTIONS = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down"))
WEIGHTS = {f"{name}.weight" for name in (*NORMS, *PROJECTIONS, *MLP, "embed_tokens", "fc", "lm_head")}


class Eagle3Drafter(Drafter):
    """The forward pass of a drafter folder that speculators saved, after its Eagle3DraftModel and vLLM's.

    Slot t takes token x[t+1] and the feature of position t, at RoPE position t, and predicts x[t+2]. The
    lowest index wins a tie.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype, REQUIRED, IMPLEMENTED)
        self.capture_layers = self.config[LAYERS_KEY]
        self.head_VH = self.load(WEIGHTS)["lm_head.weight"].float()

    def qkv(self, tokens_S: Tensor, features_SH: Tensor, positions_S: Tensor) -> tuple[Tensor, ...]:
        """Residual [S, H], rotated query [S, A, D], rotated key [S, K, D], value [S, K, D]."""
        embedded_SH = self._norm(self.weights["embed_tokens.weight"][tokens_S], NORMS[0])
        normed_SH = self._norm(features_SH, NORMS[1])
        inputs = torch.cat([embedded_SH, normed_SH], -1)
        query, key, value = (self._heads(inputs, name) for name in PROJECTIONS[:3])
        residual_SH = normed_SH if self.config["norm_before_residual"] else features_SH
        return residual_SH, self._rotate(query, positions_S), self._rotate(key, positions_S), value

    def features(self, residual_SH: Tensor, attended_SAD: Tensor) -> tuple[Tensor, Tensor]:
        """What a slot's layer gives [S, H]: before the final norm, and after it, where the head reads."""
        residual_SH = residual_SH + self._linear(attended_SAD.flatten(1), PROJECTIONS[3])
        feature_SH = residual_SH + self._mlp(self._norm(residual_SH, NORMS[2]), f"{LAYER}mlp")
        return feature_SH, self._norm(feature_SH, NORMS[3])

    def finish(self, residual_SH: Tensor, attended_SAD: Tensor) -> tuple[Tensor, Tensor]:
        """The feature [S, H] to feed back, and the drafted token [S] as the target's id."""
        feature_SH, output_SH = self.features(residual_SH, attended_SAD)
        blocks = output_SH.split(drafting.SLOTS_AT_ONCE)
        drafted_S = torch.cat([self.logits(block).argmax(-1) for block in blocks])
        return output_SH if self.config.get("norm_output") else feature_SH, self.target_ids_V[drafted_S]

    @torch.no_grad()
    def table(self, rows: Sequence[ReplayRow], k: int) -> list[Tensor]:
        """For each row, how many of k drafted tokens hold [n_out - 1] if a round starts at 0, 1, ...

        Drafts from every start at once; step s runs only where all earlier steps were right.
        """
        lengths, n_starts = [row.n_true for row in rows], [row.n_out - 1 for row in rows]
        tokens = torch.cat([row.tokens_T[1 : row.n_true + 1] for row in rows])
        positions = torch.cat([torch.arange(length) for length in lengths])
        features = torch.cat([self.project(row.states_TLH[: row.n_true]) for row in rows])
        residual, query, keys, values = self.qkv(tokens, features, positions)
        true = list(zip(keys.split(lengths), values.split(lengths), strict=True))
        is_start = torch.cat([torch.arange(row.n_true) >= row.prompt_length - 1 for row in rows])
        residual, query, slots = residual[is_start], query[is_start], positions[is_start]
        row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(n_starts))
        following_Sk = torch.cat([row.following(k) for row in rows])
        accepted, live, own = torch.zeros_like(slots), torch.arange(len(slots)), []
        for step in range(k):
            attended, counts = [], torch.bincount(row_of[live], minlength=len(rows)).tolist()
            for row, span in enumerate(torch.arange(len(live)).split(counts)):
                steps = [(keys[span], values[span]) for keys, values in own]
                attended.append(_attend(query[span], true[row], steps, slots[live[span]]))
            features, drafts = self.finish(residual, torch.cat(attended))
            right = drafts == following_Sk[live, step]
            live = live[right]
            accepted[live] += 1
            if step + 1 == k or not len(live):
                break
            residual, query, *drafted = self.qkv(drafts[right], features[right], slots[live] + step + 1)
            own = [(keys[right], values[right]) for keys, values in own] + [tuple(drafted)]
        return list(accepted.split(n_starts))

    @torch.no_grad()
    def first_drafts(self, tokens_T: Tensor, states_TLH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T - 1, V] of the first drafted token if rounds start at tokens 1, 2, ...; drafted target ids [T - 1].

        `states_TLH` are the states of all the tokens; the last one is not read.
        """
        slots_S = torch.arange(len(tokens_T) - 1)
        residual, query, keys, values = self.qkv(tokens_T[1:], self.project(states_TLH[:-1]), slots_S)
        attended = _attend(query, (keys, values), [], slots_S)
        logits_SV = self.logits(self.features(residual, attended)[1])
        return logits_SV, self.target_ids_V[logits_SV.argmax(-1)]

    @torch.no_grad()
    def sequential(self, row: ReplayRow, k: int) -> list[Round]:
        """One round at a time with a key/value cache, as an engine does: the slow oracle for table and walk."""
        following_Sk, steps, start, filled = row.following(k), [], 0, 0
        kv_heads = self.config["num_key_value_heads"]
        keys, values = torch.zeros(2, row.n_true + k, kv_heads, self.head_dim, dtype=self.dtype)
        while start + 1 < row.n_out:
            slot = row.prompt_length - 1 + start
            # True features overwrite the keys and values that the last round drafted.
            first, tokens, drafts = filled, row.tokens_T[filled + 1 : slot + 2], []
            features = self.project(row.states_TLH[filled : slot + 1])
            for end in range(slot + 1, slot + k + 1):
                residual, query, key, value = self.qkv(tokens, features, torch.arange(first, end))
                keys[first:end], values[first:end] = key, value
                attended = attention(query[-1:], keys[:end], values[:end], None)
                features, tokens = self.finish(residual[-1:], attended)
                first = end
                drafts.append(int(tokens))
            steps.append(int((torch.tensor(drafts) == following_Sk[start]).long().cumprod(0).sum()))
            start, filled = start + steps[-1] + 1, slot + 1
        return count_rounds(steps, row.n_stored)


def visible(slots_S: Tensor, n_true: int, n_steps: int) -> Tensor:
    """Mask [S, n_true + n_steps * S]: true keys up to the own slot, and the own key of each drafted step."""
    true = torch.arange(n_true) <= slots_S[:, None]
    own = torch.eye(len(slots_S), dtype=torch.bool).repeat(1, n_steps)
    return torch.cat([true, own], 1)


def _attend(query_SAD: Tensor, true: tuple, own: list[tuple], slots_S: Tensor) -> Tensor:
    """One row's attention; `true` and each drafted step of `own` are (keys, values)."""
    blocks = []
    for block in torch.arange(len(slots_S)).split(drafting.SLOTS_AT_ONCE):
        keys, values = (torch.cat([true[i], *(step[i][block] for step in own)]) for i in (0, 1))
        mask = visible(slots_S[block], len(true[0]), len(own))
        blocks.append(attention(query_SAD[block], keys, values, mask))
    return torch.cat(blocks)
