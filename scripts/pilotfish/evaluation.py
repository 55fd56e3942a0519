# SPDX-License-Identifier: Apache-2.0
"""Measure an engine on held-out prompts: speed, counters, and every answer with its rounds."""

import asyncio
import logging
import time
from collections.abc import Sequence

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from pilotfish import generation
from pilotfish.engine import Engine
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


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


async def measure(
    engine: Engine, rows: Sequence[int], prompts: Sequence[dict], sampling: dict, concurrency: int, stall: int
) -> dict:
    """Serve each prompt once, `concurrency` together: seconds, tokens, counters and every answer."""
    api = generation.client(engine)
    answers: dict[int, dict] = {}

    async def attempt(row: int) -> int:
        answers[row] = _answer(row, await _ask(api, row, prompts[row], sampling))
        return len(answers[row]["token_ids"])

    before = counters(httpx.get(f"{engine.url}/metrics").raise_for_status().text)
    begun = time.perf_counter()
    await generation.run_rows(engine, rows, attempt, at_once=concurrency, stall_timeout=stall)
    seconds = time.perf_counter() - begun
    after = counters(httpx.get(f"{engine.url}/metrics").raise_for_status().text)
    tokens = sum(len(answer["token_ids"]) for answer in answers.values())
    return {
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 3),
        "counters": difference(after, before),
        "answers": [answers[row] for row in sorted(answers)],
    }


async def _ask(api: openai.AsyncOpenAI, row: int, prompt: dict, sampling: dict) -> dict:
    try:
        return await generation.chat(api, prompt["messages"], sampling, None)
    except generation.RowRefused as error:
        raise UserError(f"held-out row {row} was refused while serving: {error}") from None


def _answer(row: int, answer: dict) -> dict:
    choice = answer["choices"][0]
    metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return {
        "row": row,
        "prompt_token_ids": answer["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "per_step_accepted": metrics.get("per_step_accepted") or [],
    }


def measure_all(
    engine: Engine, prompts: Sequence[dict], sampling: dict, levels: Sequence[int], stall: int
) -> dict[str, dict]:
    """Measurements at each concurrency, after one unmeasured request that warms the engine up."""
    rows = range(len(prompts))

    async def run() -> dict[str, dict]:
        await measure(engine, rows[:1], prompts, sampling, 1, stall)
        found = {}
        for level in levels:
            found[str(level)] = await measure(engine, rows, prompts, sampling, level, stall)
            logger.info("concurrency %d: %.1f tokens/s", level, found[str(level)]["tokens_per_second"])
        return found

    return asyncio.run(run())
