# SPDX-License-Identifier: Apache-2.0
"""Exact acceptance of a drafter on stored greedy responses, with neither a server nor a target."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from pilotfish import files
from pilotfish.ddtree import TreeTable
from pilotfish.drafting import ReplayRow
from pilotfish.errors import UserError
from pilotfish.replay_dflash import DFlashDrafter, accepted
from pilotfish.replay_eagle3 import Eagle3Drafter
from pilotfish.rounds import Round, walk
from pilotfish.shards import ShardReader

ROWS_PER_BATCH = 8  # rows in memory at once

Rounds = dict[int, list[Round]]  # of each response, by row number


def open_drafter(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Eagle3Drafter | DFlashDrafter:
    """The drafter in a folder of speculators' format, of whichever algorithm its config.json names.

    `target` is the target's model folder, whose embedding and head a DFlash drafter borrows. Raises UserError
    where the replay has no forward pass for what the folder asks for.
    """
    algorithm = files.read_json(folder / "config.json").get("speculators_model_type")
    try:
        if algorithm == "eagle3":
            return Eagle3Drafter(folder, dtype)
        if algorithm == "dflash":
            return DFlashDrafter(folder, target, dtype)
    except ValueError as error:
        raise UserError(str(error)) from None
    raise UserError(f"{folder}/config.json: a drafter of type {algorithm!r} cannot be replayed, only eagle3 and dflash")


def acceptance_table(drafter: Eagle3Drafter | DFlashDrafter, rows: Sequence[ReplayRow], k: int) -> list[Tensor]:
    """For each row, how many of k drafted tokens hold [n_out - 1] if a round starts at 0, 1, ..."""
    batches = (rows[first : first + ROWS_PER_BATCH] for first in range(0, len(rows), ROWS_PER_BATCH))
    return [table for batch in batches for table in drafter.table(batch, k)]


def replay_samples(drafter: Eagle3Drafter | DFlashDrafter, reader: ShardReader, every: Dataset, k: int) -> Rounds:
    """Rounds of each sample's response.

    A response of one token, which came from prefill, has no round.
    """
    found: Rounds = {row: [] for row in every["row"]}
    for batch in _batches(reader, every):
        for (number, row), table in zip(batch.items(), drafter.table(list(batch.values()), k), strict=True):
            found[number] = walk(table, row.n_stored)
    return found


def replay_trees(
    drafter: DFlashDrafter, reader: ShardReader, every: Dataset, k: int, budgets: Sequence[int]
) -> list[Rounds]:
    """Rounds as `replay_samples` gives them, then those with a DDTree of each node budget; in one pass."""
    drafter.check_block(k)
    found: list[Rounds] = [{row: [] for row in every["row"]} for _ in (k, *budgets)]
    for batch in _batches(reader, every):
        ranked = drafter.ranked(list(batch.values()), max(budgets))
        for (number, row), (log_probs, ranks) in zip(batch.items(), ranked, strict=True):
            tables = [accepted(ranks), *(TreeTable(log_probs, ranks, budget) for budget in budgets)]
            for rounds, table in zip(found, tables, strict=True):
                rounds[number] = walk(table, row.n_stored)
    return found


def _batches(reader: ShardReader, every: Dataset) -> Iterator[dict[int, ReplayRow]]:
    """The samples that have a round, by row number, a batch at a time."""
    for start in range(0, len(every), ROWS_PER_BATCH):
        batch = {}
        for sample in every.select(range(start, min(start + ROWS_PER_BATCH, len(every)))):
            tokens, prompt = torch.tensor(sample["input_ids"]), sample["prompt_length"]
            if len(tokens) > prompt + 1:
                states = reader.read(sample["row"]).hidden_states
                batch[sample["row"]] = ReplayRow(tokens, states, prompt, len(tokens) - prompt)
        if batch:
            yield batch
