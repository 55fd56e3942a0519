# SPDX-License-Identifier: Apache-2.0
"""Whatever became of a run's own files, they are read rightly, or refused by name; nothing outside is touched."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers import LAYERS, captured_folder, random_ids
from hostile import VALUES, damaged, fuzzed, places, settled, with_value
from pilotfish import files, manifest, seals, shards
from pilotfish.errors import UserError

MANIFEST = {
    "schema": "samples",
    "version": 1,
    "files": {"data.bin": {"sha256": "0" * 64, "size": 3, "rows": 1}},
    "spec": "{}",
    "code": "c0de",
    "packages": {"torch": "2"},
    "statistics": {"rows": 1},
}


@fuzzed(500)
@given(change=st.tuples(st.sampled_from(places(MANIFEST)), VALUES), sealed=st.booleans())
def test_any_manifest_is_whole_or_refused_with_a_file_that_is_named(tmp_path: Path, change: tuple, sealed: bool):
    path = tmp_path / "manifest.json"
    (tmp_path / "data.bin").write_bytes(b"abc")
    content = with_value(MANIFEST, *change)
    if sealed and isinstance(content, dict):
        content = {**content, seals.SEAL: ""}
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    found = settled(lambda: manifest.read(path, "samples"), tmp_path)
    if found is not None:
        assert isinstance(found["statistics"], dict)
        assert all((tmp_path / name).stat().st_size == entry["size"] for name, entry in found["files"].items())


@fuzzed(300)
@given(content=damaged(json.dumps(MANIFEST, indent=2).encode()))
def test_a_damaged_manifest_is_whole_or_refused(tmp_path: Path, content: bytes):
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / "data.bin").write_bytes(b"abc")
    settled(lambda: manifest.read(tmp_path / "manifest.json", "samples"), tmp_path)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows in one shard with its index."""
    return captured_folder(tmp_path_factory.mktemp("shards"), {row: random_ids(4 + row, row) for row in range(3)})


def read_all(folder: Path) -> list[int]:
    """Tokens of the states of each row that an index lists."""
    reader = shards.ShardReader([folder / shards.INDEX])
    return [len(reader.read(row).token_ids) for row in range(3) if row in reader]


INDEX = {
    "capture_layers": LAYERS,
    "shards": [{"file": "x", "rows": [0, 1, 2], "layers": LAYERS, "tokens": 12, "size": 1, "sha256": "0" * 64}],
}


@fuzzed(500)
@given(change=st.tuples(st.sampled_from(places(INDEX)), VALUES))
def test_any_index_gives_states_or_an_error_that_names_it_or_a_shard(captured: Path, change: tuple):
    path, before = captured / shards.INDEX, (captured / shards.INDEX).read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(with_value(json.loads(before), *change)), encoding="utf-8")
        for read in (lambda: read_all(captured), lambda: shards.verify(path)):
            settled(read, captured)
    finally:
        path.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("name", ["../rows.safetensors", "/etc/passwd", "a/b", "..", "a\0", "a" * 300, "", 7, None])
def test_an_index_names_no_file_but_those_beside_it(captured: Path, tmp_path: Path, name: object):
    index = files.read_json(captured / shards.INDEX)
    index["shards"][0]["file"] = name
    files.write_json(tmp_path / shards.INDEX, index)
    for read in (read_all, lambda folder: shards.verify(folder / shards.INDEX)):
        with pytest.raises(UserError, match=str(tmp_path)):
            read(tmp_path)


SHARD_HEADER = {
    "__metadata__": {"capture_layers": "[1]"},
    "hidden_states": {"dtype": "BF16", "shape": [2, 1, 2], "data_offsets": [0, 8]},
    "token_ids": {"dtype": "I64", "shape": [2], "data_offsets": [8, 24]},
    "rows": {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]},
    "offsets": {"dtype": "I64", "shape": [2], "data_offsets": [32, 48]},
}


def shard_bytes(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8) + struct.pack("<5q", 7, 8, 0, 0, 2)


SHARDS = damaged(shard_bytes(SHARD_HEADER)) | st.tuples(st.sampled_from(places(SHARD_HEADER)), VALUES).map(
    lambda change: shard_bytes(with_value(SHARD_HEADER, *change))
)


@fuzzed(800)
@given(content=SHARDS)
def test_any_shard_is_read_or_refused_with_its_name(tmp_path: Path, content: bytes):
    path = tmp_path / "rows_0000000-0000001.safetensors"
    path.write_bytes(content)
    settled(lambda: shards.read_row_file(path), path)
    settled(lambda: shards.ShardReader.of_file(path, [1], [0]).read(0), path)
    entry = settled(lambda: shards.describe(path), path)
    if entry is not None:
        shards.write_index(tmp_path, [1], [entry])
        settled(lambda: shards.verify(tmp_path / shards.INDEX), path)


def without(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, value: torch.Tensor) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        *map(without, ("rows", "offsets", "hidden_states", "token_ids")),
        replaced("offsets", torch.zeros(1, dtype=torch.long)),
        replaced("offsets", torch.tensor([0, 10**12, 2, 3])),
        replaced("offsets", torch.tensor([3, 0, -1, -5])),
        replaced("offsets", torch.tensor(0)),
        replaced("rows", torch.zeros(3, 3)),
        replaced("hidden_states", torch.zeros(3)),
    ],
)
def test_a_shard_of_other_tensors_is_refused_with_its_name(captured: Path, tmp_path: Path, change: Callable):
    source = next(captured.glob("rows_*"))
    tensors = load_file(source)
    change(tensors)
    path = tmp_path / source.name
    save_file(tensors, path, {"capture_layers": json.dumps(LAYERS)})
    index = files.read_json(captured / shards.INDEX)
    files.write_json(tmp_path / shards.INDEX, index)
    with pytest.raises(UserError, match=str(path)):
        shards.verify(tmp_path / shards.INDEX)
    settled(lambda: read_all(tmp_path), path)
