# SPDX-License-Identifier: Apache-2.0
"""Samples: a response's exact token ids behind its prompt's, with the generated span as loss mask."""

from collections.abc import Iterator
from pathlib import Path

import datasets

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


def _rows(paths: list[str]) -> Iterator[dict]:
    for path in paths:
        for response in files.read_jsonl(Path(path)):
            if response["error"] is None:
                yield sample_of(response)


def assemble(responses: list[Path], arrow: Path) -> int:
    """Write the samples of all parts into one Arrow file, in row order; returns their number."""
    with files.replacing(arrow) as temporary:
        writer = datasets.arrow_writer.ArrowWriter(features=FEATURES, path=str(temporary))
        count = 0
        for sample in _rows([str(path) for path in responses]):
            writer.write(sample)
            count += 1
        writer.finalize()
        writer.close()
    return count


def load(arrow: Path) -> datasets.Dataset:
    """The samples, memory-mapped: nothing is read before it is asked for."""
    return datasets.Dataset.from_file(str(arrow))
