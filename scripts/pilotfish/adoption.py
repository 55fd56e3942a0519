# SPDX-License-Identifier: Apache-2.0
"""Fill a part's hidden states: link the shards that fit, and have an engine compute the layers that they lack."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from pilotfish import disk, files, generation, seals, shards
from pilotfish.engine import Engine
from pilotfish.errors import UserError
from pilotfish.progress import Heartbeat

logger = logging.getLogger(__name__)


class Adoption:
    """The shards of one part, gathered in `work/shards`, for rows with known token ids.

    `layers` are the h(k) numbers that each row must have; `ids` maps a row's number in the split to its prompt and
    response tokens [T]. No layer of a row is ever held twice.
    """

    def __init__(self, work: Path, layers: Sequence[int], ids: dict[int, list[int]]):
        self.layers = list(layers)
        self.ids = ids
        self.incoming = work / "incoming"
        self.folder = work / "shards"
        for path in (self.incoming, self.folder):
            path.mkdir(parents=True, exist_ok=True)
        self.entries: list[dict] = []
        self._held: dict[int, set[int]] = {row: set() for row in ids}
        for path in sorted(self.folder.glob("rows_*.safetensors")):
            if not self._take(path, None):
                path.unlink()

    def adopt(self, listing: Path, origin: str | None = None) -> None:
        """Link every shard of an index.json, or of a KEPT of the same `origin`, that is sound and adds something.

        Layers that no drafter needs any more are adopted too: they cost nothing, and one may need them again.
        """
        if not listing.is_file():
            return
        listed = shards.read_index(listing)
        if listed.get("origin") != origin:
            logger.info("%s: captured from another target, with other settings or code; not adopted", listing)
            return
        for entry in listed["shards"]:
            if self._adds(entry):
                self._take(listing.parent / entry["file"], entry["sha256"])

    def _adds(self, entry: dict) -> bool:
        """Whether a shard holds a layer of a sample's row that is not held yet.

        Rows without a sample, which their gate left out, may lie among its rows; they are never read.
        """
        return any(not self._held[row].issuperset(entry["layers"]) for row in entry["rows"] if row in self._held)

    def _take(self, path: Path, sha256: str | None) -> bool:
        """Keep a shard if it is sound, adds something, and holds exactly the samples' tokens; whether it is kept."""
        try:
            entry = shards.describe(path)
            if not self._adds(entry):
                return False
            reader = shards.ShardReader.of_file(path, entry["layers"], entry["rows"])
            wanted = [row for row in entry["rows"] if row in self.ids]
            good = sha256 in (None, entry["sha256"]) and all(self._fits(row, reader) for row in wanted)
        except (UserError, KeyError, ValueError) as error:
            logger.warning("%s", error)
            good = False
        if not good:
            logger.warning("%s: not adopted, its rows are computed again", path)
            return False
        if path.parent != self.folder:
            kept = self._free(path.name)
            files.link(path, kept)
            entry["file"] = kept.name
        self.entries.append(entry)
        for row in wanted:
            self._held[row].update(entry["layers"])
        return True

    def _fits(self, row: int, reader: shards.ShardReader) -> bool:
        return self._held[row].isdisjoint(reader.layers) and reader.read(row).token_ids.tolist() == self.ids[row][:-1]

    def _free(self, name: str) -> Path:
        """A path for a shard: its name, or that with a number where another shard of the same rows has it."""
        plain = self.folder / name
        others = (plain.with_stem(f"{plain.stem}_{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([plain], others) if not path.exists())

    def missing(self) -> dict[int, list[int]]:
        """The layers of each row that no shard holds yet, in order; rows that lack none are left out."""
        lacking = {row: [layer for layer in self.layers if layer not in self._held[row]] for row in sorted(self._held)}
        return {row: layers for row, layers in lacking.items() if layers}

    def finished(self) -> tuple[int, int]:
        """How many rows lack no layer, and their tokens."""
        lacking = self.missing()
        tokens = sum(len(ids) - 1 for row, ids in self.ids.items() if row not in lacking)
        return len(self._held) - len(lacking), tokens

    def missing_layers(self) -> list[int]:
        """The layers that some row lacks: what the engine must capture."""
        return sorted({layer for layers in self.missing().values() for layer in layers})

    def _new_shards(self) -> Iterator[tuple[list[int], list[int]]]:
        """Layers and rows of each shard that is to be captured: rows that lack the same layers share one."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for row, layers in self.missing().items():
            alike.setdefault(tuple(layers), []).append(row)
        for layers, rows in alike.items():
            for start in range(0, len(rows), shards.ROWS_PER_SHARD):
                yield list(layers), rows[start : start + shards.ROWS_PER_SHARD]

    async def capture_missing(self, server: Engine, options: dict, beat: Heartbeat) -> None:
        """Prefill each row that lacks a layer, and write what it lacks in new shards as they become complete.

        `server` captures `missing_layers()`; `beat` counts the rows that lack nothing.
        """
        api = generation.client(server)
        captured = self.missing_layers()
        for layers, rows in list(self._new_shards()):
            columns = [captured.index(layer) for layer in layers]
            made: dict[int, shards.RowStates] = {}
            disk.check_room(self.folder, 0)

            async def attempt(row: int, made: dict = made, columns: list[int] = columns) -> None:
                tokens = self.ids[row][:-1]
                answer = await generation.prefill(api, tokens)
                path = Path(answer["kv_transfer_params"]["hidden_states_path"])
                states = await generation.take_states(path, tokens, len(captured))
                made[row] = shards.RowStates(states.token_ids, states.hidden_states[:, columns])
                path.unlink()

            async def do_row(row: int, attempt=attempt) -> None:
                await generation.with_retries(row, lambda: attempt(row), server)

            await generation.run_rows(
                server, rows, do_row,
                at_once=options["max_num_seqs"], stall_timeout=options["stall_timeout"],
            )  # fmt: skip
            path = self._free(shards.shard_name(rows[0], rows[-1] + 1))
            shards.write_shard(path, [(row, made[row]) for row in rows], layers)
            self._take(path, None)
            beat.advance(*self.finished())
        if missing := self.missing():
            raise UserError(
                f"{self.folder}: rows {list(missing)[:5]} still lack layers after their capture; see the log"
            )

    def publish(self, output: Path, origin: str) -> None:
        """Make `output` hold these shards and no others, index.json, and KEPT for the next capture of this `origin`."""
        common = set.intersection(*self._held.values()) if self._held else self.layers
        shards.write_index(self.folder, sorted(common), self.entries)
        index = files.read_json(self.folder / shards.INDEX)
        seals.write_json(self.folder / shards.KEPT, {**index, "origin": origin})
        files.publish_folder(self.folder, output)
