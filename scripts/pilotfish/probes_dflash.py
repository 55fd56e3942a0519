# SPDX-License-Identifier: Apache-2.0
"""Probes of DFlash's training.

Shape suffixes: T tokens of the pack, A anchors, B tokens of a block, V draft vocabulary, H hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish.dflash import IGNORED, Blocks
from pilotfish.excerpts import Excerpt
from pilotfish.heads import Head
from pilotfish.probes import CONDITIONING, NOISE_IN_LABELS, Probe, loss_fault, outputs, packing_fault, whence


@dataclass(frozen=True)
class Seen:
    """One pass of the real data path and forward: the pack's batch, and what the model made of it, in fp32.

    Only blocks that some loss is taken on are kept, by position in the pack.
    """

    batch: dict
    blocks: Blocks
    logits_ABV: torch.Tensor
    targets_TV: torch.Tensor
    loss: float


class DFlashProbe(Probe):
    """Probes of a DFlash drafter: each look gives the logits of all blocks."""

    def seen(self, batch: Mapping, arguments: Mapping) -> Seen:
        with outputs(self.model.lm_head) as logits, outputs(self.model.verifier_lm_head) as targets:
            blocks, loss, _ = self.model(**batch, **arguments)
        used, shape = blocks.counts_AB.any(1), blocks.positions_AB.shape
        logits_ABV = logits[0][0].unflatten(0, shape)[used]
        # With as many anchors as tokens, speculators takes the target's logits everywhere first.
        return Seen(dict(batch), Blocks(*(each[used] for each in blocks)), logits_ABV, targets[0][0], float(loss))

    def slots(self, each: Excerpt) -> int:
        return len(each.tokens_T)

    def anchors(self, which: int, end: int | None = None) -> torch.Tensor:
        """Which blocks of the base start in a document [A], before its position `end`."""
        span = self.span(which)
        starts_A = self.base.blocks.positions_AB[:, 0]
        return (starts_A >= span.start) & (starts_A < (span.stop if end is None else span.start + end))

    def moved(self, seen: Seen, which: int) -> torch.Tensor:
        """[1, blocks of the document]."""
        return self.moved_blocks(seen)[None, self.anchors(which)]

    def moved_blocks(self, seen: Seen) -> torch.Tensor:
        """Of all blocks, whose drafted logits differ from the base's [A]; all where the other look has other blocks."""
        if not torch.equal(self.base.blocks.positions_AB, seen.blocks.positions_AB):
            return torch.ones(len(self.base.logits_ABV), dtype=torch.bool)
        return (self.base.logits_ABV != seen.logits_ABV)[:, 1:].any(-1).any(-1)

    def faults(self, head: Head) -> Iterator[str]:
        yield from block_faults(self)
        yield from self.layer_faults()
        yield from label_faults(self)
        yield from causality_faults(self)
        yield from isolation_faults(self)
        yield from loss_faults(self, head)


def _pack_of(each: Excerpt) -> tuple[torch.Tensor, torch.Tensor]:
    """A document's conditioning [T, L*H] and last states [T, H] as they should stand in a pack: the last are zero."""
    return tuple(F.pad(states, (0, 0, 0, 1)) for states in (each.states_TLH[:, :-1].flatten(1), each.states_TLH[:, -1]))


def block_faults(probe: DFlashProbe) -> Iterator[str]:
    """A block must start at each a with m[a] & m[a+1], and its slot j be trained on x[a+j], to the document's end."""
    batch = {name: value[0] for name, value in probe.base.batch.items() if isinstance(value, torch.Tensor)}
    size, t2d = probe.model.block_size, probe.model.t2d
    index = None if t2d is None else t2d.long().cumsum(0) - 1
    for which, each in enumerate(probe.documents):
        span, place = probe.span(which), f"document {which} (row {each.row})"
        features, last = _pack_of(each)
        for name, held, stored in (
            ("token", batch["input_ids"][span, None], each.tokens_T[:, None]),
            ("conditioning", batch["hidden_states"][span], features),
            ("label state", batch["verifier_last_hidden_states"][span], last),
        ):
            if wrong := (held != stored).any(-1).nonzero().flatten().tolist():
                yield f"{place}, position {wrong[0]}: its {name} is {whence(held[wrong[0]], stored)}, not its own"
        trained = _trained(probe, which)
        served = {}
        for anchor in range(each.prompt_length, len(each.tokens_T) - 1):
            for label in range(anchor + 1, min(anchor + size, len(each.tokens_T))):
                token = int(each.tokens_T[label])
                served[anchor, label] = token if t2d is None else int(index[token]) if t2d[token] else IGNORED
        if trained.keys() != served.keys():
            extra, missing = sorted(trained.keys() - served.keys())[:8], sorted(served.keys() - trained.keys())[:8]
            yield f"{place}: (anchor, label) positions that only training uses {extra}, only serving {missing}"
        elif wrong := sorted(pair for pair in served if trained[pair] != served[pair]):
            yield f"{place}: the label of (anchor, label) {wrong[0]} is not the token there, in the draft vocabulary"


def _trained(probe: DFlashProbe, which: int) -> dict[tuple[int, int], int]:
    """The label that training takes for each (anchor, label) pair of positions in a document."""
    start, blocks = probe.span(which).start, probe.base.blocks
    chosen = probe.anchors(which)
    found = {}
    for positions, labels, counts in zip(*(each[chosen].tolist() for each in blocks), strict=True):
        for slot in range(1, len(positions)):
            if counts[slot]:
                found[positions[0] - start, positions[slot] - start] = labels[slot]
    return found


def label_faults(probe: DFlashProbe) -> Iterator[str]:
    """The label layer must not be among the conditioning, nor noise on the conditioning in the labels."""
    yield from probe.leak_faults()
    # In training, with noise of the data path's own.
    probe.spec["noise"] = 1.0
    probe.model.train()
    noisy = probe.noised(CONDITIONING, seed=1)
    probe.model.eval()
    probe.spec["noise"] = 0.0
    same = torch.equal(noisy.targets_TV, probe.base.targets_TV)
    if not same or not torch.equal(noisy.blocks.labels_AB, probe.base.blocks.labels_AB):
        yield NOISE_IN_LABELS


def causality_faults(probe: DFlashProbe) -> Iterator[str]:
    """A block sees tokens up to its anchor and states before it, and nothing that comes after."""
    start = probe.documents[0].prompt_length + 4

    def disturb_states(_, states: torch.Tensor) -> None:
        states[start:] = probe.noisy(states[start:])

    def disturb_future(tokens: torch.Tensor, states: torch.Tensor) -> None:
        tokens[start:] = tokens[start:].roll(1)
        disturb_states(tokens, states)

    for disturb, end, what in (
        (disturb_states, start + 1, f"states from position {start} on"),
        (disturb_future, start, f"tokens and states from position {start} on"),
    ):
        early = probe.moved_blocks(probe.changed(0, disturb)) & probe.anchors(0, end)
        if early.any():
            anchor = int(probe.base.blocks.positions_AB[early][0, 0])
            yield f"{what} change the logits of the block at position {anchor}: it sees its own future"
            return


def isolation_faults(probe: DFlashProbe) -> Iterator[str]:
    """Blocks must not see each other, nor packed documents."""
    place = probe.documents[0].prompt_length + 4

    def disturb_anchor(tokens: torch.Tensor, _) -> None:
        tokens[place] = tokens[place - 1]

    starts_A = probe.base.blocks.positions_AB[:, 0]
    others = probe.moved_blocks(probe.changed(0, disturb_anchor)) & (starts_A != probe.span(0).start + place)
    if others.any():
        seen = int(starts_A[others][0])
        yield f"blocks see each other: the token at position {place} changes the block at position {seen}"
    for which, other in ((0, 1), (1, 0)):
        if probe.moved(probe.another(which), other).any():
            yield packing_fault(which, other)


def loss_faults(probe: DFlashProbe, head: Head) -> Iterator[str]:
    """The loss must be the one asked for, on the data's tokens or over the target's own logits of the label states."""
    base, spec, model = probe.base, probe.spec, probe.model
    positions_AB, labels_AB, _ = base.blocks
    weight_AB = torch.exp(-(torch.arange(model.block_size) - 1) / spec["gamma"]) * (labels_AB != IGNORED)
    states_ABH = base.batch["verifier_last_hidden_states"][0][positions_AB - 1]
    ids = slice(None) if model.d2t is None else torch.arange(len(model.d2t)) + model.d2t
    p_ABV = torch.stack([head.logits(states_BH)[:, ids] for states_BH in states_ABH]).softmax(-1)
    log_q_ABV = base.logits_ABV.log_softmax(-1)
    each = {
        "hard": -log_q_ABV.gather(-1, labels_AB.clamp(min=0)[..., None])[..., 0],
        "soft": F.kl_div(log_q_ABV, p_ABV, reduction="none").sum(-1),
    }
    of = {name: float((loss_AB * weight_AB).sum() / weight_AB.sum()) for name, loss_AB in each.items()}
    asked = " + ".join(f"{weight:g} {name}" for name, weight in spec["loss"].items())
    mixed = sum(weight * of[name] for name, weight in spec["loss"].items())
    if fault := loss_fault(base.loss, asked, {**of, "a half of each": sum(of.values()) / 2, asked: mixed}, "of a pack"):
        yield fault
