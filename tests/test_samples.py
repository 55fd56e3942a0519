# SPDX-License-Identifier: Apache-2.0
"""Samples carry the response's own token ids, and come back from disk as they went."""

from pathlib import Path

import pyarrow
import pytest

from pilotfish import files, samples
from pilotfish.errors import UserError


def response(row: int, prompt: int = 2, generated: int = 3, error: str | None = None) -> dict:
    return {
        "row": row,
        "id": f"id-{row}",
        "prompt_token_ids": list(range(10, 10 + prompt)),
        "token_ids": None if error else list(range(50, 50 + generated)),
        "finish_reason": "stop",
        "error": error,
    }


def test_the_mask_is_true_exactly_on_what_was_generated():
    made = samples.sample_of(response(4, prompt=3, generated=2))
    assert made["input_ids"] == [10, 11, 12, 50, 51]
    assert made["loss_mask"] == [False, False, False, True, True]
    assert (made["row"], made["id"], made["prompt_length"]) == (4, "id-4", 3)


def test_the_last_token_has_no_hidden_state():
    assert samples.sample_of(response(0, prompt=3, generated=2))["seq_len"] == 4


def test_samples_of_all_parts_come_back_in_order(tmp_path: Path):
    parts = [[response(0), response(1, prompt=1, generated=7)], [response(2, prompt=5, generated=1)]]
    paths = [tmp_path / f"part{number}.jsonl" for number in range(2)]
    for path, rows in zip(paths, parts, strict=True):
        files.write_jsonl(path, rows)
    assert samples.assemble(paths, tmp_path / "samples.arrow") == 3
    found = samples.load(tmp_path / "samples.arrow")
    assert found.to_list() == [samples.sample_of(row) for rows in parts for row in rows]
    assert found.features == samples.FEATURES


def test_refused_rows_are_no_samples_and_the_rest_keep_their_row_numbers(tmp_path: Path):
    files.write_jsonl(tmp_path / "r.jsonl", [response(0), response(1, error="too long"), response(2)])
    assert samples.assemble([tmp_path / "r.jsonl"], tmp_path / "samples.arrow") == 2
    assert list(samples.load(tmp_path / "samples.arrow")["row"]) == [0, 2]


def test_loading_reads_nothing_until_it_is_asked_for(tmp_path: Path):
    files.write_jsonl(tmp_path / "r.jsonl", [response(row, generated=2000) for row in range(100)])
    arrow = tmp_path / "samples.arrow"
    samples.assemble([tmp_path / "r.jsonl"], arrow)
    before = pyarrow.total_allocated_bytes()
    found = samples.load(arrow)
    assert pyarrow.total_allocated_bytes() - before < arrow.stat().st_size / 10
    assert found[99]["input_ids"][-1] == 50 + 1999


def test_the_same_responses_give_the_same_bytes(tmp_path: Path):
    files.write_jsonl(tmp_path / "r.jsonl", [response(row) for row in range(5)])
    for name in ("a", "b"):
        samples.assemble([tmp_path / "r.jsonl"], tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_broken_part_leaves_no_samples_behind(tmp_path: Path):
    files.write_jsonl(tmp_path / "good.jsonl", [response(0)])
    (tmp_path / "broken.jsonl").write_text('{"row": 1', encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.jsonl, line 1"):
        samples.assemble([tmp_path / "good.jsonl", tmp_path / "broken.jsonl"], tmp_path / "samples.arrow")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "good.jsonl"]
