# SPDX-License-Identifier: Apache-2.0
"""Probes of the training's data path and forward: change what is stored, and see what of the drafter moves."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pilotfish import algorithms, excerpts, rehearsal, training
from pilotfish.excerpts import Excerpt
from pilotfish.heads import Head
from pilotfish.shards import RowStates, ShardReader

BEFORE, AFTER = 8, 12  # tokens of a document before and after the start of the response
CONDITIONING, LABELS = slice(None, -1), slice(-1, None)  # of the layers of a document's states
NOISE_IN_LABELS = "noise reaches the labels: take them before any is added"
LOSS_TOLERANCE = 1e-3  # relative; the two sides agree to 1e-6


def document(sample: Mapping, states: RowStates) -> Excerpt:
    """The stretch of a row around the start of its response."""
    first = sample["prompt_length"]
    return excerpts.cut(sample, states, max(0, first - BEFORE), first, first + AFTER)


class Probe(ABC):
    """A drafter (fp32, on the CPU) over two documents in one pack; `layers` are h(k) numbers, the label layer last."""

    def __init__(self, model: torch.nn.Module, documents: Sequence[Excerpt], layers: Sequence[int], spec: Mapping):
        tokens = sum(len(each.tokens_T) for each in documents)
        self.model, self.documents, self.layers = model.float().eval(), list(documents), layers
        self.spec = rehearsal.everywhere(dict(spec), tokens)
        self.noise = torch.Generator().manual_seed(0)
        self.base = self.look(self.documents)

    @abstractmethod
    def seen(self, batch: Mapping, arguments: Mapping) -> Any:
        """What the model makes of a batch."""

    @abstractmethod
    def slots(self, each: Excerpt) -> int:
        """Slots that a document takes in the pack."""

    @abstractmethod
    def moved(self, seen: Any, which: int) -> torch.Tensor:
        """Which of a document's drafts differ from the base's logits in any bit, the first drafted step first."""

    @abstractmethod
    def faults(self, head: Head) -> Iterator[str]:
        """Everything wrong that the probes see, one text each; `head` is the target's own."""

    @torch.no_grad()
    def look(self, documents: Sequence[Excerpt], seed: int = 0) -> Any:
        """Pack the documents as the training does and run the forward, random numbers from `seed`."""
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            data = excerpts.dataset(documents, self.spec, Path(folder))
            batch = training.loader(data, self.spec, data.max_len, seed=0).collate_fn([data[0], data[1]])
        floats = {name: value.float() for name, value in batch.items() if "hidden_states" in name}
        return self.seen({**batch, **floats}, algorithms.of(self.spec).call_arguments(self.spec))

    def changed(self, which: int, change: Callable[[torch.Tensor, torch.Tensor], None], seed: int = 0) -> Any:
        """A look after `change` has edited copies of one document's tokens [T] and states [T-1, layers, H]."""
        documents = list(self.documents)
        tokens, states = documents[which].tokens_T.clone(), documents[which].states_TLH.clone()
        change(tokens, states)
        documents[which] = replace(documents[which], tokens_T=tokens, states_TLH=states)
        return self.look(documents, seed)

    def noised(self, layers: slice, seed: int = 0) -> Any:
        """A look with noise on some layers of the first document's states."""

        def disturb(_, states: torch.Tensor) -> None:
            states[:, layers] = self.noisy(states[:, layers])

        return self.changed(0, disturb, seed)

    def layer_faults(self) -> Iterator[str]:
        """Each conditioning layer must reach the projection: without its states, every first draft is another."""
        for column, layer in enumerate(self.layers[:-1]):
            seen = self.changed(0, lambda _, states, column=column: states[:, column].zero_())
            if not self.moved(seen, 0)[0].all():
                yield f"layer {layer} does not reach the projection: without its states the logits stay as they are"

    def leak_faults(self) -> Iterator[str]:
        """The label layer must not be among the conditioning."""
        seen = self.noised(LABELS)
        if any(self.moved(seen, which).any() for which in range(len(self.documents))):
            yield f"label layer {self.layers[-1]} leaks into the conditioning: with other labels the logits are others"

    def another(self, which: int) -> Any:
        """A look with other tokens and states in one document."""

        def disturb(tokens: torch.Tensor, states: torch.Tensor) -> None:
            tokens.copy_(tokens.roll(3))
            states.copy_(self.noisy(states))

        return self.changed(which, disturb)

    def noisy(self, states: torch.Tensor) -> torch.Tensor:
        """States with noise of their own size."""
        return states + torch.randn(states.shape, generator=self.noise).to(states) * states.float().std().to(states)

    def span(self, which: int) -> slice:
        """The slots of one document in the pack."""
        start = sum(self.slots(each) for each in self.documents[:which])
        return slice(start, start + self.slots(self.documents[which]))


@contextmanager
def outputs(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What a module gives at each call."""
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()))
    try:
        yield kept
    finally:
        handle.remove()


def of_rows(spec: Mapping, target: Path, maps: Mapping, rows: Sequence[Mapping], reader: ShardReader) -> Probe:
    """A probe of a fresh drafter over the two rows with the longest responses; `reader` gives the label layer last."""
    from pilotfish.probes_dflash import DFlashProbe
    from pilotfish.probes_eagle3 import Eagle3Probe

    model = training.build_drafter(spec, target, reader.layers[:-1], maps)
    longest = sorted(rows, key=lambda sample: sample["prompt_length"] - len(sample["input_ids"]))[:2]
    documents = [document(each, reader.read(each["row"])) for each in longest]
    return {"eagle3": Eagle3Probe, "dflash": DFlashProbe}[spec["algorithm"]](model, documents, reader.layers, spec)


def whence(value: torch.Tensor, stored: torch.Tensor) -> str:
    """Which position of a document a slot's value comes from."""
    found = (stored == value).all(-1).nonzero().flatten().tolist()
    return f"that of position {found[0]}" if found else "that of no position (noise, or other layers)"


def packing_fault(which: int, other: int) -> str:
    """What to say where one document of a pack changes the other."""
    return f"packed documents see each other: document {which} changes the logits of document {other}"


def loss_fault(held: float, asked: str, of: Mapping[str, float], what: str) -> str | None:
    """Whether a loss is the one asked for, among those of other names; `what` it is the loss of."""
    # For a target that is sure of itself the losses lie within the tolerance: the nearest one is meant.
    nearest = min(of, key=lambda name: (abs(of[name] - held), name != asked))
    known = abs(of[nearest] - held) <= LOSS_TOLERANCE * abs(of[nearest])
    if known and nearest == asked:
        return None
    looks = f"it is that of {nearest}" if known else "it is that of no loss known here"
    return f"the loss {what} is {held:.4f} where {asked}, as asked, is {of[asked]:.4f}: {looks}"
