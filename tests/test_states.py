# SPDX-License-Identifier: Apache-2.0
"""Every sample has its states, finite, of its own tokens, and like the others in size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import HIDDEN, LAYERS, captured_folder, random_ids, random_states
from pilotfish import files, shards, states
from pilotfish.errors import UserError
from pilotfish.shards import RowStates

IDS = {row: random_ids(12 + row, seed=row) for row in range(6)}
SAMPLES = [{"row": row, "input_ids": ids} for row, ids in IDS.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return captured_folder(tmp_path / "part", IDS)


def changed(folder: Path, row: int, change: Callable[[RowStates], RowStates]) -> None:
    """Write the shard again with one row changed."""
    rows = [(number, random_states(ids[:-1])) for number, ids in IDS.items()]
    rows[row] = (row, change(rows[row][1]))
    path = folder / shards.shard_name(0, len(IDS))
    shards.write_shard(path, rows, LAYERS)
    shards.write_index(folder, LAYERS, [shards.describe(path)])


def review(folder: Path, samples: list[dict] = SAMPLES, dtype: torch.dtype = torch.bfloat16) -> states.Review:
    made = states.Review("split", shards.ShardReader([folder / shards.INDEX]), HIDDEN, dtype)
    for sample in samples:
        made.take(sample)
    return made


def refusal(folder: Path, *given, **named) -> str:
    with pytest.raises(UserError) as refused:
        review(folder, *given, **named).refuse()
    assert "delete the part's index.json" in str(refused.value)
    return str(refused.value)


def test_good_rows_pass_with_their_norms_in_the_statistics(folder: Path):
    found = review(folder)
    found.refuse()
    statistics = found.statistics()
    assert (statistics["rows"], statistics["tokens"]) == (6, sum(len(ids) - 1 for ids in IDS.values()))
    assert list(statistics["norms"]) == ["1", "2", "3", "4"]
    assert all(low <= typical <= high for low, typical, high in statistics["norms"].values())


def test_a_row_without_states_is_named(folder: Path):
    assert "row 9: no shard holds it" in refusal(folder, [*SAMPLES, {"row": 9, "input_ids": [1, 2]}])


def test_a_row_without_one_of_the_declared_layers_is_named(folder: Path):
    path = folder / "rows_more.safetensors"
    held = random_states(IDS[0][:-1], layers=1)
    shards.write_shard(path, [(0, held)], [7])
    index = files.read_json(folder / shards.INDEX)
    shards.write_index(folder, [*LAYERS, 7], [*index["shards"], shards.describe(path)])
    assert "5 check(s) failed:\n  row 1: no shard holds its layers [7]" in refusal(folder)


def test_states_of_rows_whose_answers_were_left_out_are_counted(folder: Path):
    found = review(folder, SAMPLES[:-2])
    found.refuse()
    assert (found.statistics()["rows"], found.statistics()["rows_without_sample"]) == (4, 2)


def test_a_split_without_a_sample_is_refused(folder: Path):
    with pytest.raises(UserError, match="there is no sample to hold the states against"):
        review(folder, []).refuse()


def test_all_rows_that_fail_are_in_one_message(folder: Path):
    other = [{**sample, "input_ids": [1] * len(sample["input_ids"])} for sample in SAMPLES]
    assert "6 check(s) failed" in (said := refusal(folder, other))
    assert "row 0 of part/rows_0000000-0000006.safetensors, token_ids: not the sample's" in said
    assert "and 1 more" in said


def test_fewer_states_than_tokens_tell_of_prefix_caching(folder: Path):
    changed(folder, 2, lambda held: RowStates(held.token_ids[4:], held.hidden_states[4:]))
    assert "states of 9 tokens where the sample has 13: a cached prefix" in refusal(folder)


def test_another_type_than_the_engines_is_refused(folder: Path):
    assert "stored as bfloat16, not float16" in refusal(folder, dtype=torch.float16)


def test_an_overflow_in_float16_comes_with_its_cure(folder: Path):
    def change(held: RowStates) -> RowStates:
        return RowStates(held.token_ids, held.hidden_states.half() * 1e5)

    rows = [(row, change(random_states(ids[:-1]))) for row, ids in IDS.items()]
    shards.write_shard(path := folder / shards.shard_name(0, len(IDS)), rows, LAYERS)
    shards.write_index(folder, LAYERS, [shards.describe(path)])
    assert "capture with engine.dtype bfloat16" in refusal(folder, dtype=torch.float16)


def test_a_zero_vector_is_named_with_its_token_and_layer(folder: Path):
    def change(held: RowStates) -> RowStates:
        held.hidden_states[7, 2] = 0
        return held

    changed(folder, 3, change)
    assert "1 zero vector(s), the first at token 7, h(3)" in refusal(folder)


def test_a_row_that_is_scaled_is_named_with_its_layer(folder: Path):
    changed(folder, 3, lambda held: RowStates(held.token_ids, held.hidden_states * 8))
    assert "row 3 of part/rows_0000000-0000006.safetensors, h(1): norm" in refusal(folder)


def test_two_rows_with_one_last_state_are_named(folder: Path):
    def change(held: RowStates) -> RowStates:
        held.hidden_states[-1] = random_states(IDS[1][:-1]).hidden_states[-1]
        return held

    changed(folder, 4, change)
    assert "hidden_states: the last state is that of row 1, bit for bit" in refusal(folder)


def test_rows_of_the_same_tokens_may_have_the_same_states(tmp_path: Path):
    folder = captured_folder(tmp_path / "part", {0: IDS[0], 1: IDS[0]})
    review(folder, [{"row": row, "input_ids": IDS[0]} for row in (0, 1)]).refuse()
