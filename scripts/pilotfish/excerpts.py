# SPDX-License-Identifier: Apache-2.0
"""Stretches of stored rows, as data sets of their own that reach the trainer as whole rows do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pilotfish import algorithms, samples, transfer
from pilotfish.shards import RowStates


@dataclass(frozen=True)
class Excerpt:
    """A stretch of one row: token ids [T] and states [T-1, layers, H]; the first `prompt_length` are the prompt."""

    row: int
    tokens_T: torch.Tensor
    states_TLH: torch.Tensor
    prompt_length: int

    @property
    def response(self) -> list[int]:
        """The ids after the prompt."""
        return self.tokens_T[self.prompt_length :].tolist()

    @property
    def slots(self) -> int:
        """Slots that a drafter is trained on: each takes a token and the state before it, and has a label."""
        return len(self.tokens_T) - 2


def cut(sample: Mapping, states: RowStates, start: int, prompt_end: int, end: int) -> Excerpt:
    """Tokens start..end-1 of a sample, those before `prompt_end` as the prompt."""
    tokens = torch.tensor(sample["input_ids"][start:end])
    return Excerpt(sample["row"], tokens, states.hidden_states[start : end - 1], prompt_end - start)


def dataset(excerpts: Sequence[Excerpt], spec: Mapping, folder: Path) -> transfer.SampleDataset:
    """The excerpts as training samples of a drafter, written into `folder`; their rows must differ."""
    arrow = folder / "samples.arrow"
    samples.write((_sample(excerpt) for excerpt in excerpts), arrow)
    held = {each.row: RowStates(each.tokens_T[:-1], each.states_TLH) for each in excerpts}
    longest = sum(len(each.tokens_T) for each in excerpts)
    return transfer.SampleDataset(arrow, transfer.HeldTransfer(held), longest, algorithms.of(spec))


def _sample(excerpt: Excerpt) -> dict:
    response = {
        "row": excerpt.row,
        "id": f"excerpt-{excerpt.row}",
        "prompt_token_ids": excerpt.tokens_T[: excerpt.prompt_length].tolist(),
        "token_ids": excerpt.response,
        "finish_reason": "length",
    }
    return samples.sample_of(response)
