# SPDX-License-Identifier: Apache-2.0
"""Each fault in a table is an error with the file, the row and what must hold."""

import re
from pathlib import Path

import pandas as pd
import pytest

from pilotfish import tables
from pilotfish.errors import UserError

FILE = Path("results/run/table.jsonl")
VOCABULARY, END = 100, [2, 3]
RESPONSE = {"prompt_token_ids": [1, 5], "token_ids": [7, 99, 2], "finish_reason": "stop"}
SAMPLE = {"input_ids": [1, 5, 7, 2], "loss_mask": [False, False, True, True], "prompt_length": 2}
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
    made = [{"row": n, "id": f"id-{n}", **GOOD[kind][1]} for n in range(count)]
    made[1].update(changes_of_the_second)
    return made


def complaint(kind: str, found: list[dict] | pd.DataFrame) -> str:
    with pytest.raises(UserError) as error:
        tables.check(pd.DataFrame(found), GOOD[kind][0], FILE)
    return str(error.value)


@pytest.mark.parametrize("kind", GOOD)
def test_good_rows_pass_and_further_columns_do_not_matter(kind: str):
    tables.check(pd.DataFrame(rows(kind, extra={"a": 1})), GOOD[kind][0], FILE)


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
