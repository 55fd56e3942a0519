# SPDX-License-Identifier: Apache-2.0
"""Probes of EAGLE-3's training.

Shape suffixes: T tokens, S slots of the pack, K training-time-test steps, L layers, V draft vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish import samples
from pilotfish.excerpts import Excerpt
from pilotfish.heads import Head
from pilotfish.probes import CONDITIONING, NOISE_IN_LABELS, Probe, loss_fault, outputs, packing_fault, whence

# Mean over the supervised slots of -sum p log q (ce: p is the likeliest token), less -sum p log p (kl_div).
# After speculators.losses, which takes both over the draft vocabulary.
LOSSES: dict[str, Callable] = {
    "kl_div": lambda q_SV, p_SV: F.kl_div(q_SV.log_softmax(-1), p_SV.softmax(-1), reduction="none").sum(-1),
    "ce": lambda q_SV, p_SV: F.cross_entropy(q_SV, p_SV.argmax(-1), reduction="none"),
}


@dataclass(frozen=True)
class Seen:
    """One pass of the real data path and forward: the pack's batch, and what the model made of it, in fp32."""

    batch: dict
    logits_KSV: torch.Tensor
    targets_SV: torch.Tensor
    losses: list[float]  # of each step


class Eagle3Probe(Probe):
    """Probes of an EAGLE-3 drafter: each look gives the logits of every step."""

    def seen(self, batch: Mapping, arguments: Mapping) -> Seen:
        with outputs(self.model.lm_head) as logits, outputs(self.model.verifier_lm_head) as targets:
            _, _, metrics = self.model(**batch, **arguments)
        losses = [float(metrics[f"loss_{step}_sum"]) for step in range(self.spec["ttt_steps"])]
        return Seen(dict(batch), torch.cat(logits), targets[0][0], losses)

    def slots(self, each: Excerpt) -> int:
        return each.slots

    def moved(self, seen: Seen, which: int) -> torch.Tensor:
        """[K, slots of the document]."""
        span = self.span(which)
        return (self.base.logits_KSV[:, span] != seen.logits_KSV[:, span]).any(-1)

    def faults(self, head: Head) -> Iterator[str]:
        yield from self.layer_faults()
        yield from label_faults(self)
        yield from causality_faults(self)
        yield from packing_faults(self)
        yield from line_up_faults(self)
        yield from loss_faults(self, head)


def label_faults(probe: Eagle3Probe) -> Iterator[str]:
    """The label layer must not be among the conditioning, nor noise on the conditioning in the labels."""
    yield from probe.leak_faults()
    # Another seed, so that noise which the data path adds by itself is another too.
    noisy, span = probe.noised(CONDITIONING, seed=1), probe.span(0)
    if not torch.equal(noisy.targets_SV[span], probe.base.targets_SV[span]):
        yield NOISE_IN_LABELS


def causality_faults(probe: Eagle3Probe) -> Iterator[str]:
    """A future token or state must not change a past logit.

    At step s slot t has seen tokens up to x[t+1+s], teacher-forced, and states up to h[t].
    """
    start = probe.documents[0].prompt_length

    def disturb_future(tokens: torch.Tensor, states: torch.Tensor) -> None:
        tokens[start:] = tokens[start:].roll(1)
        states[start:] = probe.noisy(states[start:])

    moved = probe.moved(probe.changed(0, disturb_future), 0)
    for step in range(len(moved)):
        if early := moved[step, : max(0, start - 1 - step)].nonzero().flatten().tolist():
            yield f"what comes from position {start} on changes the logits of slot {early[0]} (step {step}): not causal"
            return


def packing_faults(probe: Eagle3Probe) -> Iterator[str]:
    """Packed documents must not see each other.

    The last slots of step s take the next document's tokens; no loss is taken there.
    """

    for which, other in ((0, 1), (1, 0)):
        moved = probe.moved(probe.another(which), other)
        if any(moved[step, : moved.shape[1] - step].any() for step in range(len(moved))):
            yield packing_fault(which, other)


def line_up_faults(probe: Eagle3Probe) -> Iterator[str]:
    """Slot t must hold x[t+1], g[t], label h(L)[t+1] and mask m[t+1] & m[t+2], in its document; by enumeration."""
    batch = {name: value[0] for name, value in probe.base.batch.items() if isinstance(value, torch.Tensor)}
    for which, each in enumerate(probe.documents):
        span, n, place = probe.span(which), each.slots, f"document {which} (row {each.row})"
        features, last = each.states_TLH[:, :-1].flatten(1), each.states_TLH[:, -1]
        for name, held, stored, shift in (
            ("input token", batch["input_ids"][span, None], each.tokens_T[:, None], 1),
            ("conditioning", batch["hidden_states"][span], features, 0),
            ("label state", batch["verifier_last_hidden_states"][span], last, 1),
        ):
            if wrong := (held != stored[shift : shift + n]).any(-1).nonzero().flatten().tolist():
                yield f"{place}, slot {wrong[0]}: its {name} is {whence(held[wrong[0]], stored)}, not t+{shift}'s"
        trained = [(int(t) + 1, int(t) + 2) for t in batch["loss_mask"][span].nonzero().flatten()]
        served = samples.served_pairs(each.prompt_length, len(each.tokens_T))
        if trained != served:
            extra, missing = sorted(set(trained) - set(served)), sorted(set(served) - set(trained))
            yield f"{place}: (input, label) positions that only training uses {extra}, only serving {missing}"
        if set(batch["document_ids"][span].tolist()) != {which}:
            yield f"{place}: its slots are not marked as its own"


def loss_faults(probe: Eagle3Probe, head: Head) -> Iterator[str]:
    """The loss of each step must be the one asked for, over the target's own logits of the stored label states."""
    n, asked, base = probe.span(1).stop, probe.spec["loss"], probe.base
    ids = torch.arange(len(probe.model.d2t)) + probe.model.d2t
    p_SV = head.logits(base.batch["verifier_last_hidden_states"][0, :n])[:, ids]
    mask_S = base.batch["loss_mask"][0, :n]
    for step, held in enumerate(base.losses):
        weight, mask = probe.spec["ttt_step_loss_decay"] ** step, mask_S[step:]
        of = {
            name: weight * float(loss(base.logits_KSV[step, : n - step], p_SV[step:])[mask].mean())
            for name, loss in LOSSES.items()
        }
        if fault := loss_fault(held, asked, of, f"of step {step}"):
            yield fault
            return
