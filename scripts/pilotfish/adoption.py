# SPDX-License-Identifier: Apache-2.0
"""Fill a part's hidden states: link the shards that fit, and have an engine compute the rest."""

import logging
from collections.abc import Sequence
from pathlib import Path

from pilotfish import files, generation, shards
from pilotfish.engine import SERVED_NAME, Engine
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)


class Adoption:
    """The shards of one part, gathered in `work/shards`, for rows with known token ids.

    `ids` maps a row's number in the split to its prompt and response tokens [T].
    """

    def __init__(self, work: Path, layers: Sequence[int], ids: dict[int, list[int]]):
        self.layers = list(layers)
        self.ids = ids
        self.incoming = work / "incoming"
        self.folder = work / "shards"
        for path in (self.incoming, self.folder):
            path.mkdir(parents=True, exist_ok=True)
        self.entries: list[dict] = []
        self._held: set[int] = set()
        for path in sorted(self.folder.glob("rows_*.safetensors")):
            self._take(path, None)

    def adopt(self, captured: Path) -> None:
        """Link every shard of `captured` whose layers are the wanted ones and whose checksum holds."""
        if not (captured / shards.INDEX).is_file():
            return
        index = files.read_json(captured / shards.INDEX)
        if index["capture_layers"] != self.layers:
            logger.info("captured layers are %s, not %s: not adopted", index["capture_layers"], self.layers)
            return
        for entry in index["shards"]:
            self._take(captured / entry["file"], entry["sha256"])

    def _take(self, path: Path, sha256: str | None) -> None:
        """Keep a shard if its rows are not yet held and hold exactly the samples' tokens.

        Rows without a sample, which their gate left out, may lie among them; they are never read.
        """
        try:
            entry = shards.describe(path)
            wanted = [row for row in entry["rows"] if row in self.ids]
            if self._held.issuperset(wanted):
                return  # adopted by an earlier try of this job, or all left out
            reader = shards.ShardReader.of_file(path, self.layers, entry["rows"])
            good = sha256 in (None, entry["sha256"]) and shards.stored_layers(path) == self.layers
            good = good and all(self._fits(row, reader) for row in wanted)
        except (UserError, KeyError, ValueError) as error:
            logger.warning("%s", error)
            good = False
        if not good:
            logger.warning("%s: not adopted, its rows are computed again", path)
            if path.parent == self.folder:
                path.unlink()
            return
        if path.parent != self.folder:
            files.link(path, self.folder / path.name)
        self.entries.append(entry)
        self._held.update(wanted)

    def _fits(self, row: int, reader: shards.ShardReader) -> bool:
        return row not in self._held and reader.read(row).token_ids.tolist() == self.ids[row][:-1]

    def missing(self) -> list[int]:
        """Rows that no shard holds yet, in order."""
        return sorted(set(self.ids) - self._held)

    async def capture_missing(self, server: Engine, options: dict) -> None:
        """Prefill each missing row and write the states in new shards as they become complete."""
        api = generation.client(server)
        for start in range(0, len(rows := self.missing()), shards.ROWS_PER_SHARD):
            group = rows[start : start + shards.ROWS_PER_SHARD]
            made: dict[int, shards.RowStates] = {}

            async def attempt(row: int, made: dict = made) -> int:
                tokens = self.ids[row][:-1]
                answer = await api.completions.create(model=SERVED_NAME, prompt=tokens, max_tokens=1, temperature=0.0)
                path = Path(answer.model_dump()["kv_transfer_params"]["hidden_states_path"])
                made[row] = await generation.take_states(path, tokens, len(self.layers))
                path.unlink()
                return len(tokens)

            async def do_row(row: int, attempt=attempt) -> int:
                return await generation.with_retries(row, lambda: attempt(row), server)

            await generation.run_rows(
                server, group, do_row,
                at_once=options["max_num_seqs"], stall_timeout=options["stall_timeout"],
            )  # fmt: skip
            # A shard of the same range may have been adopted for other rows; names must differ.
            path = self.folder / shards.shard_name(group[0], group[-1] + 1)
            if path.exists():
                path = self.folder / f"{path.stem}_more.safetensors"
            shards.write_shard(path, [(row, made[row]) for row in group], self.layers)
            self._take(path, None)
        if missing := self.missing():
            raise UserError(f"{self.folder}: rows {missing[:5]} are still missing after their capture; see the log")

    def publish(self, output: Path) -> None:
        """Write index.json and make `output` hold the shards."""
        shards.write_index(self.folder, self.layers, self.entries)
        files.publish_folder(self.folder, output)
