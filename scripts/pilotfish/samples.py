# SPDX-License-Identifier: Apache-2.0
"""Samples: a response's exact token ids behind its prompt's, with the generated span as loss mask."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import datasets
import numpy as np

from pilotfish import files

FEATURES = datasets.Features(
    {
        "row": datasets.Value("int64"),
        "id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int64")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "prompt_length": datasets.Value("int64"),
        "seq_len": datasets.Value("int64"),
        "finish_reason": datasets.Value("string"),
    }
)


def sample_of(response: dict) -> dict:
    """Prompt ids then response ids, byte for byte; `loss_mask` is True on each generated token.

    `seq_len` counts the tokens that have hidden states: all but the very last.
    """
    prompt, generated = response["prompt_token_ids"], response["token_ids"]
    return {
        "row": response["row"],
        "id": response["id"],
        "input_ids": prompt + generated,
        "loss_mask": [False] * len(prompt) + [True] * len(generated),
        "prompt_length": len(prompt),
        "seq_len": len(prompt) + len(generated) - 1,
        "finish_reason": response["finish_reason"],
    }


def kept_rows(responses: Sequence[Path], left_out: Path) -> Iterator[dict]:
    """The responses of all parts, in order, without those that their gate left out."""
    excluded = {row["row"] for row in files.iterate_jsonl(left_out)}
    for path in responses:
        for response in files.iterate_jsonl(path):
            if response["row"] not in excluded:
                yield response


def write(samples: Iterable[dict], arrow: Path) -> int:
    """Write samples into one Arrow file, in their order; returns their number."""
    with files.replacing(arrow) as temporary:
        writer = datasets.arrow_writer.ArrowWriter(features=FEATURES, path=str(temporary))
        count = 0
        for sample in samples:
            writer.write(sample)
            count += 1
        writer.finalize()
        writer.close()
    return count


def assemble(responses: Sequence[Path], left_out: Path, arrow: Path) -> int:
    """Write the samples of all parts that their gate kept, in row order; returns their number."""
    return write((sample_of(response) for response in kept_rows(responses, left_out)), arrow)


def load(arrow: Path) -> datasets.Dataset:
    """The samples, memory-mapped: nothing is read before it is asked for."""
    return datasets.Dataset.from_file(str(arrow))


Mask = TypeVar("Mask")  # a numpy array or a torch tensor of bool


def serving_mask(loss_mask: Mask) -> Mask:
    """Which positions a drafter is trained on, [T] -> [T-1]: entry j is m[j] and m[j+1].

    Serving uses slot t if x[t+1] and x[t+2] are both generated; speculators trains slot t under entry
    t + 1 of the mask it is given (it drops the first entry), so entry t + 1 is m[t+1] & m[t+2].
    """
    return loss_mask[:-1] & loss_mask[1:]


def trained_pairs(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Positions (input, label) that training supervises at its first step, by enumeration of the mask."""
    mask = serving_mask(np.asarray(loss_mask, dtype=bool))
    # speculators drops entry 0, whose token no slot takes as input.
    return [(int(j), int(j) + 1) for j in np.flatnonzero(mask) if j > 0]


def served_pairs(prompt_length: int, tokens: int) -> list[tuple[int, int]]:
    """Positions (input, label) that serving uses: each generated token drafts the generated one after it."""
    return [(position, position + 1) for position in range(prompt_length, tokens - 1)]
