# SPDX-License-Identifier: Apache-2.0
"""Captured shards are linked if they fit to the byte; every other row is computed again."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helpers import LAYERS, captured_folder, flip_bit, random_ids, random_states
from pilotfish import files, generation, shards
from pilotfish.adoption import Adoption
from pilotfish.errors import UserError

IDS = {row: random_ids(4 + row, seed=row) for row in (0, 1, 2, 3, 5, 6)}  # shards of rows 0-2 and of 3, 5, 6
FIRST, SECOND = shards.shard_name(0, 3), shards.shard_name(3, 7)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 3)


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    return captured_folder(tmp_path / "captured", IDS)


def adoption(tmp_path: Path, captured: Path, ids: dict = IDS, layers: list[int] = LAYERS) -> Adoption:
    made = Adoption(tmp_path / "work", layers, ids)
    made.adopt(captured)
    return made


def assert_published(made: Adoption, output: Path) -> None:
    """Every row is in the index, once, with the right states."""
    made.publish(output)
    index = files.read_json(output / shards.INDEX)
    assert sorted(row for entry in index["shards"] for row in entry["rows"]) == list(IDS)
    reader = shards.ShardReader([output / shards.INDEX])
    for row, ids in IDS.items():
        assert torch.equal(reader.read(row).hidden_states, random_states(ids[:-1]).hidden_states)


def test_shards_that_fit_are_linked_and_published(tmp_path: Path, captured: Path):
    made = adoption(tmp_path, captured)
    assert made.missing() == []
    assert_published(made, tmp_path / "output")
    for name in (FIRST, SECOND):
        assert (tmp_path / "output" / name).samefile(captured / name)


def test_nothing_captured_leaves_every_row_missing(tmp_path: Path):
    assert adoption(tmp_path, tmp_path / "none").missing() == list(IDS)


@pytest.mark.parametrize("layers", [[1, 2, 3, 5], [1, 2, 3]], ids=str)
def test_shards_of_other_layers_are_not_adopted(tmp_path: Path, captured: Path, layers: list[int]):
    assert adoption(tmp_path, captured, layers=layers).missing() == list(IDS)


def test_a_shard_whose_index_misstates_its_layers_is_not_adopted(tmp_path: Path, captured: Path):
    index = files.read_json(captured / shards.INDEX)
    shards.write_index(captured, [1, 2, 3, 5], index["shards"])
    assert adoption(tmp_path, captured, layers=[1, 2, 3, 5]).missing() == list(IDS)


@pytest.mark.parametrize(
    "ids",
    [
        {**IDS, 5: [*IDS[5][:-2], 199 - IDS[5][-2], IDS[5][-1]]},
        {**IDS, 5: [*IDS[5], 7]},
    ],
    ids=["another token", "one token more"],
)
def test_a_shard_whose_tokens_are_not_the_samples_is_computed_again(tmp_path: Path, captured: Path, ids: dict):
    assert adoption(tmp_path, captured, ids).missing() == [row for row in (3, 5, 6) if row in ids]


def test_a_shard_is_adopted_though_one_of_its_rows_was_left_out(tmp_path: Path, captured: Path):
    kept = {row: ids for row, ids in IDS.items() if row != 5}
    assert adoption(tmp_path, captured, kept).missing() == []


@pytest.mark.parametrize(
    "damage",
    [flip_bit, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.unlink()],
    ids=["one bit", "cut short", "missing"],
)
def test_the_rows_of_a_damaged_shard_are_missing(tmp_path: Path, captured: Path, damage: Callable):
    damage(captured / SECOND)
    assert adoption(tmp_path, captured).missing() == [3, 5, 6]


def test_a_shard_is_adopted_once(tmp_path: Path, captured: Path):
    made = adoption(tmp_path, captured)
    made.adopt(captured)
    assert_published(made, tmp_path / "output")


class FakeApi:
    """An engine that prefills: a file of states beside each answer; it may turn ids around, or die."""

    def __init__(self, folder: Path, backwards: bool = False, dies_after: int = 99):
        self.folder, self.backwards, self.dies_after = folder, backwards, dies_after
        self.asked: list[list[int]] = []
        self.completions = SimpleNamespace(create=self.create)
        self.numbers = itertools.count()

    async def create(self, *, prompt: list[int], max_tokens: int, **_):
        assert max_tokens == 1
        if len(self.asked) == self.dies_after:
            raise UserError("it died")
        self.asked.append(prompt)
        path = self.folder / f"request-{next(self.numbers)}.safetensors"
        states = random_states(prompt)
        ids = states.token_ids.flip(0) if self.backwards else states.token_ids
        save_file({"token_ids": ids.contiguous(), "hidden_states": states.hidden_states}, path)
        return SimpleNamespace(model_dump=lambda: {"kv_transfer_params": {"hidden_states_path": str(path)}})


def capture(made: Adoption, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "client", lambda engine: api)
    server = SimpleNamespace(check_alive=lambda: None, log=Path("log"), tail=lambda: "")
    asyncio.run(made.capture_missing(server, {"max_num_seqs": 1, "stall_timeout": 60}))


def test_only_missing_rows_are_captured(tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch):
    flip_bit(captured / FIRST)
    made = adoption(tmp_path, captured)
    api = FakeApi(made.incoming)
    capture(made, api, monkeypatch)
    assert api.asked == [IDS[row][:-1] for row in (0, 1, 2)]
    assert made.missing() == []
    assert list(made.incoming.iterdir()) == []
    assert_published(made, tmp_path / "output")


def test_rows_within_an_adopted_shards_range_get_a_shard_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "captured"
    shards.write_shard(folder / FIRST, [(1, random_states(IDS[1][:-1]))], LAYERS)
    shards.write_index(folder, LAYERS, [shards.describe(folder / FIRST)])
    made = adoption(tmp_path, folder)
    assert made.missing() == [0, 2, 3, 5, 6]
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 2)  # rows 0 and 2 would take the adopted shard's name
    capture(made, FakeApi(made.incoming), monkeypatch)
    assert_published(made, tmp_path / "output")


def test_a_second_job_captures_only_what_the_first_had_not_written(tmp_path: Path, monkeypatch):
    first = adoption(tmp_path, tmp_path / "none")
    with pytest.raises(UserError, match="it died"):
        capture(first, FakeApi(first.incoming, dies_after=4), monkeypatch)
    second = adoption(tmp_path, tmp_path / "none")
    assert second.missing() == [3, 5, 6]
    capture(second, FakeApi(second.incoming), monkeypatch)
    assert_published(second, tmp_path / "output")


def test_states_of_other_tokens_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = adoption(tmp_path, tmp_path / "none")
    with pytest.raises(UserError, match="not this request's"):
        capture(made, FakeApi(made.incoming, backwards=True), monkeypatch)
    assert made.missing() == list(IDS)
    assert list(made.folder.iterdir()) == []
