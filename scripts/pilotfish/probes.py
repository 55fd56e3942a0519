# SPDX-License-Identifier: Apache-2.0
"""Probes of the training's data path and forward: change what is stored, and see what of the drafter moves.

Shape suffixes: T tokens, S slots of the pack, K training-time-test steps, L layers, V draft vocabulary, H hidden size.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from pilotfish import excerpts, heads, samples, training
from pilotfish.excerpts import Excerpt
from pilotfish.shards import RowStates, ShardReader

BEFORE, AFTER = 8, 12  # tokens of a document before and after the start of the response
LOSS_TOLERANCE = 1e-3  # relative; the two sides agree to 1e-6
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

    def moved(self, other: "Seen") -> torch.Tensor:
        """Which logits differ in any bit [K, S]."""
        return (self.logits_KSV != other.logits_KSV).any(-1)


def _document(sample: Mapping, states: RowStates) -> Excerpt:
    """The stretch of a row around the start of its response."""
    first = sample["prompt_length"]
    return excerpts.cut(sample, states, max(0, first - BEFORE), first, first + AFTER)


class Probe:
    """A drafter (fp32, on the CPU) over two documents in one pack; `layers` are h(k) numbers, the label layer last."""

    def __init__(self, model: torch.nn.Module, documents: Sequence[Excerpt], layers: Sequence[int], spec: dict):
        self.model, self.documents, self.layers, self.spec = model.float().eval(), list(documents), layers, spec
        self.noise = torch.Generator().manual_seed(0)
        self.base = self.look(self.documents)

    @torch.no_grad()
    def look(self, documents: Sequence[Excerpt], seed: int = 0) -> Seen:
        """Pack the documents as the training does and run the forward, random numbers from `seed`."""
        torch.manual_seed(seed)
        arguments, _ = training.loss_arguments(self.spec)
        with tempfile.TemporaryDirectory() as folder:
            data = excerpts.dataset(documents, Path(folder))
            batch = training.loader(data, data.max_len, seed=0).collate_fn([data[0], data[1]])
        floats = {name: value.float() for name, value in batch.items() if "hidden_states" in name}
        with _outputs(self.model.lm_head) as logits, _outputs(self.model.verifier_lm_head) as targets:
            _, _, metrics = self.model(**{**batch, **floats}, **arguments)
        losses = [float(metrics[f"loss_{step}_sum"]) for step in range(self.spec["ttt_steps"])]
        return Seen(batch, torch.cat(logits), targets[0][0], losses)

    def changed(self, which: int, change: Callable[[torch.Tensor, torch.Tensor], None], seed: int = 0) -> Seen:
        """A look after `change` has edited copies of one document's tokens [T] and states [T-1, layers, H]."""
        documents = list(self.documents)
        tokens, states = documents[which].tokens_T.clone(), documents[which].states_TLH.clone()
        change(tokens, states)
        documents[which] = replace(documents[which], tokens_T=tokens, states_TLH=states)
        return self.look(documents, seed)

    def noisy(self, states: torch.Tensor) -> torch.Tensor:
        """States with noise of their own size."""
        return states + torch.randn(states.shape, generator=self.noise).to(states) * states.float().std().to(states)

    def span(self, which: int) -> slice:
        """The slots of one document in the pack."""
        start = sum(each.slots for each in self.documents[:which])
        return slice(start, start + self.documents[which].slots)


def of_rows(spec: dict, target: Path, maps: Mapping, rows: Sequence[Mapping], reader: ShardReader) -> Probe:
    """A probe of a fresh drafter over the two rows with the longest responses; `reader` gives the label layer last."""
    torch.manual_seed(spec["seed"])
    model = training.build_drafter(spec, target, reader.layers[:-1], maps["d2t"], maps["t2d"])
    longest = sorted(rows, key=lambda sample: sample["prompt_length"] - len(sample["input_ids"]))[:2]
    return Probe(model, [_document(each, reader.read(each["row"])) for each in longest], reader.layers, spec)


@contextmanager
def _outputs(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What a module gives at each call."""
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()))
    try:
        yield kept
    finally:
        handle.remove()


def faults(probe: Probe, target: Path) -> Iterator[str]:
    """Everything wrong that the probes see, one text each; the labels' logits come out of the target's files."""
    yield from layer_faults(probe)
    yield from label_faults(probe)
    yield from causality_faults(probe)
    yield from packing_faults(probe)
    yield from line_up_faults(probe)
    yield from loss_faults(probe, heads.Head(target))


def layer_faults(probe: Probe) -> Iterator[str]:
    """Each conditioning layer must reach the projection: without its states, every slot's logits are others."""
    for column, layer in enumerate(probe.layers[:-1]):
        seen = probe.changed(0, lambda _, states, column=column: states[:, column].zero_())
        if not probe.base.moved(seen)[0, probe.span(0)].all():
            yield f"layer {layer} does not reach the projection: without its states the logits stay as they are"


def label_faults(probe: Probe) -> Iterator[str]:
    """The label layer must not be among the conditioning, nor noise on the conditioning in the labels."""

    def disturb_labels(_, states: torch.Tensor) -> None:
        states[:, -1] = probe.noisy(states[:, -1])

    def disturb_conditioning(_, states: torch.Tensor) -> None:
        states[:, :-1] = probe.noisy(states[:, :-1])

    span = probe.span(0)
    if probe.base.moved(probe.changed(0, disturb_labels))[:, span].any():
        yield f"label layer {probe.layers[-1]} leaks into the conditioning: with other labels the logits are others"
    # Another seed, so that noise which the data path adds by itself is another too.
    noisy = probe.changed(0, disturb_conditioning, seed=1)
    if not torch.equal(noisy.targets_SV[span], probe.base.targets_SV[span]):
        yield "noise reaches the labels: take them before any is added"


def causality_faults(probe: Probe) -> Iterator[str]:
    """A future token or state must not change a past logit.

    At step s slot t has seen tokens up to x[t+1+s], teacher-forced, and states up to h[t].
    """
    start = probe.documents[0].prompt_length

    def disturb_future(tokens: torch.Tensor, states: torch.Tensor) -> None:
        tokens[start:] = tokens[start:].roll(1)
        states[start:] = probe.noisy(states[start:])

    moved = probe.base.moved(probe.changed(0, disturb_future))
    for step in range(len(moved)):
        if early := moved[step, : max(0, start - 1 - step)].nonzero().flatten().tolist():
            yield f"what comes from position {start} on changes the logits of slot {early[0]} (step {step}): not causal"
            return


def packing_faults(probe: Probe) -> Iterator[str]:
    """Packed documents must not see each other.

    The last slots of step s take the next document's tokens; no loss is taken there.
    """

    def disturb(tokens: torch.Tensor, states: torch.Tensor) -> None:
        tokens.copy_(tokens.roll(3))
        states.copy_(probe.noisy(states))

    for which, other in ((0, 1), (1, 0)):
        moved, span = probe.base.moved(probe.changed(which, disturb)), probe.span(other)
        for step in range(len(moved)):
            if moved[step, span.start : span.stop - step].any():
                yield f"packed documents see each other: document {which} changes the logits of document {other}"
                break


def line_up_faults(probe: Probe) -> Iterator[str]:
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
                yield f"{place}, slot {wrong[0]}: its {name} is {_whence(held[wrong[0]], stored)}, not t+{shift}'s"
        trained = [(int(t) + 1, int(t) + 2) for t in batch["loss_mask"][span].nonzero().flatten()]
        served = samples.served_pairs(each.prompt_length, len(each.tokens_T))
        if trained != served:
            extra, missing = sorted(set(trained) - set(served)), sorted(set(served) - set(trained))
            yield f"{place}: (input, label) positions that only training uses {extra}, only serving {missing}"
        if set(batch["document_ids"][span].tolist()) != {which}:
            yield f"{place}: its slots are not marked as its own"


def _whence(value: torch.Tensor, stored: torch.Tensor) -> str:
    """Which position of a document a slot's value comes from."""
    found = (stored == value).all(-1).nonzero().flatten().tolist()
    return f"that of position {found[0]}" if found else "that of no position (noise, or other layers)"


def loss_faults(probe: Probe, head: heads.Head) -> Iterator[str]:
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
        # For a target that is sure of itself the losses lie within the tolerance: the nearest one is meant.
        nearest = min(of, key=lambda name: (abs(of[name] - held), name != asked))
        known = abs(of[nearest] - held) <= LOSS_TOLERANCE * abs(of[nearest])
        if not known or nearest != asked:
            looks = f"it is that of {nearest}" if known else "it is that of no loss known here"
            yield f"the loss of step {step} is {held:.4f} where {asked}, as asked, is {of[asked]:.4f}: {looks}"
            return
