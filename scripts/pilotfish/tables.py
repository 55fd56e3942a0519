# SPDX-License-Identifier: Apache-2.0
"""pandera schemas of the tables that gates check, and errors that name the file, the row and the cure."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors

from pilotfish import prompts
from pilotfish.errors import UserError

FINISH_REASONS = ("stop", "length")
SHOWN = 5  # failures listed in an error
CURES = {  # pandera's own names for what it checks
    "field_uniqueness": "repeats another row's value, and must not",
    "not_nullable": "must not be null",
}


def _each(test: Callable[[object], bool], cure: str) -> pa.Check:
    return pa.Check(test, element_wise=True, error=cure)


def _ids_within(vocab_size: int) -> pa.Check:
    return _each(
        lambda ids: len(ids) > 0 and min(ids) >= 0 and max(ids) < vocab_size,
        f"token ids must be some, and lie in 0..{vocab_size - 1}: was another model's tokenizer used?",
    )


PROMPTS = pa.DataFrameSchema(
    {
        "id": pa.Column(str, unique=True),
        "messages": pa.Column(
            object,
            _each(
                lambda messages: prompts.fault({"id": "x", "messages": messages}) is None,
                "turns must alternate user and assistant, end with the user, and none be empty",
            ),
        ),
    },
    strict="filter",
)


def responses(vocab_size: int, end_token_ids: list[int]) -> pa.DataFrameSchema:
    """Schema of the responses that came back (rows whose `error` is null)."""
    return pa.DataFrameSchema(
        {
            "row": pa.Column(int, unique=True),
            "id": pa.Column(str, unique=True),
            "prompt_token_ids": pa.Column(object, _ids_within(vocab_size)),
            "token_ids": pa.Column(object, _ids_within(vocab_size)),
            "finish_reason": pa.Column(
                str, pa.Check.isin(FINISH_REASONS, error=f"finish reason must be one of {FINISH_REASONS}")
            ),
        },
        checks=pa.Check(
            lambda frame: pd.Series(
                [
                    reason != "stop" or not ids or ids[-1] in end_token_ids
                    for reason, ids in zip(frame["finish_reason"], frame["token_ids"], strict=True)
                ],
                index=frame.index,
            ),
            error=f"a response that stopped must end with one of the end tokens {end_token_ids}",
        ),
        strict="filter",
    )


def samples(vocab_size: int) -> pa.DataFrameSchema:
    """Schema of samples: ids, loss mask of the same length, 1 on the response and nowhere else."""

    def span(frame: pd.DataFrame) -> pd.Series:
        good = [
            len(mask) == len(ids) and list(mask) == [False] * start + [True] * (len(ids) - start)
            for ids, mask, start in zip(frame["input_ids"], frame["loss_mask"], frame["prompt_length"], strict=True)
        ]
        return pd.Series(good, index=frame.index)

    return pa.DataFrameSchema(
        {
            "row": pa.Column(int, unique=True),
            "id": pa.Column(str, unique=True),
            "input_ids": pa.Column(object, _ids_within(vocab_size)),
            "loss_mask": pa.Column(object, _each(any, "the loss mask must not be all zero")),
            "prompt_length": pa.Column(int, pa.Check.gt(0, error="a sample needs a prompt")),
        },
        checks=pa.Check(span, error="the loss mask must be 1 exactly on the response's tokens"),
        strict="filter",
    )


def check(frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path) -> None:
    """Validate every row; UserError with the file, the first failing rows (by the frame's index) and the cure."""
    if missing := [name for name in schema.columns if name not in frame.columns]:
        raise UserError(f"{path}: every row lacks {', '.join(missing)}; delete the file and run again")
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        cases = error.failure_cases
        found = {
            (
                case["index"],
                case["column"] if case["schema_context"] == "Column" else "",
                CURES.get(case["check"], case["check"]),
            )
            for case in cases.to_dict("records")
        }
        ordered = sorted(found, key=lambda case: (pd.isna(case[0]), case))
        lines = [f"  row {row}{f', {column}' if column else ''}: {cure}" for row, column, cure in ordered[:SHOWN]]
        more = f"\n  and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
        raise UserError(f"{path}: {len(ordered)} check(s) failed:\n" + "\n".join(lines) + more) from None
