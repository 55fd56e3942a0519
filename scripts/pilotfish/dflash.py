# SPDX-License-Identifier: Apache-2.0
"""DFlash in training: blocks drafted in one pass from anchors, on speculators' model with the paper's labels.

Shape suffixes: T tokens of the pack, A anchors, B tokens of a block, S = A * B slots, V draft vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from speculators.losses import dflash_loss_decay, resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.utils import conditional_torch_compile
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import CollateFn
from transformers import AutoTokenizer

from pilotfish.device import on_gpu
from pilotfish.errors import UserError

EXTRA = 1  # tokens of a view beside those with states: the last, which is a label only
IGNORED = -100  # a label that no loss is taken on


class Blocks(NamedTuple):
    """What a forward has trained on: position, label in the draft vocabulary, and whether each slot counts [A, B].

    A label outside the draft vocabulary is IGNORED.
    """

    positions_AB: torch.Tensor
    labels_AB: torch.Tensor
    counts_AB: torch.Tensor


@SpeculatorModel.register("pilotfish_dflash")
class DFlash(DFlashDraftModel):
    """speculators' DFlash, but with labels from the data, and blocks that end with their document.

    speculators takes the likeliest token of the draft vocabulary for the label, also where the data's own lies
    outside of it, and lets a block run on into the next document.
    """

    def _build_attention_mask(self, loss_mask, max_anchors, document_ids, device):
        # An anchor needs a label: m[a] & m[a+1], in one document.
        follows = F.pad((document_ids[:, 1:] == document_ids[:, :-1]) & loss_mask[:, 1:].bool(), (0, 1))
        return super()._build_attention_mask(loss_mask.bool() & follows, max_anchors, document_ids, device)

    @conditional_torch_compile
    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, layers * H]
        input_ids: torch.Tensor,  # [1, T]
        loss_mask: torch.Tensor,  # [1, T]
        verifier_last_hidden_states: torch.Tensor,  # [1, T, H]
        document_ids: torch.Tensor,  # [1, T], -1 for padding
        position_ids: torch.Tensor | None = None,  # [1, T]
        *,
        anchors: int,
        gamma: float,
        losses: dict,  # name -> (loss of logits and the target's [1, S, V], weight); `hard` has None
        noise: float = 0.0,
        **_counts,  # what the collation says of samples it left out
    ) -> tuple[Blocks, torch.Tensor, dict]:
        """The blocks, the loss and the metrics of one pack; padding must be at least a block long."""
        if noise and self.training:
            hidden_states = hidden_states + noise * self._scale(hidden_states) * torch.randn_like(hidden_states)
        _, logits_SV, targets_SV, mask_S, positions_S = self._backbone_forward(
            hidden_states, input_ids, loss_mask, verifier_last_hidden_states, document_ids, position_ids,
            max_anchors=anchors,
        )  # fmt: skip
        size = self.block_size
        documents_AB = document_ids[0, positions_S].view(-1, size)
        counts_S = mask_S.bool() & (documents_AB == documents_AB[:, :1]).view(1, -1)
        labels_S = self._labels(input_ids[:, positions_S], counts_S)
        slots_S = torch.arange(counts_S.shape[1], device=counts_S.device)[None] % size
        weights_S = dflash_loss_decay(slots_S.float(), gamma) * (labels_S != IGNORED)
        loss = torch.zeros((), device=counts_S.device)
        for term, weight in losses.values():
            each_S = _hard(logits_SV, labels_S) if term is None else term(logits_SV, targets_SV)
            loss = loss + weight * (each_S * weights_S).sum() / weights_S.sum().clamp(min=1e-6)
        right_AB = (logits_SV.argmax(-1) == labels_S).view(-1, size)
        blocks = Blocks(positions_S.view(-1, size), labels_S.view(-1, size), counts_S.view(-1, size))
        return blocks, loss, _metrics(loss.detach(), right_AB, blocks.counts_AB)

    def _scale(self, states_TC: torch.Tensor) -> torch.Tensor:
        """Root mean square of each conditioning layer's states, in the shape of a token's [1, 1, layers * H]."""
        states_TLH = states_TC.unflatten(-1, (len(self.target_layer_ids), -1)).float()
        real = (states_TC != 0).any(-1).sum().clamp(min=1)  # padding is zero
        scale_LH = (states_TLH.square().sum((1, 3)) / (real * states_TLH.shape[-1])).sqrt()[..., None]
        return scale_LH.expand(-1, -1, states_TLH.shape[-1]).flatten(1)[:, None].to(states_TC)

    def _labels(self, tokens_S: torch.Tensor, counts_S: torch.Tensor) -> torch.Tensor:
        """The data's tokens as indices of the draft vocabulary."""
        if self.t2d is not None:
            counts_S = counts_S & self.t2d[tokens_S]
            tokens_S = (self.t2d.long().cumsum(0) - 1)[tokens_S]
        return torch.where(counts_S, tokens_S, IGNORED)


def _hard(logits_SV: torch.Tensor, labels_S: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_SV[0].float(), labels_S[0], reduction="none", ignore_index=IGNORED)[None]


def _metrics(loss: torch.Tensor, right_AB: torch.Tensor, counts_AB: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums and totals as speculators' trainer wants them; a slot is right if all before it in its block are."""
    one = torch.ones_like(loss)
    found = {"loss_sum": loss, "loss_total": one}
    right_AB, counts_AB = right_AB[:, 1:].long().cumprod(1), counts_AB[:, 1:]
    for slot in range(right_AB.shape[1]):
        found[f"full_acc_{slot}_sum"] = (right_AB[:, slot] * counts_AB[:, slot]).sum()
        found[f"full_acc_{slot}_total"] = counts_AB[:, slot].sum()
    return found


def build(spec: Mapping, target: Path, layers: list[int], maps: Mapping[str, torch.Tensor]) -> DFlash:
    """A fresh DFlash drafter in fp32; embedding and head are the target's, frozen."""
    trust = spec["trust_remote_code"]
    depth = spec["draft_layers"]
    layer = create_transformer_layer_config(
        str(target), num_layers=depth, draft_arch="qwen3", hidden_act="silu", sliding_window=2048,
        full_attention_indices=list(range(depth)), trust_remote_code=trust,
    )  # fmt: skip
    # A window that no layer uses would still be exported, and some servers apply it.
    layer.sliding_window = None
    return DFlash.from_training_args(
        layer,
        t2d=maps["t2d"],
        d2t=maps["d2t"],
        draft_vocab_size=len(maps["d2t"]),
        block_size=spec["block_size"],
        mask_token_id=mask_token_id(spec["mask_token"], target, layer.vocab_size, trust),
        verifier_name_or_path=str(target),
        draft_attn_impl="simple_flex_attention" if on_gpu() else "eager",
        target_layer_ids=layers,
        # No layer slides; but vLLM takes this for "no layer is causal" (its issue 56692), and speculators' default
        # for the contrary of what was trained.
        sliding_window_non_causal=True,
        sample_from_anchor=False,
        trust_remote_code=trust,
    ).float()


def mask_token_id(asked: int | str | None, target: Path, vocab_size: int, trust_remote_code: bool) -> int:
    """The token in the place of those to draft: the one asked for, the tokenizer's, or an id that no token has."""
    if isinstance(asked, int):
        if not 0 <= asked < vocab_size:
            raise UserError(f"mask_token: {asked} is no id of the target's {vocab_size} tokens")
        return asked
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    known = tokenizer.get_vocab()
    if asked is not None:
        if asked not in known:
            raise UserError(f"mask_token: {asked!r} is no single token of the target; name one, or give its id")
        return known[asked]
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    unused = vocab_size - 1
    if unused in known.values():
        raise UserError(
            "mask_token: the tokenizer has none and every id is in use; name a token that the target never writes, "
            f"for example one of {tokenizer.all_special_tokens}"
        )
    return unused


def view(sample: Mapping[str, torch.Tensor], states_TLH: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens [T], conditioning [T, L*H], last state [T, H] and mask [T] of a sample with states [T-1, L+1, H].

    The last token has no state and needs none: as a label it is seen by nobody.
    """
    states_TLH = F.pad(states_TLH, (0, 0, 0, 0, 0, 1))
    return {
        "hidden_states": states_TLH[:, :-1].flatten(1),
        "input_ids": sample["input_ids"],
        "verifier_last_hidden_states": states_TLH[:, -1],
        "loss_mask": sample["loss_mask"],
    }


def collator(spec: Mapping, tokens: int, hidden: int, layers: int, dtype: torch.dtype) -> CollateFn:
    """Packs of `tokens` tokens, and a block of padding: speculators sets no anchor in the last block of a pack."""
    return CollateFn(tokens + spec["block_size"], hidden, num_target_layers=layers, dtype=dtype)


def call_arguments(spec: Mapping) -> dict:
    """What the model's forward is called with beside the batch: anchors, and the losses with their weights."""
    implementation = "fused" if on_gpu() else "eager"
    ((soft, _),) = resolve_loss_config("kl_div", implementation).values()
    losses = {name: (soft if name == "soft" else None, weight) for name, weight in spec["loss"].items()}
    return {"anchors": spec["anchors"], "gamma": spec["gamma"], "losses": losses, "noise": spec["noise"]}


def accuracy(metrics: Mapping, _batch: Mapping, spec: Mapping) -> list[float]:
    """Share of blocks whose slot j, and all before it, are right, of one document's forward."""
    slots = range(spec["speculative_tokens"])
    return [float(metrics[f"full_acc_{s}_sum"] / metrics[f"full_acc_{s}_total"].clamp(min=1)) for s in slots]
