# SPDX-License-Identifier: Apache-2.0
"""Pilotfish's shards as an hs_connectors transfer backend, and the training view of a sample."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from hs_connectors import HiddenStatesTransfer
from speculators.train.data import BaseDataset

from pilotfish import batches, samples, shards
from pilotfish.device import DTYPE
from pilotfish.errors import UserError


class ShardTransfer(HiddenStatesTransfer):
    """Reads hidden states of one split from shards; nothing is ever generated behind the reader's back."""

    def __init__(self, indexes: list[Path], layers: list[int]):
        self.reader = shards.ShardReader(indexes, layers)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """`hidden_states` [T-1, layers, H] and `token_ids` [T-1] of row `file_idx`, or None."""
        if file_idx not in self.reader:
            return None
        states = self.reader.read(file_idx)
        return {"hidden_states": states.hidden_states, "token_ids": states.token_ids}

    def get_generated(self, hs_transfer_params: dict) -> None:
        """Always an error: shards are complete and verified before training starts."""
        raise UserError("hidden states are missing from the shards; run the `capture` rule again")


class HeldTransfer(ShardTransfer):
    """The states of a few rows held in memory, which a probe may have changed before they reach a sample."""

    def __init__(self, rows: Mapping[int, shards.RowStates]):
        self.reader = _Held(rows)


class _Held(dict):
    read = dict.__getitem__


class SampleDataset(BaseDataset):
    """Samples with their hidden states, as speculators' trainer wants them for a drafter of an algorithm.

    `algorithm` is the module of it: what a sample looks like to its forward, and how many tokens beside those with
    states. Raises UserError at once when a sample is longer than `max_len`: speculators would cut it silently.
    """

    def __init__(self, arrow: Path, transfer: ShardTransfer, max_len: int, algorithm: ModuleType):
        self.samples = samples.load(arrow).with_format("torch")
        self.transfer, self.algorithm = transfer, algorithm
        super().__init__(max_len, DTYPE)
        for number in np.flatnonzero(self.approx_lengths > max_len)[:1].tolist():
            row, length = int(self.samples[number]["row"]), self.approx_lengths[number]
            raise UserError(
                f"{arrow}, row {row}: {length} tokens exceed tokens_per_batch = {max_len}; raise the drafter's "
                "tokens_per_batch, or lower responses.max_tokens"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def _compute_approx_lengths(self) -> np.ndarray:
        return batches.lengths(self.samples) + self.algorithm.EXTRA

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.samples[index]
        row = int(sample["row"])
        held = self.transfer.get_cached(row)
        if held is None:
            raise UserError(f"row {row}: no hidden states in the shards; run the `capture` rule again")
        if not torch.equal(held["token_ids"], sample["input_ids"][:-1]):
            raise UserError(f"row {row}: the shard holds another row's tokens; delete the shard and run again")
        return self.algorithm.view(sample, held["hidden_states"])
