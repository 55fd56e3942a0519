# SPDX-License-Identifier: Apache-2.0
"""The shapes in which people have prompts and conversations, each made one: an `id` and `messages`.

Of a conversation all turns but the last answer are `messages`; that one, which the target is to give, is kept as
`answer`, for those who want the data's.
"""

from collections.abc import Callable

from pilotfish import turns

IDS = ("id", "prompt_id", "question_id", "conversation_id", "uuid")
TEXTS = ("prompt", "question", "instruction", "query")  # columns that hold a prompt as plain text
ANSWERS = ("output", "response", "answer", "completion")  # beside such a column
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
    found = next((made for shape in SHAPES if (made := shape(row)) is not None), None)
    return row if found is None else prompt(found, row, number)


def prompt(messages: object, row: dict, number: int) -> dict:
    """The prompt of a row whose messages are known; `prompts.fault` says if they are none."""
    named = next((row[key] for key in IDS if isinstance(row.get(key), str | int)), number)
    asked, answer = _parted(messages, row)
    found = {"id": named, "messages": asked, **({"answer": answer} if answer else {})}
    found |= {key: row[key] for key in ("tools",) if row.get(key)}
    if isinstance(row.get("conversation"), str | int):
        found["conversation"] = row["conversation"]
    return found


def _parted(messages: object, row: dict) -> tuple[object, dict | None]:
    """Messages up to the last turn of the user, and the data's answer to it, if they give one."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return messages, None
    if last.get("role") == "assistant":
        return messages[:-1], last if turns.has_content(last) and not last.get(turns.ANEW) else None
    text = next((row[key] for key in ANSWERS if isinstance(row.get(key), str)), None) if len(messages) == 1 else None
    return messages, {"role": "assistant", "content": text} if text else None


def _openai(row: dict) -> list | None:
    return row["messages"] if isinstance(row.get("messages"), list) else None


def _sharegpt(row: dict) -> list | None:
    for said in (row.get("conversations"), row.get("conversation")):
        if isinstance(said, list) and said and all(isinstance(each, dict) for each in said):
            return [_turn(each) for each in said]
    return None


def _turn(turn: dict) -> dict:
    """`from` and `value` as `role` and `content`; a role that is not known stays, to be named in an error."""
    if "role" in turn:
        return turn
    return {"role": ROLES.get(str(turn.get("from")).lower(), turn.get("from")), "content": turn.get("value")}


def _ultrachat(row: dict) -> list | None:
    said = row.get("data")
    if not (isinstance(said, list) and said and all(isinstance(each, str) for each in said)):
        return None
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def _spec_bench(row: dict) -> list | None:
    """Spec-Bench's and MT-Bench's: what the user says in each turn; the answers between are the target's to give."""
    said = row.get("turns")
    if not (isinstance(said, list) and said):
        return None
    answer = {"role": "assistant", "content": "", turns.ANEW: True}
    asked_in_turn = [[{"role": "user", "content": text}, answer] for text in said]
    return [message for pair in asked_in_turn for message in pair]


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
