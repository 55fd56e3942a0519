# SPDX-License-Identifier: Apache-2.0
"""Bulk requests to an engine inside a job: sampling spelled out, retries, progress counted in finished rows."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import openai

from pilotfish import shards
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


async def take_states(path: Path, expected_ids: Sequence[int], layers: int) -> shards.RowStates:
    """Wait for the connector's file of one request, read it, and check its token ids and shape.

    Raises UserError if it does not come, or holds another request's tokens, or not a state of each layer
    for each token.
    """
    deadline = time.monotonic() + FILE_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path}: the engine wrote no hidden states in {FILE_TIMEOUT} s; see its log")
        await asyncio.sleep(FILE_POLL)
    states = shards.read_row_file(path)
    if states.token_ids.tolist() != list(expected_ids):
        raise UserError(f"{path}: holds {len(states.token_ids)} tokens that are not this request's")
    held = tuple(states.hidden_states.shape[:2])
    if held != (len(expected_ids), layers):
        raise UserError(
            f"{path}: states of {held[0]} tokens and {held[1]} layers, where {len(expected_ids)} tokens and "
            f"{layers} layers are due; is prefix caching on?"
        )
    return states


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
