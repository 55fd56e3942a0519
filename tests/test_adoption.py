# SPDX-License-Identifier: Apache-2.0
"""Captured shards are linked if they fit to the byte; an engine computes only the layers and rows that they lack."""

import asyncio
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from helpers import LAYERS, flip_bit, random_ids, random_states
from pilotfish import files, generation, shards
from pilotfish.adoption import Adoption
from pilotfish.errors import UserError
from pilotfish.progress import Heartbeat

IDS = {row: random_ids(4 + row, seed=row) for row in (0, 1, 2, 3, 5, 6)}  # shards of rows 0-2 and of 3, 5, 6
ORIGIN = "target, settings and code"
FIRST, SECOND = shards.shard_name(0, 3), shards.shard_name(3, 7)


def states_of(ids: list[int], layers: Sequence[int]) -> torch.Tensor:
    """States [T, layers, H] of tokens [T] in a target of eight layers."""
    return random_states(ids, 8).hidden_states[:, list(layers)].contiguous()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 3)


def write(folder: Path, rows: Sequence[int], layers: Sequence[int] = LAYERS, name: str | None = None) -> dict:
    """A shard of some rows; returns its index entry."""
    path = folder / (name or shards.shard_name(rows[0], rows[-1] + 1))
    held = [(row, shards.RowStates(torch.tensor(IDS[row][:-1]), states_of(IDS[row][:-1], layers))) for row in rows]
    shards.write_shard(path, held, layers)
    return shards.describe(path)


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """What `respond` captured."""
    folder = tmp_path / "captured"
    shards.write_index(folder, LAYERS, [write(folder, rows) for rows in ((0, 1, 2), (3, 5, 6))])
    return folder


def adoption(tmp_path: Path, captured: Path, ids: dict = IDS, layers: list[int] = LAYERS) -> Adoption:
    made = Adoption(tmp_path / "work", layers, ids)
    made.adopt(captured / shards.INDEX)
    return made


def again(tmp_path: Path, layers: list[int] = LAYERS, ids: dict = IDS, origin: str = ORIGIN) -> Adoption:
    """What a later job starts with: Snakemake has deleted index.json from `output`, and the unfinished work is gone."""
    output = tmp_path / "output"
    (output / shards.INDEX).unlink()
    shutil.rmtree(tmp_path / "work")
    made = adoption(tmp_path, tmp_path / "captured", ids, layers)
    made.adopt(output / shards.KEPT, origin)
    return made


def lacking(made: Adoption) -> list[int]:
    return list(made.missing())


def assert_published(made: Adoption, output: Path, layers: list[int] = LAYERS) -> None:
    """The folder holds what its index lists, and every row has each of the layers, with the right states."""
    made.publish(output, ORIGIN)
    index = files.read_json(output / shards.INDEX)
    listed = {entry["file"] for entry in index["shards"]}
    assert {path.name for path in output.iterdir()} == listed | {shards.INDEX, shards.KEPT}
    held = [(row, layer) for entry in index["shards"] for row in entry["rows"] for layer in entry["layers"]]
    assert len(set(held)) == len(held)
    reader = shards.ShardReader([output / shards.INDEX], layers)
    for row, ids in IDS.items():
        assert torch.equal(reader.read(row).hidden_states, states_of(ids[:-1], layers))


def test_shards_that_fit_are_linked_and_published(tmp_path: Path, captured: Path):
    made = adoption(tmp_path, captured)
    assert lacking(made) == []
    assert_published(made, tmp_path / "output")
    for name in (FIRST, SECOND):
        assert (tmp_path / "output" / name).samefile(captured / name)


def test_nothing_captured_leaves_every_row_missing(tmp_path: Path):
    assert lacking(adoption(tmp_path, tmp_path / "none")) == list(IDS)


@pytest.mark.parametrize(("layers", "missing"), [([1, 2, 3, 5], [5]), ([2, 4], []), ([0, 7], [0, 7])], ids=str)
def test_only_the_layers_that_no_shard_holds_are_missing(tmp_path: Path, captured: Path, layers: list, missing: list):
    made = adoption(tmp_path, captured, layers=layers)
    assert made.missing_layers() == missing
    assert made.missing() == (dict.fromkeys(IDS, missing) if missing else {})


def test_what_a_shard_holds_is_its_own_word_and_not_its_indexes(tmp_path: Path, captured: Path):
    index = files.read_json(captured / shards.INDEX)
    for entry in index["shards"]:
        entry["layers"] = [1, 2, 3, 5]
    files.write_json(captured / shards.INDEX, index)
    assert adoption(tmp_path, captured, layers=[1, 2, 3, 5]).missing_layers() == [5]


def test_a_shard_with_fewer_columns_than_layers_is_not_adopted(tmp_path: Path, captured: Path):
    rows = [(row, random_states(IDS[row][:-1], 3)) for row in (0, 1, 2)]
    shards.write_shard(captured / FIRST, rows, LAYERS)
    shards.write_index(captured, LAYERS, [shards.describe(captured / name) for name in (FIRST, SECOND)])
    assert lacking(adoption(tmp_path, captured)) == [0, 1, 2]


@pytest.mark.parametrize(
    "ids",
    [
        {**IDS, 5: [*IDS[5][:-2], 199 - IDS[5][-2], IDS[5][-1]]},
        {**IDS, 5: [*IDS[5], 7]},
    ],
    ids=["another token", "one token more"],
)
def test_a_shard_whose_tokens_are_not_the_samples_is_computed_again(tmp_path: Path, captured: Path, ids: dict):
    assert lacking(adoption(tmp_path, captured, ids)) == [row for row in (3, 5, 6) if row in ids]


def test_a_shard_is_adopted_though_one_of_its_rows_was_left_out(tmp_path: Path, captured: Path):
    kept = {row: ids for row, ids in IDS.items() if row != 5}
    assert lacking(adoption(tmp_path, captured, kept)) == []


@pytest.mark.parametrize(
    "damage",
    [flip_bit, lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.unlink()],
    ids=["one bit", "cut short", "missing"],
)
def test_the_rows_of_a_damaged_shard_are_missing(tmp_path: Path, captured: Path, damage: Callable):
    damage(captured / SECOND)
    assert lacking(adoption(tmp_path, captured)) == [3, 5, 6]


def test_a_shard_is_adopted_once(tmp_path: Path, captured: Path):
    made = adoption(tmp_path, captured)
    made.adopt(captured / shards.INDEX)
    assert_published(made, tmp_path / "output")


class FakeApi:
    """An engine that prefills: a file of states of its layers beside each answer; it may turn ids around, or die."""

    def __init__(self, made: Adoption, backwards: bool = False, dies_after: int = 99):
        self.folder, self.layers = made.incoming, made.missing_layers()
        self.backwards, self.dies_after = backwards, dies_after
        self.asked: list[list[int]] = []
        self.completions = SimpleNamespace(create=self.create)
        self.numbers = itertools.count()

    async def create(self, *, prompt: list[int], max_tokens: int, **_):
        assert max_tokens == 1
        if len(self.asked) == self.dies_after:
            raise UserError("it died")
        self.asked.append(prompt)
        path = self.folder / f"request-{next(self.numbers)}.safetensors"
        ids = torch.tensor(prompt[::-1] if self.backwards else prompt)
        save_file({"token_ids": ids, "hidden_states": states_of(prompt, self.layers)}, path)
        return SimpleNamespace(model_dump=lambda: {"kv_transfer_params": {"hidden_states_path": str(path)}})


def capture(made: Adoption, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "client", lambda engine: api)
    server = SimpleNamespace(check_alive=lambda: None, log=Path("log"), tail=lambda: "")
    beat = Heartbeat(None, "capture", len(made.ids), "rows")
    asyncio.run(made.capture_missing(server, {"max_num_seqs": 1, "stall_timeout": 60}, beat))


def test_only_missing_rows_are_captured(tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch):
    flip_bit(captured / FIRST)
    made = adoption(tmp_path, captured)
    api = FakeApi(made)
    capture(made, api, monkeypatch)
    assert api.asked == [IDS[row][:-1] for row in (0, 1, 2)]
    assert lacking(made) == []
    assert list(made.incoming.iterdir()) == []
    assert_published(made, tmp_path / "output")


def test_rows_within_an_adopted_shards_range_get_a_shard_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "captured"
    shards.write_index(folder, LAYERS, [write(folder, [1], name=FIRST)])
    made = adoption(tmp_path, folder)
    assert lacking(made) == [0, 2, 3, 5, 6]
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 2)  # rows 0 and 2 would take the adopted shard's name
    capture(made, FakeApi(made), monkeypatch)
    assert_published(made, tmp_path / "output")


def test_a_second_job_captures_only_what_the_first_had_not_written(tmp_path: Path, monkeypatch):
    first = adoption(tmp_path, tmp_path / "none")
    with pytest.raises(UserError, match="it died"):
        capture(first, FakeApi(first, dies_after=4), monkeypatch)
    second = adoption(tmp_path, tmp_path / "none")
    assert lacking(second) == [3, 5, 6]
    capture(second, FakeApi(second), monkeypatch)
    assert_published(second, tmp_path / "output")


def publish(made: Adoption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Have an engine capture what is missing, and publish; returns the prompts that it was asked for."""
    api = FakeApi(made)
    capture(made, api, monkeypatch)
    assert_published(made, tmp_path / "output", made.layers)
    return api.asked


def test_a_new_drafters_layers_alone_are_captured_and_read_with_the_old_ones(
    tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch
):
    assert publish(adoption(tmp_path, captured), tmp_path, monkeypatch) == []
    more = again(tmp_path, layers=[1, 4, 5, 7])
    assert more.missing_layers() == [5, 7]
    assert publish(more, tmp_path, monkeypatch) == [ids[:-1] for ids in IDS.values()]
    index = files.read_json(tmp_path / "output" / shards.INDEX)
    assert index["capture_layers"] == [1, 2, 3, 4, 5, 7]
    assert [entry["layers"] for entry in index["shards"]] == [LAYERS, [5, 7]] * 2
    assert_published(more, tmp_path / "output", [7, 1, 2, 5])


def test_an_earlier_captures_shards_are_kept_when_nothing_else_is_left_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(adoption(tmp_path, tmp_path / "none", layers=[2, 6]), tmp_path, monkeypatch)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "output").glob("rows_*")}
    assert publish(again(tmp_path, layers=[2, 6]), tmp_path, monkeypatch) == []
    assert {path.name: path.stat().st_ino for path in (tmp_path / "output").glob("rows_*")} == before


def test_layers_that_no_drafter_needs_any_more_stay_readable(
    tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(adoption(tmp_path, captured, layers=[*LAYERS, 6]), tmp_path, monkeypatch)
    assert publish(again(tmp_path, layers=[2, 7]), tmp_path, monkeypatch) == [ids[:-1] for ids in IDS.values()]
    assert publish(again(tmp_path, layers=[1, 6, 7]), tmp_path, monkeypatch) == []


def test_rows_that_lack_all_layers_and_rows_that_lack_some_get_shards_of_their_own(
    tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch
):
    flip_bit(captured / FIRST)
    made = adoption(tmp_path, captured, layers=[*LAYERS, 6])
    assert made.missing() == {row: [*LAYERS, 6] if row < 3 else [6] for row in IDS}
    publish(made, tmp_path, monkeypatch)
    index = files.read_json(tmp_path / "output" / shards.INDEX)
    assert sorted((entry["rows"], entry["layers"]) for entry in index["shards"]) == [
        ([0, 1, 2], [*LAYERS, 6]),
        ([3, 5, 6], LAYERS),
        ([3, 5, 6], [6]),
    ]


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink], ids=["one bit", "missing"])
def test_the_rows_of_an_earlier_captures_damaged_shard_are_captured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable
):
    publish(adoption(tmp_path, tmp_path / "none"), tmp_path, monkeypatch)
    damage(tmp_path / "output" / SECOND)
    assert publish(again(tmp_path), tmp_path, monkeypatch) == [IDS[row][:-1] for row in (3, 5, 6)]


def test_an_earlier_capture_with_other_settings_is_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(adoption(tmp_path, tmp_path / "none"), tmp_path, monkeypatch)
    assert lacking(again(tmp_path, origin="another target")) == list(IDS)


def test_an_earlier_captures_states_of_other_tokens_are_not_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(adoption(tmp_path, tmp_path / "none"), tmp_path, monkeypatch)
    assert lacking(again(tmp_path, ids={**IDS, 5: random_ids(9, seed=99)})) == [3, 5, 6]


def test_a_shard_that_adds_nothing_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`respond` has captured anew, all layers now: what an earlier capture added to its old shards is let go."""
    publish(adoption(tmp_path, tmp_path / "none", layers=[2, 6]), tmp_path, monkeypatch)
    folder = tmp_path / "captured"
    shards.write_index(folder, [2, 6, 7], [write(folder, rows, [2, 6, 7]) for rows in ((0, 1, 2), (3, 5, 6))])
    assert publish(again(tmp_path, layers=[2, 6, 7]), tmp_path, monkeypatch) == []
    assert {path.name for path in (tmp_path / "output").glob("rows_*")} == {FIRST, SECOND}


def test_two_sources_shards_of_one_name_are_both_kept(tmp_path: Path, captured: Path, monkeypatch: pytest.MonkeyPatch):
    publish(adoption(tmp_path, tmp_path / "none", layers=[0, 6]), tmp_path, monkeypatch)
    assert publish(again(tmp_path, layers=[0, 1, 6]), tmp_path, monkeypatch) == []
    assert len(list((tmp_path / "output").glob("rows_*"))) == 4


def test_unfinished_shards_of_rows_that_are_no_samples_any_more_are_removed(tmp_path: Path, captured: Path):
    adoption(tmp_path, captured)
    made = Adoption(tmp_path / "work", LAYERS, {0: IDS[0]})
    assert [path.name for path in made.folder.iterdir()] == [FIRST]


def test_states_of_other_tokens_are_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = adoption(tmp_path, tmp_path / "none")
    with pytest.raises(UserError, match="not this request's"):
        capture(made, FakeApi(made, backwards=True), monkeypatch)
    assert lacking(made) == list(IDS)
    assert list(made.folder.iterdir()) == []
