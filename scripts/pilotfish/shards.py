# SPDX-License-Identifier: Apache-2.0
"""Hidden-state shards: many rows in one safetensors file, read back one row at a time."""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pilotfish import files, manifest, seals
from pilotfish.errors import UserError

ROWS_PER_SHARD = 64
INDEX = "index.json"
KEPT = "kept.json"  # the index once more, and its origin; undeclared, so Snakemake leaves it where it deletes the index
OPEN_SHARDS = 16  # files that a reader in any order keeps mapped


@dataclass(frozen=True)
class RowStates:
    """One row's states: `token_ids` [T-1] int64 and `hidden_states` [T-1, layers, H].

    T counts prompt and response; the very last token was never an input, so it has no state.
    """

    token_ids: torch.Tensor
    hidden_states: torch.Tensor


def shard_name(start: int, end: int) -> str:
    """File name of the shard that holds rows start..end-1 of a split."""
    return f"rows_{start:07d}-{end:07d}.safetensors"


def shard_ranges(start: int, end: int) -> list[tuple[int, int]]:
    """Consecutive [start, end) ranges of at most ROWS_PER_SHARD rows, never empty."""
    return [(a, min(a + ROWS_PER_SHARD, end)) for a in range(start, end, ROWS_PER_SHARD)]


def write_shard(path: Path, rows: Sequence[tuple[int, RowStates]], layers: Sequence[int]) -> None:
    """Write rows, each with its number in the split, into one shard; atomic.

    Tensors: `hidden_states` [tokens, layers, H], `token_ids` [tokens], `rows` [n], `offsets` [n + 1]:
    row i of the shard lies at offsets[i]:offsets[i + 1].
    """
    lengths = torch.tensor([len(states.token_ids) for _, states in rows])
    tensors = {
        "hidden_states": torch.cat([states.hidden_states for _, states in rows]),
        "token_ids": torch.cat([states.token_ids for _, states in rows]),
        "rows": torch.tensor([row for row, _ in rows]),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
    }
    with files.replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"capture_layers": json.dumps(list(layers))})


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors' own class derives from no narrower one
        raise UserError(f"{path}: not a readable safetensors file ({error}); delete it and run again") from None


def read_row_file(path: Path) -> RowStates:
    """The states of one request as the connector wrote them; UserError if the file is damaged."""
    with _open(path) as held:
        try:
            return RowStates(held.get_tensor("token_ids"), held.get_tensor("hidden_states"))
        except Exception as error:
            raise UserError(f"{path}: not the states of a request ({error})") from None


def verified_indexes(path: Path) -> list[Path]:
    """index.json of each part that a manifest of hidden states vouches for."""
    return [path.parent / name for name in manifest.read(path, "hidden_states")["files"] if name.endswith(INDEX)]


@dataclass(frozen=True)
class _Shard:
    """A shard on the disk; `layers` are the h(k) numbers of its columns."""

    path: Path
    layers: tuple[int, ...]


class ShardReader:
    """Reads rows of one split from the folders of its parts, lazily, by row number.

    A row's layers may lie in several shards of its part. `layers` are h(k) numbers, in the order in which they are
    wanted; without them come those that every part declares (`captured`). `open_shards` files stay mapped at a time;
    few will do for who reads the rows in order.

    Raises UserError if a part does not declare a layer, or if a row is in two parts, or a layer of it in two shards.
    """

    def __init__(self, indexes: Sequence[Path], layers: Sequence[int] | None = None, open_shards: int = OPEN_SHARDS):
        self._open_shards = open_shards
        self._places: dict[int, tuple[tuple[_Shard, int], ...]] = {}  # of a row: its shards, and its position in each
        self._open: OrderedDict[Path, object] = OrderedDict()
        declared = {}
        for index in indexes:
            content = read_index(index)
            declared[index] = content["capture_layers"]
            for entry in content["shards"]:
                shard = _Shard(index.parent / entry["file"], tuple(entry["layers"]))
                self._add(shard, entry["rows"], f"delete {index} and run again")
        self.captured = sorted(set.intersection(*map(set, declared.values()))) if declared else []
        self.layers = list(layers) if layers is not None else self.captured
        for index, held in declared.items():
            if missing := sorted(set(self.layers) - set(held)):
                raise UserError(f"{index}: layers {missing} were not captured, only {held}; delete it and run again")
        if self._places and not self.layers:
            raise UserError(f"{indexes[0]}: no layer that every row has; delete it and run again")

    @classmethod
    def of_file(cls, path: Path, layers: Sequence[int], rows: Sequence[int]) -> "ShardReader":
        """A reader of one shard that no index lists yet."""
        reader = cls([])
        reader.captured = reader.layers = list(layers)
        reader._add(_Shard(path, tuple(layers)), rows, "delete it and run again")
        return reader

    def _add(self, shard: _Shard, rows: Sequence[int], cure: str) -> None:
        for position, row in enumerate(rows):
            held = self._places.get(row, ())
            for other, _ in held:
                if other.path.parent != shard.path.parent or set(other.layers) & set(shard.layers):
                    raise UserError(f"{shard.path}: row {row} is in {other.path} too; {cure}")
            self._places[row] = (*held, (shard, position))

    def __contains__(self, row: int) -> bool:
        return not self.lacking(row)

    def __len__(self) -> int:
        return len(self._places)

    def lacking(self, row: int) -> list[int]:
        """Layers that every part declares and no shard holds of this row: all of them where none holds the row."""
        held = {layer for shard, _ in self._places.get(row, ()) for layer in shard.layers}
        return [layer for layer in self.captured if layer not in held]

    def place(self, row: int) -> str:
        """Words for where a row lies: its number, part and shards."""
        paths = [shard.path for shard, _ in self._places[row]]
        return f"row {row} of {paths[0].parent.name}/{' and '.join(path.name for path in paths)}"

    def read(self, row: int) -> RowStates:
        """States of one row; KeyError when no shard holds it, UserError when its shards do not go together."""
        found: list[tuple[_Shard, list[int], RowStates]] = []
        for shard, position in self._places[row]:
            if wanted := [layer for layer in self.layers if layer in shard.layers]:
                piece = _as_written(
                    partial(self._read, shard, position, wanted),
                    shard.path,
                    f"delete {shard.path.parent / INDEX} and run again",
                )
                found.append((shard, wanted, piece))
        if sum(len(wanted) for _, wanted, _ in found) < len(self.layers):
            raise KeyError(f"row {row}: no shard holds layers {self.lacking(row)}")
        first, _, held = found[0]
        if len(found) == 1:
            return held
        tokens, _, hidden = held.hidden_states.shape
        states_TLH = held.hidden_states.new_empty(tokens, len(self.layers), hidden)
        for shard, wanted, piece in found:
            if not (torch.equal(piece.token_ids, held.token_ids) and _alike(piece.hidden_states, held.hidden_states)):
                raise UserError(
                    f"{shard.path}: row {row} has other tokens, type or width than in {first.path}; delete "
                    f"{shard.path.parent / INDEX} and run again"
                )
            states_TLH[:, [self.layers.index(layer) for layer in wanted]] = piece.hidden_states
        return RowStates(held.token_ids, states_TLH)

    def _read(self, shard: _Shard, position: int, wanted: list[int]) -> RowStates:
        """What one shard holds of the row at `position`: token ids [T], and states [T, wanted layers, H]."""
        opened = self._opened(shard.path)
        start, end = opened.get_slice("offsets")[position : position + 2].tolist()
        states = opened.get_slice("hidden_states")[start:end]
        if states.shape[1] != len(shard.layers):
            raise UserError(f"{shard.path}: {states.shape[1]} columns where its layers are {list(shard.layers)}")
        columns = [shard.layers.index(layer) for layer in wanted]
        if columns != list(range(states.shape[1])):
            states = states[:, columns]
        return RowStates(opened.get_slice("token_ids")[start:end], states)

    def _opened(self, path: Path):
        if path in self._open:
            self._open.move_to_end(path)
        else:
            self._open[path] = _open(path)
            if len(self._open) > self._open_shards:
                self._open.popitem(last=False)
        return self._open[path]

    def __getstate__(self) -> dict:
        # Open files do not travel to data-loader workers; each opens its own.
        return {**self.__dict__, "_open": OrderedDict()}


def _as_written(read: Callable[[], Any], path: Path, cure: str) -> Any:
    """What `read` gives of a shard; UserError where the shard is not as `write_shard` writes it."""
    try:
        return read()
    except UserError:
        raise
    except Exception as error:  # tensors missing, of other shapes or types: each fails in its own way
        raise UserError(f"{path}: not a shard as a capture writes it ({error}); {cure}") from None


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape[-1]) == (right.dtype, right.shape[-1])


def write_index(folder: Path, layers: Sequence[int], shards: Sequence[dict], **more: dict) -> None:
    """Write index.json: the layers that each row has, and each shard's file, rows, layers, tokens, size and sha256.

    One row may be in several shards, each with other layers. `more` are other files beside them, likewise described.
    """
    ordered = sorted(shards, key=lambda entry: (entry["rows"][0], entry["file"]))
    seals.write_json(folder / INDEX, {"capture_layers": list(layers), "shards": ordered, **more})


def read_index(path: Path) -> dict:
    """What `write_index` wrote, and of KEPT its origin; UserError where it is not of that form."""
    content = files.read_json(path)
    entries = content.get("shards")
    if not (_are_numbers(content.get("capture_layers")) and isinstance(entries, list) and all(map(_is_entry, entries))):
        raise UserError(f"{path}: not an index as a capture writes it; delete it and run again")
    return content


def _is_entry(entry: object) -> bool:
    """Whether this is an entry of an index; its file lies beside the index and nowhere else."""
    return (
        isinstance(entry, dict)
        and all(_are_numbers(entry.get(key)) for key in ("rows", "layers"))
        and all(isinstance(entry.get(key), int) for key in ("tokens", "size"))
        and all(isinstance(entry.get(key), str) for key in ("file", "sha256"))
        and entry["file"] == Path(entry["file"]).name
    )


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def describe(path: Path) -> dict:
    """The index entry of a shard, read from the shard itself."""
    return {**_contents(path), "file": path.name, "size": path.stat().st_size, "sha256": files.sha256_file(path)}


def _contents(path: Path) -> dict:
    """The rows that a shard holds, the number of their tokens, and the h(k) numbers that it says it holds."""

    def read() -> dict:
        with _open(path) as shard:
            rows = shard.get_tensor("rows").tolist()
            tokens = int(shard.get_slice("offsets")[len(rows) :][0])
            found = {"rows": rows, "tokens": tokens, "layers": json.loads(shard.metadata()["capture_layers"])}
        if not (_are_numbers(rows) and _are_numbers(found["layers"])):
            raise ValueError("rows or layers that are no whole numbers")
        return found

    return _as_written(read, path, "delete it and run again")


def _shape(shard: Any) -> list[int]:
    return shard.get_slice("hidden_states").get_shape()


def verify(index: Path) -> dict[Path, str]:
    """Read every shard that an index lists and compare it with the index; returns their sha256.

    UserError when one is missing, cut short or changed, or holds other rows, tokens or layers than listed.
    """
    cure = f"delete {index} and run again"
    checksums = {}
    for entry in read_index(index)["shards"]:
        path = index.parent / entry["file"]
        size = path.stat().st_size if os.path.isfile(path) else 0
        if size != entry["size"]:
            raise UserError(f"{path}: missing or cut short, {size} of the {entry['size']} bytes of {index}; {cure}")
        # First of all: what else could be read from a damaged file means nothing.
        checksums[path] = files.sha256_file(path)
        if checksums[path] != entry["sha256"]:
            raise UserError(f"{path}: its checksum is not the one in {index}, so its bytes have changed; {cure}")
        for name, held in _contents(path).items():
            if held != entry[name]:
                raise UserError(f"{path}: its {name} are not those that {index} lists; {cure}")
        with _open(path) as shard:
            shape = _as_written(partial(_shape, shard), path, cure)
        if shape[:2] != [entry["tokens"], len(entry["layers"])]:
            raise UserError(
                f"{path}: states of shape {shape}, where {index} lists {entry['tokens']} tokens of layers "
                f"{entry['layers']}; {cure}"
            )
    return checksums
