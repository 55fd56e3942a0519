# SPDX-License-Identifier: Apache-2.0
"""Reasoning by token id: who opens it, where it ends, and what is wrong with its wrapper tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

# Templates that open (`<think>` and a line break) or close reasoning do so within these last prompt tokens.
PROMPT_TAIL = 8

Owner = Literal["template", "model", "none"]


@dataclass(frozen=True)
class Span:
    """The parts of a response: reasoning is `token_ids[start:end]`, the answer `token_ids[answer:]`.

    `owner` emitted the opening token: the chat template (it ends the prompt), the model, or `none` where there is
    no reasoning. `closed` is False for reasoning that never ended. `fault` says what is wrong with the wrapper.
    """

    owner: Owner
    start: int
    end: int
    answer: int
    closed: bool
    fault: str | None


def opened_by_template(prompt_ids: Sequence[int], wrapper: dict[str, int]) -> bool:
    """Whether the prompt ends inside reasoning; what a user typed further up does not count."""
    for token in reversed(prompt_ids[-PROMPT_TAIL:]):
        if token in (wrapper["open"], wrapper["close"]):
            return token == wrapper["open"]
    return False


def split(prompt_ids: Sequence[int], token_ids: Sequence[int], wrapper: dict[str, int] | None) -> Span:
    """Split a response by its wrapper tokens; `wrapper` holds the ids of `open` and `close`, None without any."""
    if wrapper is None:
        return Span("none", 0, 0, 0, True, None)
    opens = [i for i, token in enumerate(token_ids) if token == wrapper["open"]]
    closes = [i for i, token in enumerate(token_ids) if token == wrapper["close"]]
    by_template = opened_by_template(prompt_ids, wrapper)
    owner: Owner = "template" if by_template else "model" if opens or closes else "none"
    start = 0 if by_template or not opens else opens[0] + 1
    if owner == "none":
        return Span(owner, 0, 0, 0, True, None)
    end = closes[0] if closes else len(token_ids)
    fault = _fault(by_template, opens, closes)
    return Span(owner, min(start, end), end, min(end + 1, len(token_ids)), bool(closes), fault)


def mode(prompt_ids: Sequence[int], span: Span, thinking: Collection[int]) -> str:
    """How an answer came about: `thinking`, `closed by the template` (no reasoning was let be), or `plain`.

    `thinking` are the ids of the target's tokens that wrap reasoning, whether or not a parser is set.
    """
    if span.owner != "none":
        return "thinking"
    return "closed by the template" if not set(thinking).isdisjoint(prompt_ids[-PROMPT_TAIL:]) else "plain"


def _fault(by_template: bool, opens: list[int], closes: list[int]) -> str | None:
    if by_template and opens:
        return "an opening token though the template has opened the reasoning: its own token would be supervised"
    if len(opens) > 1:
        return f"{len(opens)} opening tokens where one is due"
    if len(closes) > 1:
        return f"{len(closes)} closing tokens where one is due"
    if closes and not by_template and not opens:
        return "a closing token without an opening one"
    if closes and opens and closes[0] < opens[0]:
        return "the closing token comes before the opening one"
    return None
