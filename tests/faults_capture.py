# SPDX-License-Identifier: Apache-2.0
"""Faults of captured hidden states: the index and its checksums are right, so that only the content is wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from faults import Scene, fault
from helpers import flip_bit
from pilotfish import files, golden, shards
from pilotfish.shards import RowStates

GATE = "validate_hidden_states"
INDEX = "hidden_states/train/00000-of-00002/index.json"
FOLDER = r"hidden_states/train"
RECAPTURE = r"(?s:.*)Capture these rows anew: delete the part's index\.json"


def rewrite(scene: Scene, change: Callable[[int, RowStates, shards.ShardReader], RowStates]) -> None:
    """Write every shard of the training split again with changed rows, and its index with right checksums."""
    every = sorted(scene.path("hidden_states/train").glob("*/index.json"))
    reader = shards.ShardReader(every)
    for index in every:
        entries = []
        for entry in files.read_json(index)["shards"]:
            rows = [(row, change(row, reader.read(row), reader)) for row in entry["rows"]]
            entries.append((index.parent / entry["file"], rows))
        for path, rows in entries:
            shards.write_shard(path, rows, reader.layers)
        shards.write_index(index.parent, reader.layers, [shards.describe(path) for path, _ in entries])


def of_rows(chosen: range | set, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """A change of the states [T, layers, H] of some rows."""

    def changed(row: int, held: RowStates, reader: shards.ShardReader) -> RowStates:
        if row not in chosen:
            return held
        return RowStates(held.token_ids, change(held.hidden_states.clone()).contiguous())

    return changed


def recomputed(scene: Scene, layers: list[int]) -> Callable:
    """States of other layers, as transformers computes them; L + 1 is the state after the final norm."""
    target = golden.Golden(scene.path("target/model"), torch.bfloat16, trust_remote_code=False, gpu=False)

    def changed(row: int, held: RowStates, reader: shards.ShardReader) -> RowStates:
        states = target.states(held.token_ids.tolist())[layers]
        return RowStates(held.token_ids, states.transpose(0, 1).bfloat16().contiguous())

    return changed


@fault(
    "Capture",
    "layers off by one, upwards",
    GATE,
    FOLDER + r"(?s:.*)layer h\(1\) of 3 rows: holds h\(2\).*declared h\(1\).*off by \+1" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, recomputed(scene, [2, 3, 4, 4]))


@fault(
    "Capture",
    "layers off by one, downwards",
    GATE,
    FOLDER + r"(?s:.*)layer h\(2\) of 3 rows: holds h\(1\).*declared h\(2\).*off by -1" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, recomputed(scene, [0, 1, 2, 3]))


@fault(
    "Capture",
    "last state post-norm where pre-norm is declared",
    GATE,
    FOLDER + r"(?s:.*)layer h\(4\) of 3 rows: holds h\(4\) after the final norm .*declared h\(4\)" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, recomputed(scene, [1, 2, 3, 5]))


@fault(
    "Capture",
    "the last layer dropped",
    GATE,
    FOLDER + r"(?s:.*)layer h\(4\) of 3 rows: holds h\(3\).*off by -1" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, of_rows(range(1000), lambda states: states[:, [0, 1, 2, 2]]))


@fault(
    "Capture",
    "rows of another request",
    GATE,
    FOLDER + r"(?s:.*)row 5 of \S+safetensors, last layer: .* states of another request" + RECAPTURE,
)
def _(scene: Scene) -> None:
    def change(row: int, held: RowStates, reader: shards.ShardReader) -> RowStates:
        if row not in (5, 6):
            return held
        other = reader.read(11 - row).hidden_states
        times = -(-len(held.token_ids) // len(other))
        return RowStates(held.token_ids, other.repeat(times, 1, 1)[: len(held.token_ids)])

    rewrite(scene, change)


@fault(
    "Capture",
    "token ids of another request",
    GATE,
    FOLDER + r"(?s:.*)row 5 of \S+safetensors, token_ids: .*another request" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, lambda row, held, reader: reader.read({5: 6, 6: 5}.get(row, row)))


@fault(
    "Capture",
    "fewer rows than tokens (prefix cache)",
    GATE,
    FOLDER
    + r"(?s:.*)row 7 of \S+safetensors, token_ids: states of \d+ tokens where the sample has \d+: .*prefix caching"
    + RECAPTURE,
)
def _(scene: Scene) -> None:
    def change(row: int, held: RowStates, reader: shards.ShardReader) -> RowStates:
        return RowStates(held.token_ids[16:], held.hidden_states[16:]) if row == 7 else held

    rewrite(scene, change)


def one_value(value: float) -> Callable:
    def change(states: torch.Tensor) -> torch.Tensor:
        states[3, 1, 17] = value
        return states

    return of_rows({9}, change)


NOT_FINITE = (
    FOLDER
    + r"(?s:.*)row 9 of \S+safetensors, hidden_states: 1 of \d+ values are NaN or infinite, the first at \[3, 1, 17\]"
    + RECAPTURE
)


@fault("Capture", "NaN", GATE, NOT_FINITE)
def _(scene: Scene) -> None:
    rewrite(scene, one_value(float("nan")))


@fault("Capture", "Inf", GATE, NOT_FINITE)
def _(scene: Scene) -> None:
    rewrite(scene, one_value(float("-inf")))


@fault(
    "Capture",
    "zeros",
    GATE,
    FOLDER + r"(?s:.*)row 9 of \S+safetensors, hidden_states: 1 zero vector.*token 4, h\(3\)" + RECAPTURE,
)
def _(scene: Scene) -> None:
    def change(states: torch.Tensor) -> torch.Tensor:
        states[4, 2] = 0
        return states

    rewrite(scene, of_rows({9}, change))


@fault(
    "Capture",
    "one row scaled",
    GATE,
    FOLDER + r"(?s:.*)row 9 of \S+safetensors, h\(2\): norm \S+ where the split's is" + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, of_rows({9}, lambda states: states * torch.tensor([1, 0.125, 1, 1]).bfloat16()[:, None]))


@fault(
    "Capture",
    "two rows with the same states",
    GATE,
    FOLDER + r"(?s:.*)row 6 of \S+safetensors, hidden_states: the last state is that of row 5, bit for bit" + RECAPTURE,
)
def _(scene: Scene) -> None:
    def change(row: int, held: RowStates, reader: shards.ShardReader) -> RowStates:
        if row == 6:
            held.hidden_states[-1] = reader.read(5).hidden_states[-1]
        return held

    rewrite(scene, change)


@fault(
    "Capture",
    "fp16 overflow",
    GATE,
    FOLDER
    + r"(?s:.*)row 0 of \S+safetensors, hidden_states: stored as float16, not bfloat16(?s:.*)\d+ values are NaN or inf"
    + RECAPTURE,
)
def _(scene: Scene) -> None:
    rewrite(scene, of_rows(range(1000), lambda states: (states * 10_000).half()))


def first_shard(scene: Scene) -> Path:
    index = scene.path(INDEX)
    return index.parent / files.read_json(index)["shards"][0]["file"]


@fault(
    "Capture",
    "truncated shard",
    GATE,
    r"/rows_\S+\.safetensors: missing or cut short, \d+ of the \d+ bytes.*delete .*index\.json",
)
def _(scene: Scene) -> None:
    path = first_shard(scene)
    path.write_bytes(path.read_bytes()[:-100])


@fault("Capture", "one flipped bit", GATE, r"/rows_\S+\.safetensors: its checksum is not .*delete .*index\.json")
def _(scene: Scene) -> None:
    flip_bit(first_shard(scene), from_end=5000)


@fault(
    "Capture",
    "a layer missing",
    GATE,
    r"/rows_\S+\.safetensors: states of shape \[\d+, 3, 128\].*layers \[1, 2, 3, 4\].*delete .*index\.json",
)
def _(scene: Scene) -> None:
    rewrite(scene, of_rows(range(1000), lambda states: states[:, [0, 1, 3]]))


@fault(
    "Data",
    "duplicated shard",
    GATE,
    r"copy\.safetensors: row 0 is in \S+/rows_\S+\.safetensors too; delete .*index\.json",
)
def _(scene: Scene) -> None:
    path = first_shard(scene)
    copy = Path(shutil.copy(path, path.with_stem(path.stem + "_copy")))
    scene.edit_json(INDEX, lambda index: index["shards"].append(shards.describe(copy)))


def split_by_layers(scene: Scene, *layers: list[int]) -> None:
    """Write a part's first shard again as several, each with some of its layers, as adding drafters leaves them."""
    path, index = first_shard(scene), scene.path(INDEX)
    entries = files.read_json(index)["shards"]
    pieces = []
    for number, some in enumerate(layers):
        reader = shards.ShardReader([index], some)
        rows = [(row, reader.read(row)) for row in entries[0]["rows"]]
        shards.write_shard(piece := path.with_stem(f"{path.stem}_{number}"), rows, some)
        pieces.append(shards.describe(piece))
    scene.edit_json(INDEX, lambda content: content.update(shards=[*pieces, *entries[1:]]))


@fault(
    "Capture",
    "a layer of some rows missing",
    GATE,
    FOLDER + r"(?s:.*)row 0: no shard holds its layers \[3\]" + RECAPTURE,
)
def _(scene: Scene) -> None:
    split_by_layers(scene, [1, 4], [2])


@fault(
    "Capture",
    "a layer of a row in two shards",
    GATE,
    r"_1\.safetensors: row 0 is in \S+/rows_\S+_0\.safetensors too; delete .*index\.json",
)
def _(scene: Scene) -> None:
    split_by_layers(scene, [1, 3, 4], [2, 3])
