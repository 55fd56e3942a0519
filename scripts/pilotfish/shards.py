# SPDX-License-Identifier: Apache-2.0
"""Hidden-state shards: many rows in one safetensors file, read back one row at a time."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pilotfish import files, manifest
from pilotfish.errors import UserError

ROWS_PER_SHARD = 64
INDEX = "index.json"
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


class ShardReader:
    """Reads rows of one split from the folders of its parts, lazily, by row number.

    `layers` are h(k) numbers, in the order in which they are wanted; UserError if one was not captured.
    `open_shards` files stay mapped at a time; few will do for who reads the rows in order.
    """

    def __init__(self, indexes: Sequence[Path], layers: Sequence[int] | None = None, open_shards: int = OPEN_SHARDS):
        self._open_shards = open_shards
        self._shard_of: dict[int, tuple[Path, int]] = {}
        self._open: OrderedDict[Path, object] = OrderedDict()
        self.captured: list[int] = []
        for index in indexes:
            content = files.read_json(index)
            if self.captured and content["capture_layers"] != self.captured:
                raise UserError(f"{index}: layers {content['capture_layers']}, other parts {self.captured}")
            self.captured = content["capture_layers"]
            for shard in content["shards"]:
                path = index.parent / shard["file"]
                for position, row in enumerate(shard["rows"]):
                    if row in self._shard_of:
                        raise UserError(
                            f"{path}: row {row} is in {self._shard_of[row][0]} too; delete {index} and run again"
                        )
                    self._shard_of[row] = (path, position)
        self.layers = list(layers) if layers is not None else self.captured
        missing = sorted(set(self.layers) - set(self.captured))
        if missing:
            raise UserError(
                f"{indexes[0]}: layers {missing} were not captured, only {self.captured}; delete it and run again"
            )
        self._columns = [self.captured.index(layer) for layer in self.layers]

    @classmethod
    def of_file(cls, path: Path, layers: Sequence[int], rows: Sequence[int]) -> "ShardReader":
        """A reader of one shard that no index lists yet."""
        reader = cls([], [])
        reader.captured = list(layers)
        reader.layers, reader._columns = list(layers), list(range(len(layers)))
        reader._shard_of = {row: (path, position) for position, row in enumerate(rows)}
        return reader

    def __contains__(self, row: int) -> bool:
        return row in self._shard_of

    def __len__(self) -> int:
        return len(self._shard_of)

    def place(self, row: int) -> str:
        """Words for where a row lies: its number, part and shard."""
        path, _ = self._shard_of[row]
        return f"row {row} of {path.parent.name}/{path.name}"

    def read(self, row: int) -> RowStates:
        """States of one row; KeyError when no shard holds it."""
        path, position = self._shard_of[row]
        shard = self._opened(path)
        offsets = shard.get_slice("offsets")[position : position + 2].tolist()
        states = shard.get_slice("hidden_states")[offsets[0] : offsets[1]]
        if self._columns != list(range(states.shape[1])):
            states = states[:, self._columns]
        return RowStates(shard.get_slice("token_ids")[offsets[0] : offsets[1]], states)

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


def write_index(folder: Path, layers: Sequence[int], shards: Sequence[dict]) -> None:
    """Write index.json: capture layers, and for each shard its file, rows, tokens, size and sha256."""
    ordered = sorted(shards, key=lambda shard: shard["rows"][0])
    files.write_json(folder / INDEX, {"capture_layers": list(layers), "shards": ordered})


def describe(path: Path) -> dict:
    """The index entry of a shard, read from the shard itself."""
    return {**_contents(path), "file": path.name, "size": path.stat().st_size, "sha256": files.sha256_file(path)}


def _contents(path: Path) -> dict:
    """The rows that a shard holds, and the number of their tokens."""
    with _open(path) as shard:
        rows = shard.get_tensor("rows").tolist()
        return {"rows": rows, "tokens": int(shard.get_slice("offsets")[len(rows) :][0])}


def stored_layers(path: Path) -> list[int]:
    """The h(k) numbers that a shard says it holds."""
    with _open(path) as shard:
        return json.loads(shard.metadata()["capture_layers"])


def verify(index: Path) -> dict[Path, str]:
    """Read every shard that an index lists and compare it with the index; returns their sha256.

    UserError when one is missing, cut short or changed, or holds other rows, tokens or layers than listed.
    """
    listed = files.read_json(index)
    cure = f"delete {index} and run again"
    checksums = {}
    for entry in listed["shards"]:
        path = index.parent / entry["file"]
        size = path.stat().st_size if path.is_file() else 0
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
            shape = shard.get_slice("hidden_states").get_shape()
        layers = stored_layers(path)
        if layers != listed["capture_layers"] or shape[:2] != [entry["tokens"], len(layers)]:
            raise UserError(
                f"{path}: states of shape {shape}, said to be of layers {layers}, where {index} lists "
                f"{entry['tokens']} tokens of layers {listed['capture_layers']}; {cure}"
            )
    return checksums
