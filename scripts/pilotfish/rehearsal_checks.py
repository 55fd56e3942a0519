# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal must have shown: the row that was learnt by heart comes back in full blocks, as the replay says."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pilotfish import agreement, constants, files, replay, rounds
from pilotfish.drafting import ReplayRow
from pilotfish.errors import UserError
from pilotfish.excerpts import Excerpt, cut
from pilotfish.rehearsal import FULL_ROUNDS
from pilotfish.shards import ShardReader

CURE = "training and serving are not one chain; mend that, delete the folder and run again"


def stored_excerpt(served: dict, rows: Iterable[dict], reader: ShardReader, where: Path) -> Excerpt:
    """The stretch that was served, out of the stored rows; UserError if its row is another by now."""
    start, end = served["prompt_length"], served["prompt_length"] + len(served["tokens"])
    for sample in rows:
        if sample["row"] == served["row"] and sample["input_ids"][start:end] == served["tokens"]:
            return cut(sample, reader.read(sample["row"]), 0, start, end)
    raise UserError(
        f"{where}: no training sample is row {served['row']} with the tokens that were rehearsed; delete the folder "
        "and run again"
    )


def learning_faults(served: dict) -> Iterator[str]:
    """Whether the drafter knew the row by heart at the end of its training."""
    last = served["training"][-1]
    if min(last["accuracy"]) < 1:
        yield (
            f"after {len(served['training'])} steps on one row the loss is {last['loss']}, accuracy by step "
            f"{last['accuracy']}: what cannot be learnt by heart is not learnt at all, so look at features and labels"
        )


def round_faults(served: dict, excerpt: Excerpt, folder: Path, target: Path, k: int) -> Iterator[str]:
    """Whether the engine accepted full blocks all along, round by round as the replay of the same export does."""
    shared = agreement.common_prefix(served["token_ids"], excerpt.response)
    theirs = rounds.within(rounds.rounds_of(served["per_step_accepted"]), shared)
    if len(theirs) < FULL_ROUNDS:
        yield (
            f"{len(theirs)} rounds within the {shared} tokens that the engine's text shares with the row's "
            f"{len(excerpt.response)}, {FULL_ROUNDS} needed: it drafted nothing, or decodes another text"
        )
    for number, each in enumerate(theirs):
        if each.accepted != k:
            yield (
                f"round {number} accepted {each.accepted} of {k} tokens of a row known by heart (from its response "
                f"token {each.start}): the block is not full"
            )
            break
    row = ReplayRow(excerpt.tokens_T, excerpt.states_TLH[:, :-1], excerpt.prompt_length, len(excerpt.response))
    (table,) = replay.acceptance_table(replay.open_drafter(folder, target), [row], k)
    ours = rounds.within(rounds.walk(table, row.n_stored), shared)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            yield f"round {number}: the replay has {tuple(mine)} (start, accepted) where the engine has {tuple(other)}"
            break


def constants_faults(served: dict, folder: Path, k: int) -> Iterator[str]:
    """Whether the constants of the drafter are the same in training, in config.json and in the engine's own view."""
    trained = constants.read(files.read_json(folder / constants.FILE), folder / constants.FILE)
    stated = constants.of_config(files.read_json(folder / "config.json"), folder / "config.json")
    for difference in constants.differences(stated, trained):
        yield f"config.json: {difference} as trained"
    yield from agreement.engine_faults(served["engine"], trained, k, folder / "served.json")
