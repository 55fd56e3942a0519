# SPDX-License-Identifier: Apache-2.0
"""The journal of an unfinished generation job, so that finished rows are never done again."""

from collections.abc import Sequence
from pathlib import Path

from pilotfish import files, shards
from pilotfish.errors import UserError

OWN_FIELDS = ("states", "layers")  # the journal's, not the response's


class Journal:
    """Finished rows of one job, below `<output>.work/<digest of spec and code>/`.

    `rows.jsonl` gets a line for each finished row; a row's states stay in `incoming/` until its shard is
    complete, then move into `captured/rows_*.safetensors`, whose checksum is journaled too. A row counts
    as done only if its states are there, sound, and of the present `layers`; without layers none are kept.
    """

    def __init__(self, folder: Path, rows: range, layers: Sequence[int]):
        self.folder = folder
        self.layers = list(layers)
        self.incoming = folder / "incoming"
        self.captured = folder / "captured"
        self.ranges = shards.shard_ranges(rows.start, rows.stop)
        self.done: dict[int, dict] = {}
        self.tokens = 0  # of the answers done
        self.shards: dict[str, dict] = {}
        for path in (self.incoming, self.captured):
            path.mkdir(parents=True, exist_ok=True)
        self._recover()

    def _recover(self) -> None:
        known = {row["row"]: row for row in files.read_checked(self.folder / "rows.jsonl")}
        for entry in files.read_checked(self.folder / "shards.jsonl"):
            path = self.captured / entry["file"]
            whole = entry["layers"] == self.layers and all(row in known for row in entry["rows"])
            if whole and path.is_file() and files.sha256_file(path) == entry["sha256"]:
                self.shards[entry["file"]] = entry
        in_shards = self._rows_in_shards()
        for number, row in known.items():
            if row["error"] is None and (not self.layers or number in in_shards or self._states_hold(row)):
                self.done[number] = row
        self.tokens = sum(map(_tokens, self.done.values()))
        keep = {self._states_path(row) for row in self.done.values()} if self.layers else set()
        for path in self.incoming.iterdir():
            if path not in keep:
                path.unlink()

    def _rows_in_shards(self) -> set[int]:
        return {row for entry in self.shards.values() for row in entry["rows"]}

    def _states_path(self, row: dict) -> Path:
        return self.incoming / row["states"]

    def _states_hold(self, row: dict) -> bool:
        if row["layers"] != self.layers:
            return False
        try:
            states = shards.read_row_file(self._states_path(row))
        except UserError:
            return False
        ids = (row["prompt_token_ids"] + row["token_ids"])[:-1]
        due = (len(ids), len(self.layers))
        return states.token_ids.tolist() == ids and tuple(states.hidden_states.shape[:2]) == due

    def finish(self, row: dict, states_file: str) -> None:
        """Journal a finished row, and write its shard if it was the last one missing there."""
        row = {**row, "states": states_file, "layers": self.layers}
        files.append_checked(self.folder / "rows.jsonl", row)
        self.done[row["row"]] = row
        self.tokens += _tokens(row)
        for start, end in self.ranges if self.layers else ():
            if start <= row["row"] < end:
                self._pack(start, end)

    def pack_all(self) -> None:
        """Write every shard that is complete but unwritten, and one for rows that came after theirs."""
        if not self.layers:
            return
        for start, end in self.ranges:
            self._pack(start, end)
        in_shards = self._rows_in_shards()
        late = [row for row in sorted(self.done) if self.done[row]["error"] is None and row not in in_shards]
        if late:
            self._write(f"{Path(shards.shard_name(late[0], late[-1] + 1)).stem}_late.safetensors", late)

    def take_shard(self, source: Path, entry: dict, rows: Sequence[dict]) -> None:
        """Take over a whole shard, by a link, with the answers of its rows; only one that this job would write.

        `entry` describes it as an index does.
        """
        due = [shards.shard_name(start, end) for start, end in self.ranges]
        if entry["file"] not in due or entry["file"] in self.shards or entry["layers"] != self.layers:
            return
        files.link(source, self.captured / entry["file"])
        # Before its rows: the last of them would have it written.
        self.shards[entry["file"]] = entry
        files.append_checked(self.folder / "shards.jsonl", entry)
        for row in rows:
            self.finish(row, "")

    def _pack(self, start: int, end: int) -> None:
        name = shards.shard_name(start, end)
        if name in self.shards or not all(row in self.done for row in range(start, end)):
            return
        if good := [row for row in range(start, end) if self.done[row]["error"] is None]:
            self._write(name, good)

    def _write(self, name: str, rows: Sequence[int]) -> None:
        sources = {row: self._states_path(self.done[row]) for row in rows}
        path = self.captured / name
        shards.write_shard(path, [(row, shards.read_row_file(sources[row])) for row in rows], self.layers)
        self.shards[name] = {"layers": self.layers, **shards.describe(path)}
        files.append_checked(self.folder / "shards.jsonl", self.shards[name])
        for source in sources.values():
            source.unlink(missing_ok=True)

    def rows(self) -> list[dict]:
        """All finished rows in order, without the journal's own fields."""
        kept = (self.done[number] for number in sorted(self.done))
        return [{key: value for key, value in row.items() if key not in OWN_FIELDS} for row in kept]

    def write_index(self, **more: dict) -> None:
        """Write `captured/index.json` over the finished shards; `more` is listed in it beside them."""
        shards.write_index(self.captured, self.layers, list(self.shards.values()), **more)


def _tokens(row: dict) -> int:
    return len(row["token_ids"] or [])
