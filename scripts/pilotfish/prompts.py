# SPDX-License-Identifier: Apache-2.0
"""Prompts: reading them from a file, and the seeded split by conversation."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from pilotfish import sources, turns
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
# What may come after a message: a tool answers an assistant's calls, and may be what the target is to answer.
AFTER = {
    "start": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calls": ("tool",),
    "tool": ("tool", "assistant"),
}
LAST = ("user", "tool")
BYTES_PER_TOKEN = 16  # of text, at most: common tokenizers reach 1 to 6
LONGEST_ID = 500  # characters
SHOWN = 6  # roles in an error


def fault(prompt: dict) -> str | None:
    """What is wrong with a prompt's shape, or None: id, then alternating turns that end with the user, or a tool."""
    if not _names(prompt.get("id")):
        return "`id` is missing or neither text nor a number"
    if len(str(prompt["id"])) > LONGEST_ID:
        return f"`id` has more than {LONGEST_ID} characters"
    if prompt.get("conversation") is not None and not _names(prompt["conversation"]):
        return "`conversation` is neither text nor a number"
    messages = prompt.get("messages")
    if not isinstance(messages, list) or not messages:
        return "`messages` is missing, empty or not a list"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {number} has no role among {', '.join(ROLES)}"
        if not turns.has_content(message):
            return f"message {number} has empty or non-text `content`"
    tools = prompt.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return "`tools` is not a list of objects"
    return _order_fault(messages[messages[0]["role"] == "system" :])


def _order_fault(messages: list[dict]) -> str | None:
    """What is wrong with the order of turns, a first one of the system left out."""
    roles = [message["role"] for message in messages]
    before = ["start", *("calls" if message.get("tool_calls") else message["role"] for message in messages)]
    follows = (role in AFTER.get(each, ()) for each, role in zip(before, roles, strict=False))
    if roles and roles[-1] in LAST and all(follows):
        return None
    found = ", ".join(roles[:SHOWN]) or "none"
    more = ", ..." if len(roles) > SHOWN else ""
    tools = ", and `tool` comes after `tool_calls` of the assistant" if "tool" in roles else ""
    return f"roles must alternate user, assistant, ... and end with user{tools} (found {found}{more})"


def _names(value: object) -> bool:
    """Whether a value can be an id: text or a whole number; true and false, which Python counts as numbers, cannot."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def read(setting: str, spec: Mapping, max_model_len: int, answers: str = turns.ANEW) -> list[dict]:
    """All prompts of a source, as `checked` gives them; of a hub's dataset its first `rows`."""
    rows = islice(sources.prompts(setting, spec), spec["rows"])
    cure = sources.cure(setting, spec)
    found = checked(rows, max_model_len, cure, spec["max_bad"], answers)
    if not found:
        raise UserError(f"{spec['source']}: no prompts in it; {cure}")
    return found


def together(read: Sequence[list[dict]]) -> list[dict]:
    """The prompts of several sources, each with the number of its `source`.

    Ids and conversations of different sources have nothing to do with each other: of more than one source they get its
    number in front.
    """
    marked = []
    for source, found in enumerate(read):
        for prompt in found:
            names = {key: f"{source}/{prompt[key]}" for key in ("id", "conversation") if key in prompt}
            marked.append({**prompt, **(names if len(read) > 1 else {}), "source": source})
    return marked


def checked(
    rows: Iterable[tuple[str, dict]], max_model_len: int, cure: str, max_bad: int = 0, answers: str = turns.ANEW
) -> list[dict]:
    """Prompts as `id` (text), `messages` and, where given, `answer`, `conversation` and `tools`, of places and rows.

    `max_model_len` is in tokens; `answers` is the setting, for which a row may lack some. Raises UserError naming the
    place of the first bad shape (with the `cure`), repeated id, or prompt that is far too long; the first `max_bad` of
    them are left out, and told.
    """
    prompts, seen, bad = [], {}, 0
    for place, row in rows:
        if wrong := _refusal(row, max_model_len, cure, seen) or turns.lacking(row, answers):
            if bad == max_bad:
                more = f" (after {bad} rows that were left out)" if bad else ""
                raise UserError(f"{place}: {wrong}{more}")
            bad += 1
            logger.warning("%s: left out: %s", place, wrong)
            continue
        seen[str(row["id"])] = place
        prompt = {"id": str(row["id"]), "messages": row["messages"]}
        prompt |= {key: row[key] for key in ("answer", "tools") if row.get(key)}
        if row.get("conversation") is not None:
            prompt["conversation"] = str(row["conversation"])
        prompts.append(prompt)
    return prompts


def _refusal(row: dict, max_model_len: int, cure: str, seen: Mapping[str, str]) -> str | None:
    """Why a row cannot be asked; `seen` has the places of ids."""
    if wrong := fault(row):
        return f"{wrong}; {cure}"
    if (identifier := str(row["id"])) in seen:
        return f"id {identifier!r} was used before, by {seen[identifier]}"
    size = sum(len((message.get("content") or "").encode("utf-8")) for message in row["messages"])
    size += len(json.dumps(row["tools"])) if row.get("tools") else 0
    if size > BYTES_PER_TOKEN * max_model_len:
        return (
            f"{size:,} bytes of text are too many for engine.max_model_len = {max_model_len} tokens; shorten or remove "
            "the prompt, or raise the setting"
        )
    return None


def user_text(prompt: dict) -> str:
    """What the user says in all turns of a prompt, a line between them."""
    return "\n".join(message["content"] for message in prompt["messages"] if message["role"] == "user")


def conversation_key(prompt: dict) -> str:
    """Rows of one conversation share this: its `conversation`, else the text of its first user turn."""
    if prompt.get("conversation") is not None:
        return f"id:{prompt['conversation']}"
    return "text:" + next(m["content"] for m in prompt["messages"] if m["role"] == "user")


def shuffled(keys: Iterable[str], seed: int) -> list[str]:
    """The keys in an order that only they and the seed decide, on any machine."""
    return sorted(keys, key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())


def split(
    prompts: list[dict], train: int, heldout: int, seed: int, weights: Sequence[float] = (1.0,)
) -> dict[str, list[dict]]:
    """Split by conversation into `heldout` and `train`, in an order that only seed and content decide.

    Splits get exactly the rows asked for, of each source (a prompt's `source` is its place in `weights`) its share:
    where a conversation is longer than what is left to fill, its last rows go to neither side. Raises UserError when
    the prompts run out.
    """
    groups: dict[str, list[dict]] = {}
    for prompt in prompts:
        groups.setdefault(conversation_key(prompt), []).append(prompt)
    chosen: dict[str, list[dict]] = {"heldout": [], "train": []}
    room = {name: shares(rows, weights) for name, rows in (("heldout", heldout), ("train", train))}
    for key in shuffled(groups, seed):
        for name, rows in chosen.items():
            before = len(rows)
            for prompt in groups[key]:
                if name == "heldout" and turns.lacks_answers(prompt):
                    continue  # what is served must be a whole conversation
                if room[name][source := prompt.get("source", 0)]:
                    room[name][source] -= 1
                    rows.append({key: value for key, value in prompt.items() if key != "source"})
            if len(rows) > before:
                break
    lacking = [source for source in range(len(weights)) if any(left[source] for left in room.values())]
    if lacking:
        short = {name: len(rows) for name, rows in chosen.items()}
        named = f"; prompts.sources.{lacking[0]} has too few for its weight" if len(weights) > 1 else ""
        raise UserError(
            f"{len(prompts)} prompts are too few for prompts.train = {train} and prompts.heldout = {heldout} "
            f"split by conversation (got {short}{named}); add prompts or lower the numbers"
        )
    return chosen


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole numbers that are to each other as the weights, those with the largest remainders rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(each) for each in exact]
    for place in sorted(range(len(weights)), key=lambda place: found[place] - exact[place])[: total - sum(found)]:
        found[place] += 1
    return found


def part_rows(total: int, part: str) -> range:
    """Rows of one part such as `00003-of-00016`: consecutive, nearly equal ranges that cover all rows."""
    found = re.fullmatch(r"([0-9]{1,9})-of-([0-9]{1,9})", part)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if number >= parts:
        raise UserError(f"part {part[:100]!r}: write it as 00003-of-00016, numbered from 00000")
    return range(number * total // parts, (number + 1) * total // parts)
