# SPDX-License-Identifier: Apache-2.0
"""Bulk requests to an engine inside a job, with a journal, so that finished rows are never done again."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import openai
from safetensors.torch import load_file

from pilotfish import files, shards
from pilotfish.engine import SERVED_NAME, Engine
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # per row, for errors that a second try may mend
REQUEST_TIMEOUT = 3600  # seconds
FILE_TIMEOUT = 120  # seconds between a response and its states file
FILE_POLL = 0.01
REPORT_SECONDS = 15


class RowRefused(Exception):
    """The engine answered that it will not do this row (for example, the prompt is too long)."""


def client(engine: Engine) -> openai.AsyncOpenAI:
    """An OpenAI client for the job's own engine."""
    return openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT)


def sampling_arguments(sampling: dict) -> dict:
    """Every sampling parameter spelled out, so that no default of the model's folder slips in."""
    return {
        "max_tokens": sampling["max_tokens"],
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "seed": sampling["seed"],
        "extra_body": {
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "chat_template_kwargs": sampling["chat_template_kwargs"],
        },
    }


async def chat(api: openai.AsyncOpenAI, messages: list[dict], sampling: dict, transfer: dict | None) -> dict:
    """One chat completion as a plain dict; `transfer` goes to the KV connector.

    Raises RowRefused for a request that no retry can mend.
    """
    request = sampling_arguments(sampling)
    if transfer:
        request["extra_body"]["kv_transfer_params"] = transfer
    try:
        answer = await api.chat.completions.create(model=SERVED_NAME, messages=messages, **request)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        raise RowRefused(str(error)) from None
    return answer.model_dump()


def response_row(row: int, prompt: dict, answer: dict, sampling: dict) -> dict:
    """What is kept of an answer: exact ids, text, reasoning, finish reason, sampling parameters."""
    choice = answer["choices"][0]
    message = choice["message"]
    return {
        "row": row,
        "id": prompt["id"],
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "text": message["content"],
        "reasoning": message.get("reasoning"),
        "finish_reason": choice["finish_reason"],
        "sampling": sampling,
        "error": None,
    }


def failed_row(row: int, prompt: dict, error: str) -> dict:
    """A row that the engine refused: kept, so that input = ok + failed."""
    empty = dict.fromkeys(("prompt_token_ids", "token_ids", "text", "reasoning", "finish_reason", "sampling"))
    return {"row": row, "id": prompt["id"], "error": error, **empty}


async def take_states(path: Path, expected_ids: Sequence[int]) -> shards.RowStates:
    """Wait for the connector's file of one request, read it, and check its token ids and shape.

    Raises UserError if it does not come, or holds another request's tokens or too few rows.
    """
    deadline = time.monotonic() + FILE_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path}: the engine wrote no hidden states in {FILE_TIMEOUT} s; see its log")
        await asyncio.sleep(FILE_POLL)
    tensors = load_file(path)
    states = shards.RowStates(tensors["token_ids"], tensors["hidden_states"])
    if states.token_ids.tolist() != list(expected_ids):
        raise UserError(f"{path}: holds {len(states.token_ids)} tokens that are not this request's")
    if states.hidden_states.shape[0] != len(expected_ids):
        raise UserError(
            f"{path}: {states.hidden_states.shape[0]} states for {len(expected_ids)} tokens; is prefix caching on?"
        )
    return states


class Journal:
    """Finished rows of an unfinished job, below `<output>.work/<digest of spec and code>/`.

    `rows.jsonl` gets a line for each finished row; a row's states stay in `incoming/` until its shard is
    complete, then move into `captured/rows_*.safetensors`, whose checksum is journaled too.
    """

    def __init__(self, folder: Path, rows: range, layers: Sequence[int]):
        self.folder = folder
        self.layers = list(layers)
        self.incoming = folder / "incoming"
        self.captured = folder / "captured"
        self.ranges = shards.shard_ranges(rows.start, rows.stop)
        self.done: dict[int, dict] = {}
        self.shards: dict[tuple[int, int], dict] = {}
        for path in (self.incoming, self.captured):
            path.mkdir(parents=True, exist_ok=True)
        self._recover()

    def _recover(self) -> None:
        """Believe a journaled row only if its shard's checksum, or its own states file, still holds."""
        known = {row["row"]: row for row in self._lines("rows.jsonl")}
        sharded: set[int] = set()
        for entry in self._lines("shards.jsonl"):
            path = self.captured / entry["file"]
            numbers = range(entry["start"], entry["end"])
            whole = entry["layers"] == self.layers and all(number in known for number in numbers)
            if whole and path.is_file() and files.sha256_file(path) == entry["sha256"]:
                self.shards[(entry["start"], entry["end"])] = entry
                sharded.update(numbers)
        for number, row in known.items():
            if row["error"] is None and (number in sharded or self._states_hold(row)):
                self.done[number] = row
        keep = {self._states_path(row) for row in self.done.values()}
        for path in self.incoming.iterdir():
            if path not in keep:
                path.unlink()

    def _lines(self, name: str) -> list[dict]:
        path = self.folder / name
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                # The job was killed while it wrote this line; its row is simply done again.
                continue
        return rows

    def _append(self, name: str, value: dict) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(value, ensure_ascii=False) + "\n")

    def _states_path(self, row: dict) -> Path:
        return self.incoming / row["states"]

    def _states_hold(self, row: dict) -> bool:
        path = self._states_path(row)
        try:
            tensors = load_file(path)
        except Exception:
            return False
        ids = (row["prompt_token_ids"] + row["token_ids"])[:-1]
        return tensors["token_ids"].tolist() == ids and tensors["hidden_states"].shape[:2] == (
            len(ids),
            len(self.layers),
        )

    def finish(self, row: dict, states_file: str) -> None:
        """Journal a finished row, and write its shard if it was the last one missing there."""
        row = {**row, "states": states_file}
        self._append("rows.jsonl", row)
        self.done[row["row"]] = row
        for start, end in self.ranges:
            if start <= row["row"] < end:
                self._pack(start, end)

    def pack_all(self) -> None:
        """Write every shard that recovery left complete but unwritten."""
        for start, end in self.ranges:
            self._pack(start, end)

    def _pack(self, start: int, end: int) -> None:
        if (start, end) in self.shards or not all(row in self.done for row in range(start, end)):
            return
        held, sources = [], []
        for number in range(start, end):
            row = self.done[number]
            if row["error"] is None:
                sources.append(self._states_path(row))
                tensors = load_file(sources[-1])
                held.append((number, shards.RowStates(tensors["token_ids"], tensors["hidden_states"])))
        if held:
            path = self.captured / shards.shard_name(start, end)
            shards.write_shard(path, held, self.layers)
            entry = {"start": start, "end": end, "layers": self.layers, **shards.describe(path)}
            self._append("shards.jsonl", entry)
            self.shards[(start, end)] = entry
        for source in sources:
            source.unlink(missing_ok=True)

    def rows(self) -> list[dict]:
        """All finished rows in order, without the journal's own field."""
        kept = (self.done[number] for number in sorted(self.done))
        return [{key: value for key, value in row.items() if key != "states"} for row in kept]

    def write_index(self) -> None:
        """Write `captured/index.json` over the finished shards."""
        entries = [
            {key: entry[key] for key in ("file", "rows", "tokens", "size", "sha256")} for entry in self.shards.values()
        ]
        shards.write_index(self.captured, self.layers, entries)


async def run_rows(
    engine: Engine,
    rows: Sequence[int],
    do_row: Callable[[int], Awaitable[int]],
    *,
    at_once: int,
    stall_timeout: int,
) -> None:
    """Run `do_row` (returns its count of tokens) for each row, `at_once` together, in order.

    Progress is counted in finished rows. Raises UserError as soon as the engine dies, or when no row
    finishes for `stall_timeout` seconds; the rows already finished stay in the journal.
    """
    gate = asyncio.Semaphore(at_once)
    begun = advanced = reported = time.monotonic()
    finished = tokens = 0

    async def one(row: int) -> None:
        nonlocal finished, tokens, advanced
        async with gate:
            made = await do_row(row)
            tokens += made
            finished += 1
            advanced = time.monotonic()

    tasks = [asyncio.create_task(one(row)) for row in rows]
    pending: set[asyncio.Task] = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
            engine.check_alive()
            for task in done:
                task.result()
            now = time.monotonic()
            if now - advanced > stall_timeout:
                raise UserError(
                    f"no row finished for engine.stall_timeout = {stall_timeout} s ({finished} of {len(rows)} "
                    f"done); last lines of {engine.log}:\n{engine.tail()}"
                )
            if now - reported > REPORT_SECONDS or not pending:
                reported = now
                rate = finished / (now - begun)
                left = (len(rows) - finished) / rate if rate else float("inf")
                logger.info(
                    "%d of %d rows, %.0f tokens/s, about %.0f s left",
                    finished, len(rows), tokens / (now - begun), left,
                )  # fmt: skip
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_retries(row: int, attempt: Callable[[], Awaitable[int]], engine: Engine) -> int:
    """Call `attempt` up to ATTEMPTS times on connection faults and server errors."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return await attempt()
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            engine.check_alive()
            if number == ATTEMPTS:
                raise UserError(f"row {row}: {ATTEMPTS} attempts failed, the last with: {error}") from None
            logger.warning("row %d: attempt %d failed (%s); trying again", row, number, error)
    raise AssertionError("unreachable")
