# SPDX-License-Identifier: Apache-2.0
"""Samples carry the response's own token ids, and come back from disk as they went."""

from pathlib import Path

import numpy as np
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


def assemble(folder: Path, *parts: list[dict], left_out: tuple[int, ...] = ()) -> int:
    """Assemble the samples of parts, in a folder, without the rows that a gate left out."""
    paths = [folder / f"part{number}.jsonl" for number in range(len(parts))]
    for path, rows in zip(paths, parts, strict=True):
        files.write_jsonl(path, rows)
    files.write_jsonl(folder / "left_out.jsonl", [{"row": row, "id": f"id-{row}", "reason": "x"} for row in left_out])
    return samples.assemble(paths, folder / "left_out.jsonl", folder / "samples.arrow")


def test_the_mask_is_true_exactly_on_what_was_generated():
    made = samples.sample_of(response(4, prompt=3, generated=2))
    assert made["input_ids"] == [10, 11, 12, 50, 51]
    assert made["loss_mask"] == [False, False, False, True, True]
    assert (made["row"], made["id"], made["prompt_length"]) == (4, "id-4", 3)


def test_the_last_token_has_no_hidden_state():
    assert samples.sample_of(response(0, prompt=3, generated=2))["seq_len"] == 4


def test_samples_of_all_parts_come_back_in_order(tmp_path: Path):
    parts = [[response(0), response(1, prompt=1, generated=7)], [response(2, prompt=5, generated=1)]]
    assert assemble(tmp_path, *parts) == 3
    found = samples.load(tmp_path / "samples.arrow")
    assert found.to_list() == [samples.sample_of(row) for rows in parts for row in rows]
    assert found.features == samples.FEATURES


def test_rows_left_out_are_no_samples_and_the_rest_keep_their_row_numbers(tmp_path: Path):
    assert assemble(tmp_path, [response(0), response(1, error="too long"), response(2)], left_out=(1,)) == 2
    assert list(samples.load(tmp_path / "samples.arrow")["row"]) == [0, 2]


def test_loading_reads_nothing_until_it_is_asked_for(tmp_path: Path):
    assemble(tmp_path, [response(row, generated=2000) for row in range(100)])
    arrow = tmp_path / "samples.arrow"
    before = pyarrow.total_allocated_bytes()
    found = samples.load(arrow)
    assert pyarrow.total_allocated_bytes() - before < arrow.stat().st_size / 10
    assert found[99]["input_ids"][-1] == 50 + 1999


def test_the_same_responses_give_the_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assemble(tmp_path / name, [response(row) for row in range(5)])
    assert (tmp_path / "a" / "samples.arrow").read_bytes() == (tmp_path / "b" / "samples.arrow").read_bytes()


def test_a_broken_part_leaves_no_samples_behind(tmp_path: Path):
    files.write_jsonl(tmp_path / "good.jsonl", [response(0)])
    files.write_jsonl(tmp_path / "left_out.jsonl", [])
    (tmp_path / "broken.jsonl").write_text('{"row": 1', encoding="utf-8")
    parts = [tmp_path / "good.jsonl", tmp_path / "broken.jsonl"]
    with pytest.raises(UserError, match=r"broken\.jsonl, line 1"):
        samples.assemble(parts, tmp_path / "left_out.jsonl", tmp_path / "samples.arrow")
    assert not list(tmp_path.glob("*samples*"))


@pytest.mark.parametrize(("prompt", "generated"), [(1, 1), (1, 2), (3, 5)])
def test_what_training_supervises_is_what_serving_uses(prompt: int, generated: int):
    made = samples.sample_of(response(0, prompt, generated))
    pairs = samples.served_pairs(prompt, prompt + generated)
    assert samples.trained_pairs(made["loss_mask"]) == pairs
    assert len(pairs) == generated - 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_supervises_other_pairs(shift: int):
    mask = np.roll(samples.sample_of(response(0, 4, 6))["loss_mask"], shift)
    assert samples.trained_pairs(mask) != samples.served_pairs(4, 10)
