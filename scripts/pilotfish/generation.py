# SPDX-License-Identifier: Apache-2.0
"""Bulk requests to an engine inside a job: sampling spelled out, retries, and an eye on the engine meanwhile."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import openai

from pilotfish import shards
from pilotfish.engine import SERVED_NAME, Engine, EngineLost
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

ATTEMPTS = 5  # per row, for errors that a second try may mend
BACK_OFF = 1.0  # seconds: the second attempt is made at once, the further ones after 1, 3 and 7 of it
REQUEST_TIMEOUT = 3600  # seconds
FILE_TIMEOUT = 120  # seconds between a response and its states file
FILE_POLL = 0.01
HEALTH_EVERY = 10  # seconds between two looks at an engine's health while it works
HEALTH_PATIENCE = 120  # seconds without a sign of it, until the engine counts as lost


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


async def chat(
    api: openai.AsyncOpenAI,
    messages: list[dict],
    sampling: dict,
    transfer: dict | None = None,
    tools: list[dict] | None = None,
) -> dict:
    """One chat completion as a plain dict; `transfer` goes to the KV connector.

    `tools` pass through the chat template; a call that the target makes is text like any other of its answer, since
    vLLM is to choose none. Raises RowRefused for a request that no retry can mend.
    """
    request = sampling_arguments(sampling)
    if tools:
        request |= {"tools": tools, "tool_choice": "none"}
    if transfer:
        request["extra_body"]["kv_transfer_params"] = transfer
    try:
        answer = await api.chat.completions.create(model=SERVED_NAME, messages=messages, **request)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        raise RowRefused(str(error)) from None
    return answer.model_dump()


async def prefill(api: openai.AsyncOpenAI, tokens: Sequence[int]) -> dict:
    """Have the engine compute token ids [T], so that it captures their states; its answer, of one token, as a dict."""
    answer = await api.completions.create(model=SERVED_NAME, prompt=list(tokens), max_tokens=1, temperature=0.0)
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
    do_row: Callable[[int], Awaitable[None]],
    *,
    at_once: int,
    stall_timeout: int,
) -> None:
    """Run `do_row` for each row, `at_once` together, in order.

    Raises EngineLost as soon as the engine dies, when it does not answer /health for HEALTH_PATIENCE seconds, or
    when no row finishes for `stall_timeout` seconds while some are asked for.
    """
    gate = asyncio.Semaphore(at_once)
    watch = _Watch(engine, stall_timeout, len(rows))

    async def one(row: int) -> None:
        async with gate:
            await do_row(row)
            watch.finished_one()

    tasks = [asyncio.create_task(one(row)) for row in rows]
    pending: set[asyncio.Task] = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
            engine.check_alive()
            for task in done:
                task.result()
            if pending:
                await watch.look()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Watch:
    """Tells a working engine from one that hangs."""

    def __init__(self, engine: Engine, stall_timeout: int, rows: int):
        self._engine, self._stall_timeout, self._rows = engine, stall_timeout, rows
        self._finished = 0
        self._advanced = self._looked = self._well = time.monotonic()

    def finished_one(self) -> None:
        self._finished += 1
        self._advanced = time.monotonic()

    async def look(self) -> None:
        """Raise EngineLost when the engine has given no sign of life, or finished no row, for too long."""
        now = time.monotonic()
        if now - self._advanced > self._stall_timeout:
            raise EngineLost(
                f"no row finished for engine.stall_timeout = {self._stall_timeout} s ({self._finished} of {self._rows} "
                f"done): the engine hangs, or the limit is too short for such long answers; {self._last_lines()}"
            )
        if now - self._looked < HEALTH_EVERY:
            return
        self._looked = now
        if await asyncio.to_thread(self._engine.answers):
            self._well = now
        elif now - self._well > HEALTH_PATIENCE:
            raise EngineLost(f"the engine has not answered /health for {HEALTH_PATIENCE} s; {self._last_lines()}")

    def _last_lines(self) -> str:
        return f"last lines of {self._engine.log}:\n{self._engine.tail()}"


async def with_retries(row: int, attempt: Callable[[], Awaitable[Result]], engine: Engine) -> Result:
    """Call `attempt` up to ATTEMPTS times on connection faults and server errors, after longer and longer pauses."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return await attempt()
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            engine.check_alive()
            if number == ATTEMPTS:
                raise UserError(f"row {row}: {ATTEMPTS} attempts failed, the last with: {error}") from None
            # At once at first: a connection that the server closed while it was idle is no fault, and serving is timed.
            pause = BACK_OFF * (2 ** (number - 1) - 1)
            logger.warning("row %d: attempt %d failed (%s); trying again in %.0f s", row, number, error, pause)
            await asyncio.sleep(pause)
    raise AssertionError("unreachable")
