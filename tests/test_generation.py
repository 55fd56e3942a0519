# SPDX-License-Identifier: Apache-2.0
"""Bulk requests are counted right, and end at once when they cannot go on."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from helpers import random_states
from pilotfish import generation
from pilotfish.engine import EngineLost
from pilotfish.errors import UserError


def test_states_that_fit_the_request_are_taken(tmp_path: Path):
    states = random_states([4, 5, 6], 2, 8)
    save_file({"token_ids": states.token_ids, "hidden_states": states.hidden_states}, tmp_path / "s")
    states = asyncio.run(generation.take_states(tmp_path / "s", [4, 5, 6], 2))
    assert torch.equal(states.hidden_states, random_states([4, 5, 6], 2, 8).hidden_states)


@pytest.mark.parametrize(
    ("held", "rows", "message"),
    [
        ([4, 5, 7], 3, "not this request's"),
        ([4, 5], 2, "not this request's"),
        ([4, 5, 6], 2, "states of 2 tokens and 2 layers, where 3 tokens"),
    ],
)
def test_states_that_do_not_fit_the_request_are_an_error(tmp_path: Path, held, rows: int, message: str):
    save_file({"token_ids": torch.tensor(held), "hidden_states": torch.zeros(rows, 2, 8)}, tmp_path / "s")
    with pytest.raises(UserError, match=f"{tmp_path}/s: .*{message}"):
        asyncio.run(generation.take_states(tmp_path / "s", [4, 5, 6], 2))


def test_states_that_never_come_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "FILE_TIMEOUT", 0)
    with pytest.raises(UserError, match=f"{tmp_path}/s: the engine wrote no hidden states"):
        asyncio.run(generation.take_states(tmp_path / "s", [4], 2))


class StandIn:
    """What bulk requests need of an engine; `dies` is its error from the first look at it on, `well` its health."""

    log = Path("engine.log")

    def __init__(self, dies: str | None = None, well: bool = True):
        self.dies, self.well = dies, well

    def answers(self) -> bool:
        return self.well

    def check_alive(self) -> None:
        if self.dies:
            raise UserError(self.dies)

    def tail(self) -> str:
        return "  | the last line"


def run_rows(engine: StandIn, rows, do_row, at_once: int = 4, stall_timeout: int = 60) -> None:
    asyncio.run(generation.run_rows(engine, rows, do_row, at_once=at_once, stall_timeout=stall_timeout))


def clock(*readings: float) -> SimpleNamespace:
    """A time module whose monotonic clock shows the readings, then stays at the last."""
    left = list(readings)
    return SimpleNamespace(monotonic=lambda: left.pop(0) if len(left) > 1 else left[0])


def test_as_many_rows_run_together_as_asked_and_in_order():
    under_way, most, begun = set(), [], []

    async def do_row(row: int) -> None:
        begun.append(row)
        under_way.add(row)
        most.append(len(under_way))
        await asyncio.sleep(0)
        under_way.remove(row)

    run_rows(StandIn(), range(20), do_row, at_once=3)
    assert begun == list(range(20))
    assert max(most) == 3


class Stuck:
    """Rows that never finish, and that note how they ended."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    async def __call__(self, row: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise


def test_the_death_of_the_engine_ends_rows_under_way():
    stuck = Stuck()
    with pytest.raises(UserError, match="it died"):
        run_rows(StandIn(dies="it died"), range(3), stuck)
    assert sorted(stuck.cancelled) == [0, 1, 2]


def test_the_fault_of_one_row_cancels_the_rest():
    stuck = Stuck()

    async def do_row(row: int) -> None:
        if row == 1:
            raise UserError("row 1 is bad")
        await stuck(row)

    with pytest.raises(UserError, match="row 1 is bad"):
        run_rows(StandIn(), range(9), do_row, at_once=3)
    assert {0, 2} <= set(stuck.cancelled)


def test_a_stall_ends_with_the_count_and_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "time", clock(0.0, 8.0))
    with pytest.raises(UserError, match=r"stall_timeout = 7 s \(0 of 2 done\): the engine hangs.*\n  \| the last line"):
        run_rows(StandIn(), range(2), Stuck(), stall_timeout=7)


def test_an_engine_that_answers_no_question_about_its_health_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "time", clock(0.0, 100.0, 130.0))
    with pytest.raises(EngineLost, match=r"not answered /health for 120 s.*\n  \| the last line"):
        run_rows(StandIn(well=False), range(2), Stuck(), stall_timeout=600)


def test_an_engine_that_is_slow_but_well_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "time", clock(0.0, 100.0, 200.0, 500.0, 599.0, 601.0))
    with pytest.raises(EngineLost, match="no row finished"):
        run_rows(StandIn(), range(2), Stuck(), stall_timeout=600)


REQUEST = httpx.Request("POST", "http://127.0.0.1")
UNREACHABLE = openai.APIConnectionError(request=REQUEST)
SERVER_ERROR = openai.InternalServerError("oops", response=httpx.Response(500, request=REQUEST), body=None)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be waited, instead of the wait."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(generation.asyncio, "sleep", pause)
    return made


def with_retries(faults: list[Exception], engine: StandIn) -> int:
    """Attempts that were needed when each of `faults` is raised once."""
    attempts = iter([*faults, None])
    made = 0

    async def attempt() -> int:
        nonlocal made
        made += 1
        if fault := next(attempts):
            raise fault
        return made

    return asyncio.run(generation.with_retries(5, attempt, engine))


@pytest.mark.parametrize("faults", [[], [UNREACHABLE], [SERVER_ERROR, UNREACHABLE]], ids=len)
def test_a_passing_fault_is_tried_again_after_longer_and_longer_pauses(faults: list[Exception], pauses: list[float]):
    assert with_retries(faults, StandIn()) == len(faults) + 1
    assert pauses == [0, 1.0, 3.0][: len(faults)][1:]


def test_a_lasting_fault_names_the_row():
    with pytest.raises(UserError, match="row 5: 5 attempts failed, the last with: oops"):
        with_retries([UNREACHABLE, *[SERVER_ERROR] * 4], StandIn())


def test_no_second_attempt_is_made_on_a_dead_engine():
    with pytest.raises(UserError, match="it died"):
        with_retries([UNREACHABLE], StandIn(dies="it died"))


def test_a_refusal_is_not_tried_again():
    with pytest.raises(generation.RowRefused):
        with_retries([generation.RowRefused("too long")], StandIn())


SAMPLING = {
    "max_tokens": 9,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 3,
    "chat_template_kwargs": {"enable_thinking": False},
}


def chat(reply: httpx.Response, transfer: dict | None = None, tools: list | None = None) -> tuple[dict, dict]:
    """The request that is sent, and the answer that comes back for `reply`."""
    sent = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return reply

    async def ask() -> dict:
        http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        api = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
        return await generation.chat(api, [{"role": "user", "content": "hi"}], SAMPLING, transfer, tools)

    answered = asyncio.run(ask())
    return sent[0], answered


def answered_by(**message: object) -> httpx.Response:
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [3], "message": {"role": "assistant", **message}}
    reply = {"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return httpx.Response(200, json=reply)


def test_tools_are_sent_for_the_template_and_vllm_is_to_choose_none():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    request, _ = chat(answered_by(), tools=tools)
    assert (request["tools"], request["tool_choice"]) == (tools, "none")
    plain, _ = chat(answered_by())
    assert "tools" not in plain and "tool_choice" not in plain


def test_a_request_spells_out_every_sampling_parameter_and_asks_for_token_ids():
    request, answered = chat(answered_by(), {"include_output_tokens": True})
    assert request == {
        "model": generation.SERVED_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        **SAMPLING,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    assert answered["choices"][0]["token_ids"] == [3]


@pytest.mark.parametrize("status", [400, 422])
def test_a_request_that_the_engine_will_not_do_is_a_refusal(status: int):
    with pytest.raises(generation.RowRefused, match="too long"):
        chat(httpx.Response(status, json={"message": "too long"}))
