# SPDX-License-Identifier: Apache-2.0
"""Rows of a file of prompts: JSON lines, one JSON list (both in gzip or zstd too), or Parquet."""

import json
from collections.abc import Iterator
from pathlib import Path

from pilotfish import files, formats
from pilotfish.errors import UserError

PARQUET = ".parquet"
LIST = ".json"
LONGEST_LIST = 1 << 30  # bytes of a file that is one JSON list, which is read whole
BATCH = 1000  # rows of Parquet held at a time


def prompts(path: Path) -> Iterator[tuple[str, dict]]:
    """Each row as a prompt (`formats.prompt_of`), with words for its place.

    Raises UserError, naming file, row and cure, where a row cannot be read.
    """
    unit = "row" if path.suffix == PARQUET or files.plain_suffix(path) == LIST else "line"
    for number, row in enumerate(rows(path), 1):
        yield f"{path}, {unit} {number}", formats.prompt_of(row, number)


def rows(path: Path) -> Iterator[dict]:
    """Each row of a file, one at a time; of one JSON list all are held."""
    if path.suffix == PARQUET:
        yield from _of_parquet(path)
    elif files.plain_suffix(path) == LIST:
        yield from _of_list(path)
    else:
        yield from files.iterate_jsonl(path, finite=True)


def _of_parquet(path: Path) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: no readable Parquet ({error}); copy the whole file again") from None


def _of_list(path: Path) -> Iterator[dict]:
    with files.reading(path) as handle:
        content = handle.read(LONGEST_LIST + 1)
    if len(content) > LONGEST_LIST:
        raise UserError(f"{path}: one JSON list of more than {LONGEST_LIST:,} bytes; write one object a line (.jsonl)")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not one JSON list ({error}); mend it, or name a file of one object a line .jsonl"
        ) from None
    if not isinstance(found, list):
        raise UserError(f"{path}: a JSON {type(found).__name__}, not a list of rows; write one object a line (.jsonl)")
    for number, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: a JSON {type(row).__name__}, not an object; mend or remove it")
        if fault := files.row_fault(row):
            raise UserError(f"{path}, row {number}: {fault}")
        yield row
