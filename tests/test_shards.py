# SPDX-License-Identifier: Apache-2.0
"""Shards give back each row as it was written, and say what is wrong with a file that cannot."""

import pickle
from pathlib import Path

import pytest
import torch

from helpers import LAYERS, captured_folder, flip_bit, random_ids, random_states
from pilotfish import files, shards
from pilotfish.errors import UserError

IDS = {row: random_ids(length, seed=row) for row, length in {10: 2, 11: 9, 12: 5, 14: 7, 15: 30}.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows 10 to 15 without 13, three to a shard."""
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 3)
    return captured_folder(tmp_path / "captured", IDS)


def same(states: shards.RowStates, row: int, columns: list[int] | slice = slice(None)) -> bool:
    wanted = random_states(IDS[row][:-1])
    ids_equal = torch.equal(states.token_ids, wanted.token_ids)
    return ids_equal and torch.equal(states.hidden_states, wanted.hidden_states[:, columns])


def test_rows_of_different_lengths_come_back_bit_for_bit(folder: Path):
    reader = shards.ShardReader([folder / shards.INDEX])
    assert all(same(reader.read(row), row) for row in reversed(IDS))
    assert reader.read(11).hidden_states.dtype == torch.bfloat16


def test_parts_are_read_as_one_split(tmp_path: Path):
    first = captured_folder(tmp_path / "a", {row: IDS[row] for row in (10, 11)})
    second = captured_folder(tmp_path / "b", {row: IDS[row] for row in (12, 14, 15)})
    reader = shards.ShardReader([second / shards.INDEX, first / shards.INDEX])
    assert all(same(reader.read(row), row) for row in IDS)


def test_layers_that_every_part_declares_can_be_read(tmp_path: Path):
    first = captured_folder(tmp_path / "a", {10: IDS[10]})
    second = captured_folder(tmp_path / "b", {11: IDS[11]}, layers=[1, 2])
    indexes = [first / shards.INDEX, second / shards.INDEX]
    assert shards.ShardReader(indexes).layers == [1, 2]
    with pytest.raises(UserError, match=r"b/index.json: layers \[4\] were not captured, only \[1, 2\]"):
        shards.ShardReader(indexes, [1, 4])


@pytest.mark.parametrize(("layers", "columns"), [([2, 4], [1, 3]), ([4, 1], [3, 0]), ([3], [2])])
def test_layers_are_chosen_by_number_in_the_asked_order(folder: Path, layers: list, columns: list):
    reader = shards.ShardReader([folder / shards.INDEX], layers)
    assert same(reader.read(12), 12, columns)


def test_a_layer_that_was_not_captured_is_named(folder: Path):
    with pytest.raises(UserError, match=r"layers \[0, 7\] were not captured"):
        shards.ShardReader([folder / shards.INDEX], [1, 7, 0])


class Recorder:
    """An open shard that notes how much of it is asked for."""

    def __init__(self, shard):
        self.shard, self.read = shard, []

    def get_slice(self, name: str):
        whole = self.shard.get_slice(name)
        noted = self

        class Slice:
            def __getitem__(self, span: slice):
                noted.read.append(name)
                found = whole[span]
                assert len(found) <= 4, f"{name}: more than the row's 4 entries"
                return found

        return Slice()


def test_no_more_than_the_row_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    reader = shards.ShardReader([folder / shards.INDEX])
    recorder = Recorder(reader._opened(folder / shards.shard_name(10, 13)))
    monkeypatch.setattr(reader, "_opened", lambda path: recorder)
    assert same(reader.read(12), 12)
    assert sorted(recorder.read) == ["hidden_states", "offsets", "token_ids"]


def test_a_row_that_no_shard_holds_is_not_contained(folder: Path):
    reader = shards.ShardReader([folder / shards.INDEX])
    assert [row for row in range(9, 17) if row in reader] == list(IDS)
    with pytest.raises(KeyError):
        reader.read(13)


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-1]), Path.unlink])
def test_a_truncated_or_missing_shard_is_named(folder: Path, damage):
    path = folder / shards.shard_name(10, 13)
    damage(path)
    reader = shards.ShardReader([folder / shards.INDEX])
    assert same(reader.read(14), 14)
    with pytest.raises(UserError, match=f"{path}: not a readable safetensors file"):
        reader.read(10)


def test_a_reader_that_has_read_can_be_pickled(folder: Path):
    reader = shards.ShardReader([folder / shards.INDEX], [4, 1])
    reader.read(10)
    assert same(pickle.loads(pickle.dumps(reader)).read(15), 15, [3, 0])


def test_few_shards_stay_open(folder: Path):
    reader = shards.ShardReader([folder / shards.INDEX], open_shards=1)
    assert all(same(reader.read(row), row) for row in (10, 15, 11, 14))
    assert len(reader._open) == 1


def test_the_index_lists_shards_in_row_order_with_size_and_checksum(folder: Path):
    index = files.read_json(folder / shards.INDEX)
    entries = index["shards"]
    shards.write_index(folder, LAYERS, entries[::-1])
    assert files.read_json(folder / shards.INDEX) == index
    assert index["capture_layers"] == LAYERS
    assert [entry["rows"] for entry in entries] == [[10, 11, 12], [14, 15]]
    assert [entry["tokens"] for entry in entries] == [1 + 8 + 4, 6 + 29]
    assert [entry["layers"] for entry in entries] == [LAYERS, LAYERS]
    for entry in entries:
        path = folder / entry["file"]
        assert (entry["size"], entry["sha256"]) == (path.stat().st_size, files.sha256_file(path))


@pytest.mark.parametrize(
    ("start", "end", "ranges"),
    [
        (0, 0, []),
        (5, 6, [(5, 6)]),
        (0, 64, [(0, 64)]),
        (64, 193, [(64, 128), (128, 192), (192, 193)]),
    ],
)
def test_ranges_cover_the_rows_and_are_never_empty(start: int, end: int, ranges: list):
    assert shards.shard_ranges(start, end) == ranges


def test_shards_that_are_as_their_index_says_are_verified_with_their_checksums(folder: Path):
    entries = files.read_json(folder / shards.INDEX)["shards"]
    assert shards.verify(folder / shards.INDEX) == {folder / entry["file"]: entry["sha256"] for entry in entries}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, r"missing or cut short, 0 of the \d+ bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "missing or cut short"),
        (flip_bit, "its checksum is not the one in"),
    ],
)
def test_a_damaged_shard_is_refused_with_its_index_as_the_cure(folder: Path, damage, said: str):
    path = folder / shards.shard_name(10, 13)
    damage(path)
    with pytest.raises(UserError, match=f"{path}: {said}.*; delete {folder / shards.INDEX} and run again"):
        shards.verify(folder / shards.INDEX)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rows", [10, 11, 13], "its rows are not those"),
        ("tokens", 99, "its tokens are not those"),
        ("layers", [1, 2, 3, 5], "its layers are not those"),
    ],
)
def test_an_index_that_misstates_a_shard_is_refused(folder: Path, key: str, value, said: str):
    index = files.read_json(folder / shards.INDEX)
    index["shards"][0][key] = value
    files.write_json(folder / shards.INDEX, index)
    with pytest.raises(UserError, match=said):
        shards.verify(folder / shards.INDEX)


def test_a_shard_with_fewer_columns_than_layers_is_refused(tmp_path: Path):
    path = tmp_path / shards.shard_name(10, 11)
    shards.write_shard(path, [(10, random_states(IDS[10][:-1], layers=3))], LAYERS)
    shards.write_index(tmp_path, LAYERS, [shards.describe(path)])
    with pytest.raises(UserError, match=r"states of shape \[1, 3, 64\], where .* 1 tokens of layers \[1, 2, 3, 4\]"):
        shards.verify(tmp_path / shards.INDEX)
    with pytest.raises(UserError, match=r"3 columns where its layers are \[1, 2, 3, 4\]"):
        shards.ShardReader([tmp_path / shards.INDEX]).read(10)


def test_a_row_in_two_shards_is_refused(tmp_path: Path):
    first = captured_folder(tmp_path / "a", {10: IDS[10], 11: IDS[11]})
    second = captured_folder(tmp_path / "b", {11: IDS[11]})
    with pytest.raises(UserError, match=r"b/rows_\S+: row 11 is in \S+/a/rows_\S+ too; delete .*b/index.json"):
        shards.ShardReader([first / shards.INDEX, second / shards.INDEX])


def by_layer(folder: Path, *pieces: tuple[list[int], list[int]]) -> Path:
    """Shards that hold some rows with some layers each; returns their index."""
    entries = []
    for number, (rows, layers) in enumerate(pieces):
        held = []
        for row in rows:
            whole = random_states(IDS[row][:-1])
            columns = [LAYERS.index(layer) for layer in layers]
            held.append((row, shards.RowStates(whole.token_ids, whole.hidden_states[:, columns])))
        path = folder / f"rows_{number}.safetensors"
        shards.write_shard(path, held, layers)
        entries.append(shards.describe(path))
    shards.write_index(folder, LAYERS, entries)
    return folder / shards.INDEX


@pytest.mark.parametrize(("layers", "columns"), [(None, [0, 1, 2, 3]), ([4, 1, 3], [3, 0, 2]), ([3, 1], [2, 0])])
def test_layers_of_one_row_are_put_together_from_the_shards_that_hold_them(
    tmp_path: Path, layers: list | None, columns: list
):
    index = by_layer(tmp_path, ([10, 11], [2, 3]), ([10, 11], [1, 4]), ([12], LAYERS))
    reader = shards.ShardReader([index], layers)
    assert all(same(reader.read(row), row, columns) for row in (10, 11, 12))
    assert (len(reader), reader.place(11)) == (
        3,
        f"row 11 of {tmp_path.name}/rows_0.safetensors and rows_1.safetensors",
    )
    assert list(shards.verify(index)) == [tmp_path / f"rows_{number}.safetensors" for number in (0, 1, 2)]


def test_a_shard_without_a_wanted_layer_is_not_opened(tmp_path: Path):
    reader = shards.ShardReader([by_layer(tmp_path, ([10], [2, 3]), ([10], [1, 4]))], [3])
    (tmp_path / "rows_1.safetensors").unlink()
    assert same(reader.read(10), 10, [2])


def test_a_layer_of_a_row_in_two_shards_is_refused(tmp_path: Path):
    index = by_layer(tmp_path, ([10, 11], [1, 2, 3]), ([11], [3, 4]))
    with pytest.raises(UserError, match=r"rows_1\.safetensors: row 11 is in \S+/rows_0\.safetensors too; delete"):
        shards.ShardReader([index])


def test_a_row_that_lacks_a_declared_layer_is_not_contained(tmp_path: Path):
    reader = shards.ShardReader([by_layer(tmp_path, ([10, 11], [1, 2, 3]), ([11], [4]))])
    assert [row for row in IDS if row in reader] == [11]
    assert [reader.lacking(row) for row in (10, 11, 12)] == [[4], [], LAYERS]
    with pytest.raises(KeyError, match=r"row 10: no shard holds layers \[4\]"):
        reader.read(10)


@pytest.mark.parametrize(
    "change",
    [
        lambda held: shards.RowStates(held.token_ids + 1, held.hidden_states),
        lambda held: shards.RowStates(held.token_ids, held.hidden_states.half()),
    ],
    ids=["other tokens", "another type"],
)
def test_shards_of_one_row_that_do_not_go_together_are_refused(tmp_path: Path, change):
    index = by_layer(tmp_path, ([10], [1, 2, 3]), ([10], [4]))
    whole = random_states(IDS[10][:-1])
    path = tmp_path / "rows_1.safetensors"
    shards.write_shard(path, [(10, change(shards.RowStates(whole.token_ids, whole.hidden_states[:, 3:])))], [4])
    with pytest.raises(
        UserError, match=r"rows_1\.safetensors: row 10 has other tokens, type or width than in .*rows_0"
    ):
        shards.ShardReader([index]).read(10)
