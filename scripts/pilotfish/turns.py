# SPDX-License-Identifier: Apache-2.0
"""Conversations turn by turn: each turn of the user is a row, and the target gives the answers between them anew.

The data's own answers say what another model would have said; a drafter is to learn what follows on the target's.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

ANEW = "anew"  # in a message of the assistant: the target is to give it, whatever its content


def has_content(message: dict) -> bool:
    """Whether there is text; a tool needs none, nor an assistant who calls one or whose turn the target is to give."""
    content, calls = message.get("content"), message.get("tool_calls")
    if message["role"] == "assistant" and (message.get(ANEW) is True or (isinstance(calls, list) and calls)):
        return content is None or isinstance(content, str)
    return isinstance(content, str) and bool(content.strip() or message["role"] == "tool")


def expanded(prompt: dict) -> list[dict]:
    """A prompt for each turn of the user; answers before it are to be given anew, and keep the data's for `given`.

    A conversation in which tools were called stays as it is.
    """
    ends = [place for place, message in enumerate(prompt["messages"]) if message["role"] == "user"]
    if len(ends) == 1 or any(message["role"] == "tool" for message in prompt["messages"]):
        return [prompt]  # what a tool answered goes with the data's calls
    messages = [{**each, ANEW: True} if each["role"] == "assistant" else each for each in prompt["messages"]]
    return [
        {**prompt, "id": f"{prompt['id']}/{turn}", "messages": messages[: end + 1]} for turn, end in enumerate(ends, 1)
    ]


def each_answer(prompt: dict) -> list[dict]:
    """A row for each answer that the data give, which is kept as the row's `answer`; none where they give none.

    What comes before it stays as it is, answers and calls of tools included.
    """
    told = [*prompt["messages"], *([prompt["answer"]] if "answer" in prompt else [])]
    places = [place for place, each in enumerate(told) if each["role"] == "assistant" and not each.get(ANEW)]
    ids = [prompt["id"]] if len(places) == 1 else [f"{prompt['id']}/{number}" for number in range(1, len(places) + 1)]
    return [
        {**prompt, "id": name, "messages": told[:place], "answer": told[place]}
        for name, place in zip(ids, places, strict=True)
    ]


def lacking(prompt: dict, answers: str) -> str | None:
    """What a prompt's data lack for `prompts.answers`, or None."""
    if answers == ANEW:
        return None
    if lacks_answers(prompt):
        return "its data have no answers between its turns; set prompts.answers to `anew`, or remove such prompts"
    if answers == "given" and not each_answer(prompt):
        return "its data have no answer to keep; set prompts.answers to `anew`, or remove such prompts"
    return None


def lacks_answers(prompt: dict) -> bool:
    """Whether the data have no answer where one stands before the last turn."""
    return any(message.get(ANEW) and not message.get("content") for message in prompt["messages"])


def given(prompt: dict) -> dict:
    """The prompt with the data's answers to all turns but the last."""
    plain = [{key: value for key, value in each.items() if key != ANEW} for each in prompt["messages"]]
    return {**_asked(prompt), "messages": plain}


def unanswered(prompt: dict) -> dict:
    """The prompt without the data's answers: the target's take their place, so theirs must shape nothing."""
    told = [{**each, "content": ""} if each.get(ANEW) else each for each in prompt["messages"]]
    return {**_asked(prompt), "messages": told}


def _asked(prompt: dict) -> dict:
    """The prompt without the data's answer to its last turn."""
    return {key: value for key, value in prompt.items() if key != "answer"}


def first(prompt: dict) -> dict:
    """The prompt up to the first turn of the user."""
    end = next(place for place, message in enumerate(prompt["messages"]) if message["role"] == "user")
    return {**prompt, "messages": prompt["messages"][: end + 1]}


class EarlierRefused(Exception):
    """The engine refused a turn before the one that was to be asked."""


class Answers:
    """What the target answers to earlier turns, in one job of rows whose prompts are `rows`.

    `ask(messages, row, back)` answers messages that are no row of the job's own, `back` turns before that row. `done`
    are texts of rows that are answered already, None of refused ones.
    """

    def __init__(
        self,
        rows: Mapping[int, dict],
        ask: Callable[[list[dict], int, int], Awaitable[str]],
        done: Mapping[int, str | None],
    ):
        self._rows, self._ask = rows, ask
        self._row_of = {_key(prompt["messages"]): row for row, prompt in rows.items()}
        loop = asyncio.get_running_loop()
        self._texts: dict[int, asyncio.Future[str | None]] = {row: loop.create_future() for row in rows}
        for row, text in done.items():
            self.finished(row, text)

    def finished(self, row: int, text: str | None) -> None:
        """A row has been answered, or refused with no text."""
        if not self._texts[row].done():
            self._texts[row].set_result(text)

    async def messages(self, row: int) -> list[dict]:
        """The messages to send for a row, once its earlier turns are answered; EarlierRefused if they are not."""
        told = self._rows[row]["messages"]
        made: list[dict] = []
        for place, message in enumerate(told):
            if not message.get(ANEW):
                made.append(message)
                continue
            earlier = self._row_of.get(_key(told[:place]))
            # A later row would wait for this one to leave its place.
            if earlier is not None and earlier < row:
                if (text := await self._texts[earlier]) is None:
                    raise EarlierRefused(f"row {earlier}, an earlier turn of the same conversation, was refused")
            else:
                back = sum(each["role"] == "user" for each in told[place:])
                text = await self._ask(made, row, back)
            made.append({"role": "assistant", "content": text})
        return made


def _key(messages: Sequence[dict]) -> str:
    return json.dumps(messages, sort_keys=True)
