# SPDX-License-Identifier: Apache-2.0
"""Each answer is judged by its token ids; what is too much of a flaw refuses the split."""

import re

import pytest

from pilotfish import responses
from pilotfish.errors import UserError

OPEN, CLOSE, END = 90, 91, 2
FACTS = {"wrapper": None, "reasoning_parser": None, "thinking_token_ids": [OPEN, CLOSE]}
THINKING = {**FACTS, "wrapper": {"open": OPEN, "close": CLOSE}, "reasoning_parser": "deepseek_r1"}
POLICY = {"truncated": "keep", "max_truncated": 0.5, "max_loops": 0.1, "max_flawed": 0.1}


def decode(ids) -> str:
    """Ids as words; the end token and the wrapper tokens are not said."""
    return " ".join(f"w{i}" for i in ids if i not in (END, OPEN, CLOSE))


def plain(row: int, ids: list[int], **changes) -> dict:
    made = {"row": row, "id": f"p{row}", "prompt_token_ids": [1, 5], "token_ids": ids, "text": decode(ids)}
    return {**made, "reasoning": None, "finish_reason": "stop" if ids[-1] == END else "length", "error": None} | changes


def thinking(row: int, thought: list[int], answer: list[int], **changes) -> dict:
    ids = [OPEN, *thought, CLOSE, *answer]
    return plain(row, ids, text=decode(answer), reasoning=decode(thought)) | changes


def review(rows: list[dict], facts: dict = FACTS, **policy) -> tuple[responses.Review, list[str | None]]:
    made = responses.Review(facts, POLICY | policy, decode)
    return made, [made.take(row) for row in rows]


def answers(count: int) -> list[dict]:
    return [plain(row, [10 + row, 30, END]) for row in range(count)]


def test_good_answers_are_kept_and_counted():
    good, reasons = review(answers(3))
    good.verdict("train", None)
    counts = good.statistics()
    assert reasons == [None] * 3
    assert (counts["rows"], counts["ok"], counts["kept"], counts["response_tokens"]) == (3, 3, 3, 9)
    assert counts["mode"] == "plain"


def test_rows_are_kept_or_left_out_with_a_reason_and_the_sum_is_right():
    refused = {"row": 2, "id": "p2", "error": "too long"}
    made, reasons = review([*answers(2), refused, plain(3, [END], text=None)], max_flawed=1)
    counts = made.statistics()
    assert reasons == [None, None, "refused by the engine: too long", "the answer is empty"]
    assert counts["left_out"] == {"failed": 1, "flawed": 1}
    assert counts["rows"] == counts["kept"] + sum(counts["left_out"].values())


@pytest.mark.parametrize(
    ("row", "facts", "says"),
    [
        (plain(0, [10, END], text="other"), FACTS, "the answer reads 'other' where its token ids say 'w10'"),
        (plain(0, [OPEN, 10, CLOSE, END]), FACTS, "token 90 wraps reasoning, but target.reasoning_parser is not set"),
        (
            thinking(0, [10], [11, END], reasoning="w10 w11"),
            THINKING,
            "the reasoning reads 'w10 w11' where its token ids say 'w10'",
        ),
        (
            thinking(0, [10], [11, END], text="w10 w11"),
            THINKING,
            "the answer reads 'w10 w11' where its token ids say 'w11'",
        ),
    ],
)
def test_text_that_is_not_its_ids_is_refused_whatever_the_limits(row: dict, facts: dict, says: str):
    made, _ = review([row], facts, max_flawed=1, max_truncated=1)
    with pytest.raises(UserError, match=re.escape(says)):
        made.verdict("results/x", None)


def test_a_character_that_the_limit_has_cut_and_white_space_at_the_ends_are_no_mismatch():
    made, _ = review([plain(0, [10, 11], text=" w10 w11\n\ufffd")], max_truncated=1)
    made.verdict("results/x", None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (plain(0, [10, END]), "no reasoning, though target.reasoning_parser is set"),
        (plain(0, [OPEN, 10, END], reasoning="w10", text=None), "the reasoning is never closed"),
        (thinking(0, [10], [END], text=None), "the answer is empty"),
        (thinking(0, [10, CLOSE, 11], [12, END]), "broken reasoning: 2 closing tokens"),
    ],
)
def test_a_flawed_row_is_left_out_and_too_many_refuse_the_split(row: dict, reason: str):
    made, reasons = review([row], THINKING)
    assert reason in reasons[0]
    with pytest.raises(UserError, match=r"1 of 1 answers are flawed, more than responses\.max_flawed = 0\.1 allows"):
        made.verdict("results/x", None)
    some, _ = review([row, *(thinking(n, [10 + n], [11, END]) for n in range(1, 20))], THINKING)
    some.verdict("results/x", None)
    assert some.statistics()["kept"] == 19


def test_a_long_answer_that_comes_again_is_left_out_and_a_short_one_is_not():
    long = list(range(10, 10 + responses.REPEAT_TOKENS))
    _, reasons = review([plain(0, [*long, END]), plain(1, [*long, END]), plain(2, [10, END]), plain(3, [10, END])])
    assert reasons == [None, "the same answer as row 0's", None, None]


def test_cut_answers_are_kept_or_dropped_as_the_policy_says_and_their_share_is_limited():
    rows = [*answers(3), plain(3, [40, 41])]
    assert review(rows)[1] == [None] * 4
    assert review(rows, truncated="drop")[1] == [None, None, None, "cut after 2 tokens"]
    made, _ = review(rows, max_truncated=0.2)
    with pytest.raises(UserError, match=r"1 of 4 answers were cut at max_tokens.*\n  row 3 .*\nraise responses\.max_t"):
        made.verdict("results/x", None)


def test_an_answer_cut_inside_its_reasoning_is_counted_as_such():
    made, reasons = review([plain(0, [OPEN, 10, 11], reasoning="w10 w11", text=None)], THINKING)
    assert reasons == [None]
    assert made.statistics()["cut_in_reasoning"] == 1


def test_reasoning_that_now_the_template_opens_and_now_the_target_is_refused():
    by_template = plain(1, [10, CLOSE, 11, END], prompt_token_ids=[1, OPEN], reasoning="w10", text="w11")
    made, _ = review([thinking(0, [10], [11, END]), by_template], THINKING)
    with pytest.raises(UserError, match="opened by the model in row 0 and template in row 1"):
        made.verdict("results/x", None)


def test_a_split_must_share_the_mode_of_the_one_to_train_on():
    made, _ = review(answers(2))
    made.verdict("results/x", {"mode": "plain"})
    with pytest.raises(UserError, match=r"'plain', those to train on 'thinking'.*chat_template_kwargs"):
        made.verdict("results/x", {"mode": "thinking"})


def test_a_template_that_closes_the_reasoning_is_a_mode_of_its_own():
    made, _ = review([plain(0, [10, END], prompt_token_ids=[1, OPEN, 4, CLOSE, 4])])
    assert made.mode() == "closed by the template"


@pytest.mark.parametrize(
    ("ids", "length"),
    [
        ([1, 2, 3] * 20, 60),
        ([9, 8, *[5] * 50], 50),
        ([1, 2, 3] * 10, 0),
        (list(range(200)), 0),
        ([*range(40), *list(range(70, 90)) * 3, 70, 71], 62),
        ([*[5] * 60, 6], 0),
    ],
    ids=["a cycle", "one token", "too short", "no cycle", "a cycle cut in the middle", "a cycle that ended"],
)
def test_a_loop_is_a_cycle_that_goes_on_to_the_end(ids: list[int], length: int):
    assert responses.loop_length(ids) == length


def test_loops_are_kept_and_their_share_is_limited():
    made, reasons = review([*answers(4), plain(4, [5] * 60)])
    assert reasons == [None] * 5
    with pytest.raises(UserError, match=r"1 of 5 answers end in a loop.*\n  row 4 .*its last 60 tokens only repeat"):
        made.verdict("results/x", None)
