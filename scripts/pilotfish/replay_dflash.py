# SPDX-License-Identifier: Apache-2.0
"""Exact acceptance of a DFlash drafter on stored greedy responses: every block of every start in one pass."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pilotfish import drafting
from pilotfish.drafting import Drafter, ReplayRow, attention
from pilotfish.heads import TargetTensors
from pilotfish.rounds import Round, count_rounds

# Shape suffixes besides those of `drafting`: N blocks, B tokens a block; where no heads are, D depths (B - 1).
SLOTS_PER_ATTENTION = 64  # slots whose scores are computed together; those of other blocks are masked

LAYERS_KEY = "aux_hidden_state_layer_ids"
REQUIRED = (LAYERS_KEY, "block_size", "mask_token_id")
IMPLEMENTED = {
    "speculators_model_type": "dflash",
    "model_type": "qwen3",
    "sample_from_anchor": False,
    "is_causal": False,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "dflash_config": None,
}
ENDS = ("fc", "hidden_norm", "norm")
IN_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def weight_names(layers: int, mapped: bool) -> set[str]:
    """Tensors of a drafter of so many layers; a reduced vocabulary (`mapped`) has a head of its own."""
    names = (*ENDS, *(["lm_head"] if mapped else []))
    inside = (f"layers.{layer}.{name}" for layer in range(layers) for name in IN_LAYER)
    return {f"{name}.weight" for name in (*names, *inside)}


class DFlashDrafter(Drafter):
    """The forward pass of a drafter folder that speculators saved, after its DFlashDraftModel and vLLM's.

    A block holds the anchor x[a] and B - 1 mask tokens, at RoPE positions a to a + B - 1; its slot j predicts
    x[a+j]. Every slot attends to its whole block and to the target's states before the anchor, which enter as
    keys and values only. Embedding and, for the whole vocabulary, head are those of the target in `target`.
    """

    def __init__(self, folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype, REQUIRED, IMPLEMENTED)
        if not self.config.get("sliding_window_non_causal", True):
            cause = "the engine would make every layer causal, also those trained on whole blocks"
            raise ValueError(f"{folder}/config.json: sliding_window_non_causal = False: {cause}; set it to true")
        self.capture_layers = self.config[LAYERS_KEY]
        self.layers, self.block_size = self.config["num_hidden_layers"], self.config["block_size"]
        tensors, of_target = self.load(weight_names(self.layers, self.mapped)), TargetTensors(target)
        self.embedding_VH = torch.cat([rows for _, rows in of_target.embedding()])
        due, held = [self.config["vocab_size"], *self.weights["norm.weight"].shape], list(self.embedding_VH.shape)
        if held != due:
            raise ValueError(f"{target}: an embedding of {held}, not {due}: not the target of {folder}")
        self.blocks_at_once = max(1, drafting.SLOTS_AT_ONCE // self.block_size)
        self.head_VH = (tensors["lm_head.weight"] if self.mapped else torch.cat(list(of_target.head()))).float()
        self.draft_ids = torch.full((self.config["vocab_size"],), -1)  # of each target id, -1 where it has none
        self.draft_ids[self.target_ids_V] = torch.arange(len(self.target_ids_V))

    def context(self, states_SLH: Tensor, first: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [S, K, D] of each layer, of the target's states at positions `first`, first + 1, ...

        They see no input_layernorm.
        """
        features_SH = self._norm(self.project(states_SLH), "hidden_norm")
        positions_S = torch.arange(first, first + len(features_SH))
        return [self._keys_values(features_SH, layer, positions_S) for layer in range(self.layers)]

    def outputs(self, tokens_N: Tensor, anchors_N: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What the head reads [N, B, H] of blocks that start from some tokens, at rising positions `anchors_N`."""
        tokens_NB = torch.full((len(tokens_N), self.block_size), self.config["mask_token_id"])
        tokens_NB[:, 0] = tokens_N
        positions_S = (anchors_N[:, None] + torch.arange(self.block_size)).flatten()
        hidden_SH = self.embedding_VH[tokens_NB.flatten()].to(self.dtype)
        for layer, (keys, values) in enumerate(context):
            name = f"layers.{layer}"
            normed_SH = self._norm(hidden_SH, f"{name}.input_layernorm")
            query = self._norm(self._heads(normed_SH, f"{name}.self_attn.q_proj"), f"{name}.self_attn.q_norm")
            own = self._keys_values(normed_SH, layer, positions_S)
            attended = self._attend(self._rotate(query, positions_S), own, (keys, values), anchors_N)
            hidden_SH = hidden_SH + self._linear(attended.flatten(1), f"{name}.self_attn.o_proj")
            normed_SH = self._norm(hidden_SH, f"{name}.post_attention_layernorm")
            hidden_SH = hidden_SH + self._mlp(normed_SH, f"{name}.mlp")
        return self._norm(hidden_SH, "norm").unflatten(0, (-1, self.block_size))

    def _keys_values(self, inputs_SH: Tensor, layer: int, positions_S: Tensor) -> tuple[Tensor, Tensor]:
        name = f"layers.{layer}.self_attn"
        keys = self._norm(self._heads(inputs_SH, f"{name}.k_proj"), f"{name}.k_norm")
        return self._rotate(keys, positions_S), self._heads(inputs_SH, f"{name}.v_proj")

    def _attend(self, query_SAD: Tensor, own: tuple, context: tuple, anchors_N: Tensor) -> Tensor:
        """Attention of blocks over the row's context, one copy for all, and their own (keys, values)."""
        attended = []
        for some_N in torch.arange(len(anchors_N)).split(max(1, SLOTS_PER_ATTENTION // self.block_size)):
            slots = slice(int(some_N[0]) * self.block_size, (int(some_N[-1]) + 1) * self.block_size)
            seen = int(anchors_N[some_N[-1]])
            keys, values = (torch.cat([context[i][:seen], own[i][slots]]) for i in (0, 1))
            mask = visible(anchors_N[some_N], seen, self.block_size)
            attended.append(attention(query_SAD[slots], keys, values, mask))
        return torch.cat(attended)

    def _logits(self, tokens_T: Tensor, anchors_N: Tensor, states_TLH: Tensor, slots: slice) -> Iterator[Tensor]:
        """Logits [blocks * slots, V] at some slots of each block, some blocks at a time."""
        context = self.context(states_TLH)
        for some_N in anchors_N.split(self.blocks_at_once):
            yield self.logits(self.outputs(tokens_T[some_N], some_N, context)[:, slots].flatten(0, 1))

    @torch.no_grad()
    def ranked(self, rows: Sequence[ReplayRow], top_k: int) -> list[tuple[Tensor, Tensor]]:
        """For each row, log-probabilities [n_out - 1, D, K] of the likeliest tokens, and ranks [n_out - 1, D].

        One for each start 0, 1, ... and depth; K is `top_k`, at most the draft vocabulary, which the
        probabilities are over. The rank is the true following token's among them, the lowest index first in
        a tie; -1 where it is not among them, or not stored.
        """
        depth, top_k = self.block_size - 1, min(top_k, len(self.target_ids_V))
        found = []
        for row in rows:
            following_SD = row.following(depth)
            # -1 (not stored) has no draft id either.
            wanted = torch.where(following_SD < 0, -1, self.draft_ids[following_SD]).split(self.blocks_at_once)
            anchors = torch.arange(row.prompt_length, row.prompt_length + row.n_out - 1)
            log_probs, ranks = [torch.empty(0, depth, top_k)], [torch.empty(0, depth, dtype=torch.long)]
            if len(anchors):
                blocks = self._logits(row.tokens_T, anchors, row.states_TLH[: row.n_true], slice(1, None))
                for logits, wanted_ND in zip(blocks, wanted, strict=True):
                    likeliest = logits.topk(top_k).values
                    ranks.append(rank(logits, wanted_ND.flatten(), likeliest).view_as(wanted_ND))
                    likeliest = likeliest - logits.logsumexp(-1, keepdim=True)
                    log_probs.append(likeliest.unflatten(0, wanted_ND.shape))
            found.append((torch.cat(log_probs), torch.cat(ranks)))
        return found

    def table(self, rows: Sequence[ReplayRow], k: int) -> list[Tensor]:
        """For each row, how many of k drafted tokens hold [n_out - 1] if a round starts at 0, 1, ..."""
        self.check_block(k)
        return [accepted(ranks) for _, ranks in self.ranked(rows, 1)]

    def check_block(self, k: int) -> None:
        """ValueError unless k is the whole block: one of another length drafts other tokens at every slot."""
        if k != self.block_size - 1:
            raise ValueError(f"{self.folder}: drafts {self.block_size - 1} tokens a round, not {k}; set this number")

    @torch.no_grad()
    def first_drafts(self, tokens_T: Tensor, states_TLH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T - 1, V] of the first drafted token if rounds start at tokens 1, 2, ...; drafted target ids [T - 1].

        `states_TLH` are the states of all the tokens; the last one is not read.
        """
        anchors = torch.arange(1, len(tokens_T))
        logits_NV = torch.cat(list(self._logits(tokens_T, anchors, states_TLH[:-1], slice(1, 2))))
        return logits_NV, self.target_ids_V[logits_NV.argmax(-1)]

    @torch.no_grad()
    def sequential(self, row: ReplayRow, k: int) -> list[Round]:
        """One round at a time with a key/value cache, as an engine does: the slow oracle for table and walk."""
        self.check_block(k)
        following_SD, steps, start, filled = row.following(k), [], 0, 0
        cache = self.context(row.states_TLH[:0])
        while start + 1 < row.n_out:
            anchor = row.prompt_length + start
            new = self.context(row.states_TLH[filled:anchor], filled)
            cache = [tuple(map(torch.cat, zip(old, more, strict=True))) for old, more in zip(cache, new, strict=True)]
            output_BH = self.outputs(row.tokens_T[anchor : anchor + 1], torch.tensor([anchor]), cache)[0]
            drafts_D = self.target_ids_V[self.logits(output_BH[1:]).argmax(-1)]
            steps.append(int((drafts_D == following_SD[start]).long().cumprod(0).sum()))
            start, filled = start + steps[-1] + 1, anchor
        return count_rounds(steps, row.n_stored)


def visible(anchors_N: Tensor, seen: int, block_size: int) -> Tensor:
    """Mask [N * B, seen + N * B]: the context before the own anchor, and all of the own block."""
    blocks_S = torch.arange(len(anchors_N)).repeat_interleave(block_size)
    context = torch.arange(seen) < anchors_N[blocks_S, None]
    return torch.cat([context, blocks_S[:, None] == blocks_S], 1)


def rank(logits_SV: Tensor, wanted_S: Tensor, likeliest_SK: Tensor) -> Tensor:
    """Place [S] of a draft token among the K largest logits, the lowest index first in a tie; -1 where it is not."""
    own_S = logits_SV.gather(1, wanted_S.clamp(min=0)[:, None])[:, 0]
    places_S = torch.full_like(wanted_S, -1)
    # Only these few can be among them; a whole row is compared, since ties may reach beyond the K.
    inside = ((wanted_S >= 0) & (own_S >= likeliest_SK[:, -1])).nonzero()[:, 0]
    logits, own = logits_SV[inside], own_S[inside, None]
    before = torch.arange(logits_SV.shape[1]) < wanted_S[inside, None]
    places = ((logits > own) | (logits == own) & before).sum(1)
    places_S[inside] = torch.where(places < likeliest_SK.shape[1], places, -1)
    return places_S


def accepted(ranks_SD: Tensor) -> Tensor:
    """How many tokens of the chain of likeliest ones hold at each start [S]."""
    return (ranks_SD == 0).long().cumprod(1).sum(1)
