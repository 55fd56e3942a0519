# SPDX-License-Identifier: Apache-2.0
"""Prompts are read in the shapes and files in which people have them."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from helpers import read_prompts
from pilotfish import formats, prompts, sources
from pilotfish.errors import UserError


def said(*texts: str, system: str | None = None) -> list[dict]:
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": system}] * (system is not None) + turns


SHAPES = {
    "OpenAI": ({"id": "a", "messages": said("Hi", "Hello", "Bye")}, said("Hi", "Hello", "Bye")),
    "OpenAI with its answer": ({"id": "a", "messages": said("Hi", "Yes", system="Be")}, said("Hi", system="Be")),
    "ShareGPT": (
        {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        said("Hi"),
    ),
    "ShareGPT with a system turn": (
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "Be kind"}, {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"}, {"from": "user", "value": "Bye"}, {"from": "bing", "value": "Bye"},
            ],
        },
        said("Hi", "Hello", "Bye", system="Be kind"),
    ),
    "roles under another name": ({"conversation_id": "a", "conversation": said("Hi", "Hello")}, said("Hi")),
    "UltraChat": ({"id": "a", "data": ["Hi", "Hello", "Bye", "Bye"]}, said("Hi", "Hello", "Bye")),
    "UltraChat 200k": ({"prompt_id": "a", "prompt": "Hi", "messages": said("Hi", "Hello")}, said("Hi")),
    "Spec-Bench": ({"question_id": "a", "category": "writing", "turns": ["Hi"]}, said("Hi")),
    "Alpaca": ({"id": "a", "instruction": "Add", "input": "1, 2", "output": "3"}, said("Add\n\n1, 2")),
    "Alpaca without input": ({"id": "a", "instruction": "Add 1, 2", "input": "", "output": "3"}, said("Add 1, 2")),
    "a column of text": ({"id": "a", "prompt": "Hi", "chosen": "Hello"}, said("Hi")),
    "a column of questions": ({"id": "a", "question": "Hi?", "answer": "42"}, said("Hi?")),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_gives_the_turns_before_the_last_answer(shape: str):
    row, messages = SHAPES[shape]
    found = formats.prompt_of(row, 7)
    assert {key: found[key] for key in found if key != "answer"} == {"id": "a", "messages": messages}
    assert prompts.fault(found) is None


def test_the_last_answer_is_kept_where_the_data_give_one():
    answers = {shape: formats.prompt_of(row, 7).get("answer") for shape, (row, _) in SHAPES.items()}
    without = {shape for shape, answer in answers.items() if answer is None}
    assert without == {"OpenAI", "Spec-Bench", "a column of text"}
    assert answers["ShareGPT"] == {"role": "assistant", "content": "Hello"}
    assert answers["Alpaca"] == {"role": "assistant", "content": "3"}
    assert answers["a column of questions"] == {"role": "assistant", "content": "42"}


def test_a_row_without_an_id_has_its_number_and_a_conversation_s_name_is_kept():
    row = {"conversation": "c", "instruction": "Add", "input": "1, 2"}
    assert formats.prompt_of(row, 7) == {"id": 7, "conversation": "c", "messages": said("Add\n\n1, 2")}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"id": "a", "words": "Hi"}, "`messages` is missing"),
        ({"id": "a", "conversations": [{"from": "robot", "value": "Hi"}]}, "message 1 has no role among"),
        ({"id": "a", "conversations": ["Hi"]}, "`messages` is missing"),
        ({"id": "a", "conversations": [{"from": "human"}]}, "message 1 has empty or non-text `content`"),
        ({"id": "a", "turns": [1]}, "message 1 has empty or non-text `content`"),
        ({"id": "a", "messages": []}, "`messages` is missing, empty"),
        ({"id": "a", "messages": said("Hi", "Hello")[1:]}, "`messages` is missing, empty"),
        ({"id": "a", "data": ["Hi", 2]}, "`messages` is missing"),
        ({"id": "a", "prompt": None}, "`messages` is missing"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_left_to_the_check_of_prompts(row: dict, fault: str):
    assert prompts.fault(formats.prompt_of(row, 1)).startswith(fault)


ROWS = [{"id": f"p{number}", "messages": said(f"What is {number}?")} for number in range(2500)]


def write(path: Path, rows: list[dict]) -> Path:
    """Rows in the way that the name asks for."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    content = json.dumps(rows).encode() if ".json" in path.suffixes else lines
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as packed:
            packed.write(content)
    else:
        path.write_bytes(content)
    return path


NAMES = ["p.jsonl", "p.ndjson", "p.jsonl.gz", "p.jsonl.zst", "p.json", "p.json.gz", "p.json.zst", "p.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, name: str):
    assert read_prompts(write(tmp_path / name, ROWS), 640) == ROWS


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_row_is_named_by_file_and_number_whatever_the_file(tmp_path: Path, name: str):
    path = write(tmp_path / name, [*ROWS[:1200], {"id": "x", "messages": said(" ")}])
    unit = "row" if ".json" in path.suffixes or path.suffix == ".parquet" else "line"
    with pytest.raises(UserError, match=rf"{path}, {unit} 1201: message 1 has empty"):
        read_prompts(path, 640)


@pytest.mark.parametrize("name", NAMES[2:])
def test_a_file_cut_short_is_an_error_with_its_name_and_the_cure(tmp_path: Path, name: str):
    path = write(tmp_path / name, ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"{path}.*(copy the whole file again|mend it)"):
        read_prompts(path, 640)


@pytest.mark.parametrize("name", NAMES[2:])
@pytest.mark.parametrize("content", [b"", b"\0\xff\xfe" * 99, b"7", b'["a"]', b'{"id": 1}', b"["])
def test_any_bytes_are_prompts_or_an_error_with_the_file_s_name(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_prompts(path, 640)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": []}', "a JSON dict, not a list of rows; write one object a line"),
        ('[{"id": 1, "messages": []}, 7]', "row 2: a JSON int, not an object; mend or remove it"),
        ('[{"id": "\\ud800"}]', "row 1: half of a surrogate pair"),
        ("[" * 9000, "not one JSON list"),
    ],
)
def test_a_list_that_holds_no_rows_says_what_it_holds(tmp_path: Path, content: str, message: str):
    (tmp_path / "p.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        list(sources.rows(tmp_path / "p.json"))


def test_a_list_too_large_to_be_held_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "LONGEST_LIST", 100)
    with pytest.raises(UserError, match=r"one JSON list of more than 100 bytes; write one object a line"):
        list(sources.rows(write(tmp_path / "p.json.gz", ROWS)))
