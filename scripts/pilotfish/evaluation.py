# SPDX-License-Identifier: Apache-2.0
"""Measure servers that take turns on the same prompts: speed, counters, and every answer with its rounds."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pilotfish import files, generation, speed
from pilotfish.engine import Engine
from pilotfish.errors import UserError
from pilotfish.progress import Heartbeat

logger = logging.getLogger(__name__)

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
# Answers then tell how long each took between its first and its last token, by the engine's own clock.
TIMING_ARGUMENTS = ["--enable-per-request-metrics"]
# After its last step a vLLM worker looks for the next for 1 s without sleeping (SpinCondition in 0.32), which on a CPU
# takes a core from the server whose turn is next.
SPIN_SECONDS = 1.1


def counters(text: str) -> dict:
    """Speculative-decoding counters out of the text of vLLM's /metrics; zeros without a drafter."""
    found: dict = {**dict.fromkeys(COUNTERS, 0), "accepted_per_position": []}
    per_position: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            for key, name in COUNTERS.items():
                if family.name == name:
                    found[key] += int(sample.value)
            if family.name == PER_POSITION:
                position = int(sample.labels["position"])
                per_position[position] = per_position.get(position, 0) + int(sample.value)
    found["accepted_per_position"] = [per_position[position] for position in sorted(per_position)]
    return found


def difference(after: dict, before: dict) -> dict:
    """What was counted between two readings."""
    result = {key: after[key] - before[key] for key in COUNTERS}
    earlier = before["accepted_per_position"] or [0] * len(after["accepted_per_position"])
    result["accepted_per_position"] = [a - b for a, b in zip(after["accepted_per_position"], earlier, strict=True)]
    return result


@dataclass(frozen=True)
class Session:
    """How servers are measured: sampling, seconds until one has stalled, seconds of rest between two turns."""

    sampling: dict
    stall_timeout: int
    rest: float


class Contestant:
    """One server on one set at one concurrency: its turns are timed, its answers kept."""

    def __init__(self, engine: Engine, prompts: Sequence[dict], session: Session):
        self._engine, self._prompts, self._session = engine, prompts, session
        self._api = generation.client(engine)
        self._before = self._counters()
        self._answers: dict[int, dict] = {}
        self._chunks: list[tuple[float, int]] = []

    def _counters(self) -> dict:
        return counters(httpx.get(f"{self._engine.url}/metrics").raise_for_status().text)

    async def serve(self, rows: Sequence[int]) -> None:
        """One turn: all rows of a chunk at once, timed until the last of them is answered."""
        begun = time.perf_counter()
        await generation.run_rows(
            self._engine, rows, self._attempt, at_once=len(rows), stall_timeout=self._session.stall_timeout
        )
        seconds = time.perf_counter() - begun
        self._chunks.append((round(seconds, 4), sum(len(self._answers[row]["token_ids"]) for row in rows)))

    async def _attempt(self, row: int) -> None:
        async def ask() -> None:
            prompt, sampling = self._prompts[row], self._session.sampling
            answer = await generation.chat(self._api, prompt["messages"], sampling, None, prompt.get("tools"))
            self._answers[row] = _answer(row, answer)

        try:
            # A connection that the server closed while it waited for its turn is opened anew.
            await generation.with_retries(row, ask, self._engine)
        except generation.RowRefused as error:
            raise UserError(f"row {row} was refused while serving: {error}") from None

    def result(self) -> dict:
        """Seconds, tokens, tokens/s, counters, chunks, time per output token (ms) and every answer."""
        seconds, tokens = (sum(each[i] for each in self._chunks) for i in (0, 1))
        answers = [self._answers[row] for row in sorted(self._answers)]
        return {
            "seconds": round(seconds, 4),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 3),
            "chunks": [list(each) for each in self._chunks],
            "time_per_output_token_ms": speed.per_token(answers),
            "counters": difference(self._counters(), self._before),
            "answers": answers,
        }


def _answer(row: int, answer: dict) -> dict:
    """What is kept of an answer; `time_per_output_token_ms` is without prefill, queue and HTTP, None for one token."""
    choice, metrics = answer["choices"][0], answer.get("metrics") or {}
    took = metrics.get("mean_itl_ms")
    return {
        "row": row,
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "per_step_accepted": (metrics.get("speculative_decoding") or {}).get("per_step_accepted") or [],
        "time_per_output_token_ms": None if took is None else round(took, 4),
    }


async def measure(
    engines: Mapping[str, Engine], prompts: Sequence[dict], concurrency: int, session: Session
) -> dict[str, dict]:
    """Each server answers each prompt once, `concurrency` together; the servers take turns chunk by chunk."""
    found = {name: Contestant(engine, prompts, session) for name, engine in engines.items()}
    for number, rows in enumerate(speed.chunks(len(prompts), concurrency)):
        for name in speed.turns(list(engines), number):
            await asyncio.sleep(session.rest)
            await found[name].serve(rows)
    return {name: contestant.result() for name, contestant in found.items()}


class Measurements:
    """What has been measured so far, in a file that a job which goes on reads again; `beat` counts the answers."""

    def __init__(self, path: Path, beat: Heartbeat):
        self._path, self._beat = path, beat
        self._found = {_key(each): each["measured"] for each in files.read_checked(path)}
        self._tell()

    def of(self, servers: Iterable[str], chosen: str, level: int) -> dict[str, dict] | None:
        """server -> what was measured of a set at one concurrency, if these servers were, together."""
        return self._found.get((tuple(sorted(servers)), chosen, level))

    def keep(self, chosen: str, level: int, measured: dict[str, dict]) -> None:
        """Write down what servers that took turns have measured."""
        entry = {"servers": sorted(measured), "set": chosen, "level": level, "measured": measured}
        files.append_checked(self._path, entry)
        self._found[_key(entry)] = measured
        self._tell()

    def _tell(self) -> None:
        results = [result for measured in self._found.values() for result in measured.values()]
        answers = sum(len(result["answers"]) for result in results)
        self._beat.advance(answers, sum(result["tokens"] for result in results))


def _key(entry: dict) -> tuple:
    return tuple(entry["servers"]), entry["set"], entry["level"]


def measure_all(
    engines: Mapping[str, Engine],
    sets: Mapping[str, Sequence[dict]],
    levels: Sequence[int],
    session: Session,
    kept: Measurements,
) -> None:
    """Measure what `kept` does not hold yet, after one unmeasured request to each server that warms it up."""

    async def run() -> None:
        await measure(engines, next(iter(sets.values()))[:1], 1, session)
        for chosen, level in to_measure(engines, sets, levels, kept):
            measured = await measure(engines, sets[chosen], level, session)
            kept.keep(chosen, level, measured)
            speeds = ", ".join(f"{name} {each['tokens_per_second']:.1f}" for name, each in measured.items())
            logger.info("%s, concurrency %d, tokens/s: %s", chosen, level, speeds)

    asyncio.run(run())


def to_measure(
    servers: Iterable[str], sets: Iterable[str], levels: Sequence[int], kept: Measurements
) -> list[tuple[str, int]]:
    """Sets and levels at which these servers have not been measured together."""
    servers = list(servers)
    return [(chosen, level) for chosen in sets for level in levels if kept.of(servers, chosen, level) is None]
