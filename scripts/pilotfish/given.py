# SPDX-License-Identifier: Apache-2.0
"""Answers that the data give: the engine's own rendering of the conversation says which tokens they are.

The chat template is rendered twice, up to the answer, as the engine renders what it is asked, and with the answer in
its place. What the second has more is the answer, as the target's tokens.
"""

from collections.abc import Mapping
from pathlib import Path

import httpx
import openai

from pilotfish import generation, reasoning
from pilotfish.engine import SERVED_NAME, Engine
from pilotfish.generation import RowRefused
from pilotfish.responses import Decode, detokeniser, short


class Keeper:
    """Makes responses of the data's answers; `folder` is the target's, `spec` that of `respond`.

    Answers are cut where `max_tokens` of the sampling, or `max_model_len`, is full.
    """

    def __init__(self, folder: Path, spec: Mapping, facts: Mapping, max_model_len: int):
        self._template = spec["sampling"]["chat_template_kwargs"]
        self._longest, self._max_model_len = spec["sampling"]["max_tokens"], max_model_len
        self._facts, self._decode = facts, detokeniser(folder, spec["trust_remote_code"])

    async def row(
        self, api: openai.AsyncOpenAI, server: Engine, row: int, prompt: dict, sampling: dict, capture: bool
    ) -> tuple[dict, dict]:
        """A response as `generation.response_row` makes it, and with `capture` the engine's pass over its tokens.

        RowRefused where `rendered` or `kept` refuses it.
        """
        asked, behind = await rendered(api, server, prompt, self._template)
        room = min(self._longest, self._max_model_len - len(asked))
        made = {
            "row": row,
            "id": prompt["id"],
            "sampling": sampling,
            **kept(prompt, asked, behind, self._facts, room, self._decode),
        }
        if not capture:
            return made, {}
        return made, await generation.prefill(api, (made["prompt_token_ids"] + made["token_ids"])[:-1])


async def rendered(
    api: openai.AsyncOpenAI, server: Engine, prompt: dict, template: dict
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt as it is asked, and of its `answer` up to all that the template puts behind it.

    `template` are the chat template's arguments. RowRefused where the engine cannot render them, or renders the prompt
    otherwise once it has its answer.
    """
    asking = {"model": SERVED_NAME, "chat_template_kwargs": template}
    if prompt.get("tools"):
        asking["tools"] = prompt["tools"]

    async def tokens(messages: list[dict], open_answer: bool) -> list[int]:
        body = {**asking, "messages": messages, "add_generation_prompt": open_answer}
        try:
            answer = await api.post(f"{server.url}/tokenize", cast_to=httpx.Response, body=body)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RowRefused(str(error)) from None
        return answer.json()["tokens"]

    asked = await tokens(prompt["messages"], open_answer=True)
    whole = await tokens([*prompt["messages"], prompt["answer"]], open_answer=False)
    if whole[: len(asked)] != asked:
        place = next((n for n, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(whole))
        raise RowRefused(
            f"with its answer the chat template renders the prompt otherwise, from token {place} of {len(asked)} on: "
            "what is trained on would not be what is served (white space at an answer's start is one cause)"
        )
    return asked, whole[len(asked) :]


def kept(prompt: dict, asked: list[int], behind: list[int], facts: Mapping, room: int, decode: Decode) -> dict:
    """What `respond` keeps of an answer that the target gave, for one that the data give.

    `behind` are the ids from the answer on; it ends with the first of the target's end tokens, or is cut where `room`
    tokens are full, in which case its `finish_reason` is `length`. `decode` makes text of ids. RowRefused where the
    template has no end token after it, or changes its text.
    """
    end = next((place for place, token in enumerate(behind, 1) if token in facts["end_token_ids"]), None)
    if end is None:
        raise RowRefused("the chat template ends no answer with an end token, so the drafter would never learn to stop")
    ids = behind[: max(0, min(end, room))]
    if not ids:
        raise RowRefused(f"the prompt's {len(asked)} tokens leave no room for an answer; raise engine.max_model_len")
    said, whole = prompt["answer"].get("content") or "", decode(behind[:end])
    if said.strip() not in whole:
        raise RowRefused(f"the chat template renders the answer {short(said)} as {short(whole)}")
    span = reasoning.split(asked, ids, facts["wrapper"])
    thought = decode(ids[span.start : span.end]) if span.owner != "none" else None
    return {
        "prompt_token_ids": asked,
        "token_ids": ids,
        "text": decode(ids[span.answer :]),
        "reasoning": thought,
        "finish_reason": "stop" if len(ids) == end else "length",
        "error": None,
    }
