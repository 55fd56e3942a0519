# SPDX-License-Identifier: Apache-2.0
"""Rows of prompts from a file (JSON lines, one JSON list, both in gzip or zstd too, or Parquet) or from the hub."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pilotfish import files, formats
from pilotfish.errors import UserError

HUB = "hub:"  # before a Hugging Face dataset's id
PARQUET = ".parquet"
LIST = ".json"
LONGEST_LIST = 1 << 30  # bytes of a file that is one JSON list, which is read whole
SHOWN = 20  # fields of a row in an error
BATCH = 1000  # rows of Parquet held at a time


def prompts(setting: str, spec: Mapping) -> Iterator[tuple[str, dict]]:
    """Each row of a source as a prompt, with words for its place: file and number from 1, or dataset and row from 0.

    `spec` holds the settings of the source that `setting` names. Raises UserError where a row cannot be read.
    """
    source, field = spec["source"], spec["field"]
    if source.startswith(HUB):
        found = ((f"{source}, {spec['split']}, row {n}", row, n) for n, row in enumerate(_streamed(setting, spec)))
    else:
        path = Path(source)
        unit = "row" if path.suffix == PARQUET or files.plain_suffix(path) == LIST else "line"
        found = ((f"{path}, {unit} {n}", row, n) for n, row in enumerate(rows(path), 1))
    for place, row, number in found:
        prompt = _from_field(setting, place, row, field, number) if field else formats.prompt_of(row, number)
        # What a dataset of the hub calls its rows need not be unique.
        yield place, {**prompt, "id": number} if source.startswith(HUB) else prompt


def cure(setting: str, spec: Mapping) -> str:
    """What to do about a row of a source that is no prompt."""
    if spec["field"]:
        return f"{setting}.field must name the prompt's text or its messages"
    return (
        'each row needs {"id": ..., "messages": [{"role": "user", "content": "..."}]}, or another shape that the '
        f"README names; or name the prompt's column with {setting}.field"
    )


def _from_field(setting: str, place: str, row: dict, field: str, number: int) -> dict:
    """A prompt whose text, or whose messages, stand in a field of the row."""
    if field not in row:
        named = ", ".join(sorted(row)[:SHOWN]) or "none"
        raise UserError(f"{place}: no field {field!r} among {named[:1000]}; mend {setting}.field")
    return formats.prompt(formats.asked(row[field]), row, number)


def _streamed(setting: str, spec: Mapping) -> Iterable[dict]:
    """Rows of a hub's dataset at a commit, fetched as they are needed."""
    from datasets import load_dataset

    try:
        yield from load_dataset(
            spec["source"].removeprefix(HUB),
            spec["config"],
            split=spec["split"],
            revision=spec["revision"],
            streaming=True,
        )
    except Exception as error:
        raise UserError(
            f"{setting}: the hub did not give {spec['source']} ({type(error).__name__}: {error}); check its name, "
            "config, split and revision, HF_TOKEN and the network"
        ) from None


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
