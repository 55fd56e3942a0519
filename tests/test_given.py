# SPDX-License-Identifier: Apache-2.0
"""Answers that the data give become the target's tokens as the engine's own rendering has them, or are refused."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from pilotfish import given
from pilotfish.generation import RowRefused

PROMPT = {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "answer": {"role": "assistant", "content": "de"}}
END = 9
FACTS = {"end_token_ids": [END], "wrapper": None}
THINKING = {"end_token_ids": [END], "wrapper": {"open": 7, "close": 8}}


def decode(ids) -> str:
    return "".join("0abcdef<>"[each] for each in ids if each != END)


def rendered(asked: list[int], whole: list[int], status: int = 200) -> tuple[tuple, list[dict]]:
    """What `given.rendered` makes of an engine that renders prompt and whole so; and what it asked."""
    requests = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://x/tokenize"
        requests.append(json.loads(request.content))
        tokens = asked if requests[-1]["add_generation_prompt"] else whole
        return httpx.Response(status, json={"tokens": tokens, "error": {"message": "no such template"}})

    async def run() -> tuple:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
            api = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
            return await given.rendered(api, SimpleNamespace(url="http://x"), PROMPT, {"enable_thinking": False})

    return asyncio.run(run()), requests


def test_the_answer_is_what_the_rendering_has_more_with_it():
    found, requests = rendered([1, 2, 3], [1, 2, 3, 4, 5, END, 6])
    assert found == ([1, 2, 3], [4, 5, END, 6])
    assert [each["messages"] for each in requests] == [PROMPT["messages"], [*PROMPT["messages"], PROMPT["answer"]]]
    assert {str(each["chat_template_kwargs"]) for each in requests} == {"{'enable_thinking': False}"}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (([1, 2, 3], [1, 2, 4, 5, END]), "renders the prompt otherwise, from token 2 of 3 on"),
        (([1, 2, 3], [1, 2]), "renders the prompt otherwise, from token 2 of 3 on"),
        (([1], [1, 4], 400), "no such template"),
    ],
    ids=["another prompt", "a shorter prompt", "refused by the engine"],
)
def test_what_cannot_be_served_as_it_is_trained_on_is_refused(answer: tuple, fault: str):
    with pytest.raises(RowRefused, match=fault):
        rendered(*answer)


def kept(behind: list[int], room: int = 10, facts: dict = FACTS) -> dict:
    return given.kept(PROMPT, [1, 2], behind, facts, room, decode)


def test_an_answer_ends_with_its_end_token_and_without_what_the_template_puts_behind():
    made = kept([4, 5, END, 6])
    assert (made["prompt_token_ids"], made["token_ids"], made["finish_reason"]) == ([1, 2], [4, 5, END], "stop")
    assert (made["text"], made["reasoning"], made["error"]) == ("de", None, None)


def test_an_answer_is_cut_where_there_is_no_more_room():
    made = kept([4, 5, END], room=2)
    assert (made["token_ids"], made["finish_reason"]) == ([4, 5], "length")


def test_reasoning_that_the_template_wraps_is_told_from_the_answer():
    made = kept([7, 1, 8, 4, 5, END], facts=THINKING)
    assert (made["reasoning"], made["text"]) == ("a", "de")


@pytest.mark.parametrize(
    ("behind", "room", "fault"),
    [
        ([4, 5, 6], 10, "no answer with an end token"),
        ([4, END], 10, "renders the answer 'de' as 'd'"),
        ([4, 5, END], 0, "leave no room for an answer"),
        ([4, 5, END], -3, "leave no room for an answer"),
    ],
    ids=["no end", "changed text", "no room", "a prompt too long"],
)
def test_an_answer_that_is_not_the_datas_is_refused(behind: list[int], room: int, fault: str):
    with pytest.raises(RowRefused, match=fault):
        kept(behind, room)
