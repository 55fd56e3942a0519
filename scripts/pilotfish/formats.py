# SPDX-License-Identifier: Apache-2.0
"""The shapes in which people have prompts and conversations, each made one: an `id` and `messages`.

Of a conversation all turns but the last answer are kept: that one is the target's to give.
"""

from collections.abc import Callable

IDS = ("id", "prompt_id", "question_id", "conversation_id", "uuid")
TEXTS = ("prompt", "question", "instruction", "query")  # columns that hold a prompt as plain text
ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "system": "system",
}  # fmt: skip


def prompt_of(row: dict, number: int) -> dict:
    """A row of any known shape as a prompt; one of no known shape as it is, for `prompts.fault` to name what it lacks.

    Known are OpenAI's (`messages`), ShareGPT's (`conversations` of `from` and `value`), UltraChat's (`data`, a list of
    turns), Spec-Bench's (`turns` of the user), Alpaca's (`instruction`, `input`) and a column of plain text (TEXTS).
    `number` is the id of a row that has none of IDS.
    """
    turns = next((made for shape in SHAPES if (made := shape(row)) is not None), None)
    return row if turns is None else prompt(turns, row, number)


def prompt(turns: object, row: dict, number: int) -> dict:
    """The prompt of a row whose turns are known; `prompts.fault` says if they are none."""
    named = next((row[key] for key in IDS if isinstance(row.get(key), str | int)), number)
    found = {"id": named, "messages": _unanswered(turns)}
    if isinstance(row.get("conversation"), str | int):
        found["conversation"] = row["conversation"]
    return found


def _unanswered(turns: object) -> object:
    last = turns[-1] if isinstance(turns, list) and turns else None
    return turns[:-1] if isinstance(last, dict) and last.get("role") == "assistant" else turns


def _openai(row: dict) -> list | None:
    return row["messages"] if isinstance(row.get("messages"), list) else None


def _sharegpt(row: dict) -> list | None:
    for turns in (row.get("conversations"), row.get("conversation")):
        if isinstance(turns, list) and turns and all(isinstance(each, dict) for each in turns):
            return [_turn(each) for each in turns]
    return None


def _turn(turn: dict) -> dict:
    """`from` and `value` as `role` and `content`; a role that is not known stays, to be named in an error."""
    if "role" in turn:
        return turn
    return {"role": ROLES.get(str(turn.get("from")).lower(), turn.get("from")), "content": turn.get("value")}


def _ultrachat(row: dict) -> list | None:
    turns = row.get("data")
    if not (isinstance(turns, list) and turns and all(isinstance(each, str) for each in turns)):
        return None
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


def _spec_bench(row: dict) -> list | None:
    """Spec-Bench's and MT-Bench's: what the user says in each turn, without answers between."""
    turns = row.get("turns")
    return [{"role": "user", "content": text} for text in turns] if isinstance(turns, list) and turns else None


def _alpaca(row: dict) -> list | None:
    if not (isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str)):
        return None
    return asked("\n\n".join(part for part in (row["instruction"], row["input"]) if part.strip()))


def _text(row: dict) -> list | None:
    text = next((row[key] for key in TEXTS if isinstance(row.get(key), str)), None)
    return None if text is None else asked(text)


def asked(said: object) -> object:
    """A text as one turn of the user; what is no text, messages perhaps, as it is."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


SHAPES: tuple[Callable[[dict], list | None], ...] = (
    _openai, _sharegpt, _ultrachat, _spec_bench, _alpaca, _text,
)  # fmt: skip
