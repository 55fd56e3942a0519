# SPDX-License-Identifier: Apache-2.0
"""Finished rows survive whatever ends a job."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import flip_bit, random_ids, random_states, response
from pilotfish import files, generation, shards
from pilotfish.journal import Journal

LAYERS = [1, 3]
ROWS = range(8, 18)  # shards 8-11, 12-15 and 16-17


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 4)


def answer(row: int) -> dict:
    return response(row, random_ids(3, row), random_ids(2 + row % 4, 50 + row))


def write_states(path: Path, ids: list[int], layers: int = len(LAYERS)) -> None:
    states = random_states(ids, layers, hidden=8)
    save_file({"token_ids": states.token_ids, "hidden_states": states.hidden_states}, path)


def finish(journal: Journal, rows, text: str | None = None) -> None:
    """Do rows as a job does them: the engine writes a states file, then the row is journaled."""
    for row in rows:
        made = answer(row)
        made["text"] = text or made["text"]
        write_states(journal.incoming / f"r{row}", (made["prompt_token_ids"] + made["token_ids"])[:-1])
        journal.finish(made, f"r{row}")


def opened(folder: Path, layers: list[int] = LAYERS) -> Journal:
    return Journal(folder, ROWS, layers)


def indexed_rows(journal: Journal) -> list[int]:
    journal.write_index()
    entries = files.read_json(journal.captured / shards.INDEX)["shards"]
    return [row for entry in entries for row in entry["rows"]]


def test_the_next_job_finds_the_finished_rows(tmp_path: Path):
    finish(opened(tmp_path), [14, 8, 10, 9, 11])
    journal = opened(tmp_path)
    assert journal.rows() == [answer(row) for row in (8, 9, 10, 11, 14)]


def test_when_all_rows_are_finished_only_shards_are_left(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, reversed(ROWS))
    assert list(journal.incoming.iterdir()) == []
    assert journal.rows() == [answer(row) for row in ROWS]
    assert indexed_rows(journal) == list(ROWS)
    assert sorted(path.name for path in journal.captured.iterdir()) == [
        "index.json",
        *(shards.shard_name(*span) for span in [(8, 12), (12, 16), (16, 18)]),
    ]


def test_shards_hold_the_states_of_their_rows(tmp_path: Path):
    finish(opened(tmp_path), range(8, 11))
    journal = opened(tmp_path)
    finish(journal, range(11, 18))
    journal.write_index()
    reader = shards.ShardReader([journal.captured / shards.INDEX])
    for row in ROWS:
        ids = (answer(row)["prompt_token_ids"] + answer(row)["token_ids"])[:-1]
        states = reader.read(row)
        assert states.token_ids.tolist() == ids
        assert torch.equal(states.hidden_states, random_states(ids, 2, 8).hidden_states)


@pytest.mark.parametrize("cut", [lambda line: 1, lambda line: len(line) - 2], ids=["at its start", "at its end"])
def test_a_last_line_cut_short_costs_its_row_alone(tmp_path: Path, cut: Callable[[bytes], int]):
    finish(opened(tmp_path), [8, 9, 10])
    path = tmp_path / "rows.jsonl"
    *before, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + last[: cut(last)])
    assert sorted(opened(tmp_path).done) == [8, 9]


@pytest.mark.parametrize("lost", [1, 20], ids=["the line's end", "half a line"])
def test_what_is_finished_after_a_line_cut_short_is_kept(tmp_path: Path, lost: int):
    finish(opened(tmp_path), [8, 9, 10])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    journal = opened(tmp_path)
    finish(journal, [row for row in (8, 9, 10, 12) if row not in journal.done])
    assert sorted(opened(tmp_path).done) == [8, 9, 10, 12]


def test_any_byte_changed_in_a_line_costs_its_row_alone(tmp_path: Path):
    journal = opened(tmp_path, layers=[])
    for row in (8, 9, 10):
        journal.finish(answer(row), "")
    path = tmp_path / "rows.jsonl"
    sound = path.read_bytes()
    start = sound.index(b"\n") + 1
    for place in range(start, sound.index(b"\n", start)):
        for bit in (1, 2, 16, 64):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ bit]) + sound[place + 1 :])
            assert sorted(opened(tmp_path, layers=[]).done) == [8, 10]


@pytest.mark.parametrize("line", [b"{}", b'{"row": 8}', b"null", b"\xff"], ids=ascii)
def test_a_line_that_no_job_wrote_is_passed_over(tmp_path: Path, line: bytes):
    finish(opened(tmp_path), [8, 9])
    for name in ("rows.jsonl", "shards.jsonl"):
        with open(tmp_path / name, "ab") as handle:
            handle.write(line + b"\n")
    assert sorted(opened(tmp_path).done) == [8, 9]


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x1cb", "a\r\nb"], ids=ascii)
def test_any_text_survives_the_journal(tmp_path: Path, text: str):
    finish(opened(tmp_path), [8], text=text)
    assert [row["text"] for row in opened(tmp_path).rows()] == [text]


def other_ids(path: Path) -> None:
    write_states(path, [1, 2, 3])


def one_layer_less(path: Path) -> None:
    ids = (answer(9)["prompt_token_ids"] + answer(9)["token_ids"])[:-1]
    write_states(path, ids, layers=1)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), other_ids, one_layer_less]
)
def test_a_row_without_whole_states_is_done_again_alone(tmp_path: Path, damage: Callable[[Path], object]):
    finish(opened(tmp_path), [8, 9, 10])
    damage(tmp_path / "incoming" / "r9")
    journal = opened(tmp_path)
    assert sorted(journal.done) == [8, 10]
    finish(journal, [9, 11])
    assert indexed_rows(journal) == [8, 9, 10, 11]


def test_one_flipped_bit_in_a_shard_makes_exactly_its_rows_be_done_again(tmp_path: Path):
    finish(opened(tmp_path), ROWS)
    flip_bit(tmp_path / "captured" / shards.shard_name(12, 16))
    journal = opened(tmp_path)
    assert [row for row in ROWS if row not in journal.done] == [12, 13, 14, 15]
    finish(journal, [12, 13, 14, 15])
    assert indexed_rows(journal) == list(ROWS)
    assert sorted(opened(tmp_path).done) == list(ROWS)


@pytest.mark.parametrize("finished", [range(8, 12), range(8, 11)], ids=["a whole shard", "unfinished shard"])
@pytest.mark.parametrize("layers", [[1, 2], [1, 2, 3]], ids=str)
def test_states_of_other_layers_are_not_believed(tmp_path: Path, finished: range, layers: list[int]):
    finish(opened(tmp_path), finished)
    assert opened(tmp_path, layers).done == {}


def refuse(journal: Journal, row: int) -> None:
    journal.finish(generation.failed_row(row, {"id": f"p{row}"}, "too long"), "")


def test_a_refused_row_is_kept_and_its_shard_is_written_without_it(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, [8, 9, 11])
    refuse(journal, 10)
    assert [(row["row"], row["error"]) for row in journal.rows()] == [
        *[(8, None), (9, None), (10, "too long"), (11, None)]
    ]
    assert indexed_rows(journal) == [8, 9, 11]
    assert list(journal.incoming.iterdir()) == []


def test_the_next_job_tries_refused_rows_again_and_only_them(tmp_path: Path):
    first = opened(tmp_path)
    finish(first, [8, 9, 11])
    refuse(first, 10)
    assert sorted(opened(tmp_path).done) == [8, 9, 11]


def test_a_refused_row_that_is_answered_later_gets_into_a_shard(tmp_path: Path):
    first = opened(tmp_path)
    finish(first, [8, 9, 11])
    refuse(first, 10)
    journal = opened(tmp_path)
    finish(journal, [10])
    journal.pack_all()
    assert sorted(indexed_rows(journal)) == [8, 9, 10, 11]
    assert list(journal.incoming.iterdir()) == []


def test_a_job_that_died_between_a_shard_and_its_journal_loses_no_row(tmp_path: Path, monkeypatch):
    journal = opened(tmp_path)
    finish(journal, [8, 9, 10])
    append = files.append_checked

    def die(path: Path, value: dict) -> None:
        if path.name == "shards.jsonl":
            raise KeyboardInterrupt
        append(path, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "append_checked", die)
        finish(journal, [11])
    journal = opened(tmp_path)
    assert sorted(journal.done) == [8, 9, 10, 11]
    journal.pack_all()
    assert indexed_rows(journal) == [8, 9, 10, 11]


def test_files_that_belong_to_no_finished_row_are_removed(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, [8])
    write_states(journal.incoming / "of-a-request-cut-short", [1, 2])
    assert [path.name for path in opened(tmp_path).incoming.iterdir()] == ["r8"]


def test_without_layers_rows_are_kept_and_no_state_is_asked_for(tmp_path: Path):
    journal = opened(tmp_path, layers=[])
    for row in reversed(ROWS):
        journal.finish(answer(row), "")
    journal.pack_all()
    again = opened(tmp_path, layers=[])
    assert again.rows() == [answer(row) for row in ROWS]
    assert indexed_rows(again) == []
    assert opened(tmp_path).rows() == []  # with layers, each row has to be done again
