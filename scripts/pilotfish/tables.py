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
    "column_in_schema": "is no column of this table; delete the file and run again, or take it out",
}


def _each(test: Callable[[object], bool], cure: str) -> pa.Check:
    return pa.Check(test, element_wise=True, error=cure)


def _ids_within(vocab_size: int) -> pa.Check:
    return _each(
        lambda ids: len(ids) > 0 and min(ids) >= 0 and max(ids) < vocab_size,
        f"token ids must be some, and lie in 0..{vocab_size - 1}: was another model's tokenizer used?",
    )


_TEXT_OR_NULL = _each(lambda value: isinstance(value, str), "must be text or null")

_OBJECT_OR_NULL = _each(lambda value: isinstance(value, dict), "must be a message or null")

_LIST_OR_NULL = _each(lambda value: isinstance(value, list), "must be a list of tools or null")

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
        "answer": pa.Column(object, _OBJECT_OR_NULL, nullable=True, required=False),
        "conversation": pa.Column(object, _TEXT_OR_NULL, nullable=True, required=False),
        "tools": pa.Column(object, _LIST_OR_NULL, nullable=True, required=False),
    },
    strict=True,
)


def responses(vocab_size: int, end_token_ids: list[int]) -> pa.DataFrameSchema:
    """Schema of the responses that came back (rows whose `error` is null)."""
    return pa.DataFrameSchema(
        {
            "row": pa.Column(int, unique=True),
            "id": pa.Column(str, unique=True),
            "prompt_token_ids": pa.Column(object, _ids_within(vocab_size)),
            "token_ids": pa.Column(object, _ids_within(vocab_size)),
            "text": pa.Column(object, _TEXT_OR_NULL, nullable=True),
            "reasoning": pa.Column(object, _TEXT_OR_NULL, nullable=True),
            "finish_reason": pa.Column(
                str, pa.Check.isin(FINISH_REASONS, error=f"finish reason must be one of {FINISH_REASONS}")
            ),
            "sampling": pa.Column(object),
            "error": pa.Column(object, nullable=True),
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
        strict=True,
    )


# Losses and accuracies of each training-time-test step are columns of their own. NaN is for the drafter's gate to say.
TRAINING_LOG = pa.DataFrameSchema(
    {
        "kind": pa.Column(str, pa.Check.isin(("train", "heldout", "replay"), error="must be train, heldout or replay")),
        "epoch": pa.Column(int, pa.Check.ge(0, error="an epoch is 0 or more")),
        "step": pa.Column(int, pa.Check.ge(0, error="a step is 0 or more")),
        "loss": pa.Column(float, nullable=True),
        "learning_rate": pa.Column(float, pa.Check.ge(0, error="a learning rate is 0 or more"), nullable=True),
        "error_records": pa.Column(
            float, pa.Check.eq(0, error="samples were skipped while training; train again"), nullable=True
        ),
        r"loss_\d+": pa.Column(float, nullable=True, regex=True, required=False),
        "tau": pa.Column(float, pa.Check.ge(1, error="tau is 1 or more"), nullable=True),
        "rows": pa.Column(float, pa.Check.ge(1, error="a replay has rows"), nullable=True),
        r"(full|cond)_acc_\d+": pa.Column(float, pa.Check.in_range(0, 1, error="a share"), nullable=True, regex=True),
    },
    strict=True,
)

REFUSED = pa.DataFrameSchema(
    {
        "row": pa.Column(int, unique=True),
        "id": pa.Column(str, unique=True),
        "error": pa.Column(str, _each(lambda error: bool(error.strip()), "a refused row needs its reason")),
        **{
            name: pa.Column(object, _each(lambda _: False, "a refused row holds no answer"), nullable=True)
            for name in ("prompt_token_ids", "token_ids", "text", "reasoning", "finish_reason", "sampling")
        },
    },
    strict=True,
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
            "seq_len": pa.Column(int, pa.Check.gt(0, error="a sample needs two tokens")),
            "finish_reason": pa.Column(str, pa.Check.isin(FINISH_REASONS)),
        },
        checks=[
            pa.Check(span, error="the loss mask must be 1 exactly on the response's tokens"),
            pa.Check(
                lambda frame: frame["seq_len"] == frame["input_ids"].map(len) - 1,
                error="seq_len must be the tokens that have states: all but the last",
            ),
        ],
        strict=True,
    )


def _failure(case: dict, frame: pd.DataFrame) -> tuple[object, str, str]:
    """Row, column (or "") and cure of one of pandera's failure cases; an unknown column's row is its first."""
    if case["check"] == "column_in_schema":
        unknown = case["failure_case"]
        return frame[unknown].first_valid_index(), unknown, CURES[case["check"]]
    column = case["column"] if case["schema_context"] == "Column" else ""
    return case["index"], column, CURES.get(case["check"], case["check"])


def answers(vocab_size: int, k: int) -> pa.DataFrameSchema:
    """Schema of served answers, of one concurrency: the rounds of each accept at most k drafted tokens.

    Without a drafter k is 0, and there is no round.
    """
    steps = _each(
        lambda steps: all(isinstance(n, int) and 0 <= n <= k for n in steps) and (k > 0 or not steps),
        f"each round accepts 0 to {k} drafted tokens, and without a drafter there is none; serve again",
    )
    return pa.DataFrameSchema(
        {
            "row": pa.Column(int, unique=True),
            "prompt_token_ids": pa.Column(object, _ids_within(vocab_size)),
            "token_ids": pa.Column(object, _ids_within(vocab_size)),
            "finish_reason": pa.Column(
                str, pa.Check.isin(FINISH_REASONS, error=f"finish reason must be one of {FINISH_REASONS}")
            ),
            "per_step_accepted": pa.Column(object, steps),
            "time_per_output_token_ms": pa.Column(
                float, pa.Check.gt(0, error="a time must be above 0; serve again"), nullable=True, coerce=True
            ),
        },
        checks=pa.Check(
            lambda frame: frame["time_per_output_token_ms"].notna() == (frame["token_ids"].map(len) > 1),
            error="an answer has a time per output token if, and only if, it has two tokens; serve again",
        ),
        strict=True,
    )


SPEED_ROUNDING = 0.01  # tokens/s and seconds are stored to three and four decimals


def _equal(left: str, right: str, cure: str) -> pa.Check:
    return pa.Check(lambda frame: frame[left] == frame[right], error=f"{cure}; serve again")


LEVELS = pa.DataFrameSchema(
    {
        "level": pa.Column(int, pa.Check.gt(0, error="a concurrency is 1 or more; serve again")),
        "seconds": pa.Column(float, pa.Check.gt(0, error="seconds must be above 0; serve again")),
        "tokens": pa.Column(int),
        "tokens_per_second": pa.Column(float),
        "chunks": pa.Column(int),
        "chunks_due": pa.Column(int),
        "seconds_of_chunks": pa.Column(float),
        "shortest_chunk": pa.Column(float, pa.Check.gt(0, error="each chunk takes time; serve again")),
        "tokens_of_chunks": pa.Column(int),
        "tokens_of_answers": pa.Column(int),
        "times_per_token": pa.Column(object),
        "times_of_answers": pa.Column(object),
    },
    checks=[
        _equal("tokens", "tokens_of_answers", "tokens must be those of the answers"),
        _equal("tokens", "tokens_of_chunks", "tokens must be those of the chunks"),
        _equal("chunks", "chunks_due", "a chunk holds as many prompts as are asked at once"),
        _equal("times_per_token", "times_of_answers", "times per output token must be those of the answers"),
        pa.Check(
            lambda frame: (frame["seconds_of_chunks"] / frame["seconds"] - 1).abs() < SPEED_ROUNDING,
            error="seconds must be those of the chunks; serve again",
        ),
        pa.Check(
            lambda frame: (frame["tokens_per_second"] * frame["seconds"] / frame["tokens"] - 1).abs() < SPEED_ROUNDING,
            error="tokens_per_second must be tokens / seconds; serve again",
        ),
    ],
    strict=True,
)


def check(frame: pd.DataFrame, schema: pa.DataFrameSchema, path: Path) -> None:
    """Validate every row; UserError with the file, the first failing rows (by the frame's index) and the cure."""
    needed = [name for name, column in schema.columns.items() if column.required and not column.regex]
    if missing := [name for name in needed if name not in frame.columns]:
        raise UserError(f"{path}: every row lacks {', '.join(missing)}; delete the file and run again")
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as error:
        cases = error.failure_cases
        found = {_failure(case, frame) for case in cases.to_dict("records")}
        ordered = sorted(found, key=lambda case: (pd.isna(case[0]), case))
        lines = [f"  row {row}{f', {column}' if column else ''}: {cure}" for row, column, cure in ordered[:SHOWN]]
        more = f"\n  and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
        raise UserError(f"{path}: {len(ordered)} check(s) failed:\n" + "\n".join(lines) + more) from None
