# SPDX-License-Identifier: Apache-2.0
"""Reasoning is told from the answer by token id, whoever opened it."""

import pytest

from pilotfish import reasoning

OPEN, CLOSE, END = 90, 91, 2
WRAPPER = {"open": OPEN, "close": CLOSE}
PROMPT = [1, 5, 6]


def test_without_wrapper_tokens_all_is_answer():
    assert reasoning.split(PROMPT, [7, 8, END], None) == reasoning.Span("none", 0, 0, 0, True, None)


def test_an_answer_without_reasoning_is_all_answer():
    span = reasoning.split(PROMPT, [7, 8, END], WRAPPER)
    assert (span.owner, span.answer, span.fault) == ("none", 0, None)


def test_the_target_opens_and_closes():
    ids = [OPEN, 10, 11, CLOSE, 12, END]
    span = reasoning.split(PROMPT, ids, WRAPPER)
    assert (span.owner, span.closed, span.fault) == ("model", True, None)
    assert (ids[span.start : span.end], ids[span.answer :]) == ([10, 11], [12, END])


def test_the_template_opens_and_the_target_closes():
    ids = [10, 11, CLOSE, 12, END]
    span = reasoning.split([*PROMPT, OPEN, 4], ids, WRAPPER)
    assert (span.owner, span.closed, span.fault) == ("template", True, None)
    assert (ids[span.start : span.end], ids[span.answer :]) == ([10, 11], [12, END])


def test_a_template_that_opens_and_closes_leaves_no_reasoning():
    assert reasoning.split([*PROMPT, OPEN, 4, CLOSE, 4], [7, END], WRAPPER).owner == "none"


def test_what_a_user_typed_opens_nothing():
    typed = [OPEN, *range(20, 20 + reasoning.PROMPT_TAIL)]
    assert not reasoning.opened_by_template(typed, WRAPPER)
    assert reasoning.split(typed, [7, END], WRAPPER).owner == "none"


def test_reasoning_that_was_cut_has_no_answer_and_is_not_closed():
    ids = [OPEN, 10, 11]
    span = reasoning.split(PROMPT, ids, WRAPPER)
    assert (span.closed, span.fault, ids[span.start : span.end], ids[span.answer :]) == (False, None, [10, 11], [])


@pytest.mark.parametrize(
    ("prompt", "ids", "fault"),
    [
        ([*PROMPT, OPEN], [OPEN, 10, CLOSE, 12], "its own token would be supervised"),
        (PROMPT, [OPEN, 10, OPEN, 11, CLOSE, 12], "2 opening tokens"),
        (PROMPT, [OPEN, 10, CLOSE, 11, CLOSE, 12], "2 closing tokens"),
        (PROMPT, [10, CLOSE, 12], "a closing token without an opening one"),
        (PROMPT, [CLOSE, 10, OPEN, 12], "comes before the opening one"),
    ],
)
def test_a_broken_wrapper_is_told(prompt: list[int], ids: list[int], fault: str):
    assert fault in reasoning.split(prompt, ids, WRAPPER).fault
