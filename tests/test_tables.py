# SPDX-License-Identifier: Apache-2.0
"""Each fault in a table is an error with the file, the row and what must hold."""

import re
from pathlib import Path

import pandas as pd
import pytest

from pilotfish import speed, tables
from pilotfish.errors import UserError

FILE = Path("results/run/table.jsonl")
VOCABULARY, END = 100, [2, 3]
RESPONSE = {
    **{"prompt_token_ids": [1, 5], "token_ids": [7, 99, 2], "finish_reason": "stop"},
    **{"text": "words", "reasoning": None, "sampling": {"max_tokens": 3}, "error": None},
}
SAMPLE = {
    **{"input_ids": [1, 5, 7, 2], "loss_mask": [False, False, True, True], "prompt_length": 2},
    **{"seq_len": 3, "finish_reason": "stop"},
}
PROMPT = {"messages": [{"role": "user", "content": "words"}]}
GOOD = {
    "prompts": (tables.PROMPTS, PROMPT),
    "responses": (tables.responses(VOCABULARY, END), RESPONSE),
    "samples": (tables.samples(VOCABULARY), SAMPLE),
}
IDS = "token ids must be some, and lie in 0..99"
ENDS = r"must end with one of the end tokens \[2, 3\]"
TURNS = "turns must alternate user and assistant, end with the user, and none be empty"
MASK = "the loss mask must be 1 exactly on the response's tokens"


def rows(kind: str, count: int = 3, **changes_of_the_second) -> list[dict]:
    numbers = [{} if kind == "prompts" else {"row": n} for n in range(count)]
    made = [{**numbers[n], "id": f"id-{n}", **GOOD[kind][1]} for n in range(count)]
    made[1].update(changes_of_the_second)
    return made


def complaint(kind: str, found: list[dict] | pd.DataFrame) -> str:
    with pytest.raises(UserError) as error:
        tables.check(pd.DataFrame(found), GOOD[kind][0], FILE)
    return str(error.value)


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_pass(kind: str):
    tables.check(pd.DataFrame(rows(kind)), GOOD[kind][0], FILE)


@pytest.mark.parametrize("kind", GOOD)
def test_a_column_that_is_not_known_is_named_with_its_first_row(kind: str):
    message = complaint(kind, rows(kind, extra={"a": 1}))
    assert message == (
        f"{FILE}: 1 check(s) failed:\n"
        "  row 1, extra: is no column of this table; delete the file and run again, or take it out"
    )


@pytest.mark.parametrize(
    "change",
    [{"token_ids": [7, 8], "finish_reason": "length"}, {"token_ids": [3]}],
    ids=["cut at the limit", "another end token"],
)
def test_a_response_may_be_cut_or_end_with_any_end_token(change: dict):
    tables.check(pd.DataFrame(rows("responses", **change)), GOOD["responses"][0], FILE)


@pytest.mark.parametrize(
    ("kind", "change", "cure"),
    [
        ("prompts", {"messages": []}, f", messages: {TURNS}"),
        ("prompts", {"messages": [{"role": "assistant", "content": "x"}]}, f", messages: {TURNS}"),
        ("prompts", {"messages": [{"role": "user", "content": " "}]}, f", messages: {TURNS}"),
        ("prompts", {"conversation": 7}, ", conversation: must be text or null"),
        ("responses", {"token_ids": [100, 2]}, f", token_ids: {IDS}"),
        ("responses", {"token_ids": [-1, 2]}, f", token_ids: {IDS}"),
        ("responses", {"token_ids": [], "finish_reason": "length"}, f", token_ids: {IDS}"),
        ("responses", {"prompt_token_ids": []}, f", prompt_token_ids: {IDS}"),
        ("responses", {"prompt_token_ids": [1000]}, f", prompt_token_ids: {IDS}"),
        ("responses", {"token_ids": [2, 7]}, f".*{ENDS}"),
        ("responses", {"finish_reason": "error"}, r", finish_reason: .* one of \('stop', 'length'\)"),
        ("samples", {"input_ids": [1, 5, 7, 100]}, f", input_ids: {IDS}"),
        ("samples", {"loss_mask": [False] * 4}, ", loss_mask: the loss mask must not be all zero"),
        ("samples", {"loss_mask": [True] * 4}, f": {MASK}"),
        ("samples", {"loss_mask": [False, False, False, True]}, f": {MASK}"),
        ("samples", {"loss_mask": [False, True, True, True]}, f": {MASK}"),
        ("samples", {"loss_mask": [False, False, True, False]}, f": {MASK}"),
        ("samples", {"loss_mask": [False, False, True]}, f": {MASK}"),
        ("samples", {"loss_mask": [False, False, True, True, True]}, f": {MASK}"),
        ("samples", {"prompt_length": 0, "loss_mask": [True] * 4}, ", prompt_length: a sample needs a prompt"),
    ],
)
def test_a_faulty_row_is_named_with_what_must_hold(kind: str, change: dict, cure: str):
    message = complaint(kind, rows(kind, **change))
    assert message.startswith(f"{FILE}: ")
    lines = [line for line in message.splitlines()[1:] if re.search(f"row 1{cure}", line)]
    assert lines
    assert "row 0" not in message
    assert "row 2" not in message


@pytest.mark.parametrize(
    ("kind", "column"),
    [("prompts", "id"), ("responses", "id"), ("responses", "row"), ("samples", "id"), ("samples", "row")],
)
def test_a_repeated_value_names_both_rows_and_the_column(kind: str, column: str):
    first = rows(kind)[0][column]
    message = complaint(kind, rows(kind, **{column: first}))
    assert f"row 0, {column}: " in message
    assert f"row 1, {column}: " in message


@pytest.mark.parametrize(
    ("kind", "column"), [("prompts", "messages"), ("responses", "finish_reason"), ("samples", "loss_mask")]
)
def test_a_missing_column_is_named(kind: str, column: str):
    frame = pd.DataFrame(rows(kind)).drop(columns=column)
    assert column in complaint(kind, frame)


@pytest.mark.parametrize("column", ["token_ids", "prompt_token_ids", "finish_reason"])
def test_a_null_is_named(column: str):
    assert f"row 1, {column}: " in complaint("responses", rows("responses", **{column: None}))


def test_a_prompt_may_name_its_conversation_or_not():
    tables.check(pd.DataFrame(rows("prompts", conversation="x")), tables.PROMPTS, FILE)


def test_all_failures_of_the_prompts_are_in_one_message():
    made = rows("prompts", messages=[], license="MIT")
    made[2]["id"] = made[0]["id"]
    message = complaint("prompts", made)
    assert message.startswith(f"{FILE}: 4 check(s) failed:")
    for line in ("row 0, id", "row 1, license", "row 1, messages", "row 2, id"):
        assert f"  {line}: " in message


def test_rows_are_numbered_by_the_tables_index():
    frame = pd.DataFrame(rows("samples", prompt_length=0, loss_mask=[True] * 4))
    assert "row 5001, prompt_length" in complaint("samples", frame.set_index(frame.index + 5000))


def test_the_first_of_many_failing_rows_are_shown():
    made = [{**row, "token_ids": [100, 2]} for row in rows("responses", count=20)]
    lines = complaint("responses", made).splitlines()
    assert lines[0] == f"{FILE}: 20 check(s) failed:"
    shown = [line.split(",")[0].strip() for line in lines[1:]]
    assert shown == [*(f"row {n}" for n in range(tables.SHOWN)), "and 15 more"]


@pytest.mark.parametrize(
    ("kind", "change"), [("responses", {"token_ids": [2, 7]}), ("samples", {"loss_mask": [True] * 4})]
)
def test_one_broken_rule_in_one_row_counts_once(kind: str, change: dict):
    assert complaint(kind, rows(kind, **change)).startswith(f"{FILE}: 1 check(s) failed")


def test_an_empty_response_is_reported_with_its_row_alone():
    assert "row ?" not in complaint("responses", rows("responses", token_ids=[]))


def answers(**changes_of_the_second) -> pd.DataFrame:
    """Three served answers, a row each."""
    good = {"prompt_token_ids": [1, 5], "token_ids": [7, 8, 9], "finish_reason": "length", "per_step_accepted": [1, 0]}
    made = [{"row": n, **good, "time_per_output_token_ms": 20.5} for n in range(3)]
    made[1].update(changes_of_the_second)
    return pd.DataFrame(made)


def test_answers_with_rounds_of_at_most_k_pass_and_the_baselines_have_none():
    tables.check(answers(), tables.answers(VOCABULARY, k=1), FILE)
    baseline = answers().assign(per_step_accepted=[[]] * 3)
    tables.check(baseline, tables.answers(VOCABULARY, k=0), FILE)


@pytest.mark.parametrize(
    ("change", "k", "cure"),
    [
        ({"per_step_accepted": [2, 0]}, 1, "row 1, per_step_accepted: each round accepts 0 to 1 drafted tokens"),
        ({"per_step_accepted": [-1]}, 1, "row 1, per_step_accepted: each round accepts"),
        ({"per_step_accepted": [0]}, 0, "row 1, per_step_accepted: .* without a drafter there is none"),
        ({"token_ids": [100]}, 1, f"row 1, token_ids: {re.escape(IDS)}"),
        ({"finish_reason": "abort"}, 1, "row 1, finish_reason: finish reason must be one of"),
        ({"time_per_output_token_ms": -1.0}, 1, "row 1, time_per_output_token_ms: a time must be above 0"),
        ({"time_per_output_token_ms": None}, 1, "row 1: an answer has a time per output token if, and only if"),
        ({"token_ids": [7]}, 1, "row 1: an answer has a time per output token if, and only if"),
        ({"extra": 1}, 1, "extra"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_faulty_answer_is_named(change: dict, k: int, cure: str):
    with pytest.raises(UserError, match=cure):
        tables.check(answers(**change), tables.answers(VOCABULARY, k), FILE)


def test_answers_of_one_token_have_no_time_per_token():
    one = answers().assign(token_ids=[[7]] * 3, time_per_output_token_ms=[None] * 3)
    tables.check(one, tables.answers(VOCABULARY, k=1), FILE)


def level(**changes) -> dict:
    """Measurements of two answers of five tokens each: one chunk at concurrency 8, two at 1."""
    measured = {
        "seconds": 2.0,
        "tokens": 10,
        "tokens_per_second": 5.0,
        "chunks": [[2.0, 10]],
        "time_per_output_token_ms": {"p50": 20.0, "p99": 20.0},
        "answers": [{"token_ids": [1] * 5, "time_per_output_token_ms": 20.0}] * 2,
    }
    return measured | changes


def sets(**changes) -> dict:
    """Measurements of two sets; `changes` are of one at concurrency 8."""
    slow = level(chunks=[[1.0, 5], [1.0, 5]])
    return {"heldout": {"1": slow, "8": level()}, "humaneval": {"1": slow, "8": level(**changes)}}


def test_levels_whose_speed_is_tokens_over_seconds_pass():
    tables.check(speed.levels(sets()), tables.LEVELS, FILE)


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (
            {"seconds": -2.0, "tokens_per_second": -5.0, "chunks": [[-2.0, 10]]},
            "row humaneval at concurrency 8, seconds: seconds must be above 0",
        ),
        ({"tokens_per_second": 6.0}, "row humaneval at concurrency 8: tokens_per_second must be tokens / seconds"),
        ({"tokens": 11, "tokens_per_second": 5.5}, "row humaneval at concurrency 8: tokens must be those of the answe"),
        ({"chunks": [[2.0, 9]]}, "row humaneval at concurrency 8: tokens must be those of the chunks"),
        ({"chunks": [[1.0, 10]]}, "row humaneval at concurrency 8: seconds must be those of the chunks"),
        ({"chunks": [[1.0, 5], [1.0, 5]]}, "row humaneval at concurrency 8: a chunk holds as many prompts as"),
        ({"time_per_output_token_ms": {"p50": 9.0, "p99": 20.0}}, "times per output token must be those of the"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_faulty_level_is_named(change: dict, cure: str):
    with pytest.raises(UserError, match=cure):
        tables.check(speed.levels(sets(**change)), tables.LEVELS, FILE)


LOG = {
    "kind": "train",
    "epoch": 0,
    "loss": 2.5,
    "loss_0": 1.0,
    "full_acc_0": 0.5,
    "cond_acc_0": 0.5,
    "error_records": 0.0,
}


def log_rows(**changes_of_the_second) -> pd.DataFrame:
    made = [{**LOG, "step": step, "learning_rate": 1e-3} for step in range(3)]
    made[1].update(changes_of_the_second)
    made.append({**LOG, "kind": "heldout", "step": 3})  # a validation has no learning rate
    made.append({"kind": "replay", "epoch": 0, "step": 3, "tau": 1.5, "rows": 16})
    return pd.DataFrame(made)


@pytest.mark.parametrize("change", [{}, {"loss": float("nan")}], ids=["good", "a loss that is left to the gate"])
def test_a_training_log_passes(change: dict):
    tables.check(log_rows(**change), tables.TRAINING_LOG, FILE)


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"kind": "other"}, "row 1, kind: must be train, heldout or replay"),
        ({"full_acc_0": 1.5}, "row 1, full_acc_0: a share"),
        ({"error_records": 1.0}, "row 1, error_records: samples were skipped while training; train again"),
        ({"speed": 3.0}, "speed"),
    ],
)
def test_a_fault_of_a_training_log_is_named(change: dict, cure: str):
    with pytest.raises(UserError, match=re.escape(cure)):
        tables.check(log_rows(**change), tables.TRAINING_LOG, FILE)
