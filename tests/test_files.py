# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, and broken ones are named with their line."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotfish import files
from pilotfish.errors import UserError


def rows_then_failure() -> Iterator[dict]:
    yield {"row": 0}
    raise RuntimeError("the disk is full")


def fail_in_the_block(path: Path) -> None:
    with files.replacing(path) as temporary:
        temporary.write_text("half", encoding="utf-8")
        raise RuntimeError("killed")


FAILING: dict[str, Callable[[Path], None]] = {
    "replacing": fail_in_the_block,
    "text": lambda path: files.write_text(path, "a lone surrogate \ud800"),
    "json": lambda path: files.write_json(path, {"a": object()}),
    "json nan": lambda path: files.write_json(path, {"a": float("nan")}),
    "jsonl": lambda path: files.write_jsonl(path, rows_then_failure()),
}


@pytest.mark.parametrize("write", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("before", [None, "the old text"])
def test_when_writing_fails_the_final_name_is_as_it_was_and_nothing_else_is_left(
    tmp_path: Path, write: Callable[[Path], None], before: str | None
):
    path = tmp_path / "artifact"
    if before:
        path.write_text(before, encoding="utf-8")
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        write(path)
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == (
        [("artifact", before)] if before else []
    )


def test_nothing_is_seen_under_the_final_name_before_the_end(tmp_path: Path):
    path = tmp_path / "new" / "artifact"
    with files.replacing(path) as temporary:
        temporary.write_text("all of it", encoding="utf-8")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename is atomic only within a folder"
    assert [file.name for file in path.parent.iterdir()] == ["artifact"]
    assert path.read_text(encoding="utf-8") == "all of it"


def test_equal_values_give_equal_json_bytes(tmp_path: Path):
    files.write_json(tmp_path / "a", {"x": 1, "y": {"b": "é", "a": None}})
    files.write_json(tmp_path / "b", {"y": {"a": None, "b": "é"}, "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert files.read_json(tmp_path / "a") == {"x": 1, "y": {"a": None, "b": "é"}}


def test_rows_come_back_as_they_were_written(tmp_path: Path):
    rows = [{"text": "line\nbreak, \u2028, \r and é"}, {"ids": [1, 2], "none": None}]
    files.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert files.read_jsonl(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize(
    "text",
    [b'{"a": 1}\n{"a": 2}\n', b'{"a": 1}\r\n{"a": 2}\r\n', b'{"a": 1}\n{"a": 2}'],
    ids=["LF", "CRLF", "no newline at the end"],
)
def test_any_common_line_ending_is_read(tmp_path: Path, text: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 2}]


def test_an_empty_file_has_no_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"")
    assert files.read_jsonl(path) == []


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b'{"a": 1}\n{"a": "\xff"}\n', 2, "not UTF-8"),
        (b'{"a": 1}\n{"a": 2}\n{"a": ', 3, "not valid JSON"),
        (b'{"a": 1}\n[1, 2]\n', 2, "a JSON list, not an object"),
        (b'"text"\n', 1, "a JSON str, not an object"),
        (b'{"a": 1}\n\n{"a": 2}\n', 2, "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}\n', 1, "starts with a byte order mark; re-save the file as UTF-8 without one"),
    ],
    ids=["invalid UTF-8", "truncated last line", "list", "string", "blank line", "byte order mark"],
)
def test_a_broken_line_is_an_error_with_file_and_line(tmp_path: Path, text: bytes, line: int, reason: str):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError) as error:
        files.read_jsonl(path)
    assert str(error.value).startswith(f"{path}, line {line}: {reason}")


def test_rows_are_read_one_by_one_up_to_a_broken_line(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\nnonsense\n')
    rows = files.iterate_jsonl(path)
    assert [next(rows), next(rows)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError, match="line 3: not valid JSON"):
        next(rows)


@pytest.mark.parametrize(
    ("end", "cure"),
    [
        (b"", "the file ends inside it, so copy the whole file again, or mend or remove the line"),
        (b"\n", "; mend or remove the line"),
    ],
    ids=["cut off", "broken"],
)
def test_a_line_that_is_cut_off_has_a_cure_of_its_own(tmp_path: Path, end: bytes, cure: str):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ' + end)
    with pytest.raises(UserError, match="line 2: not valid JSON") as error:
        files.read_jsonl(path)
    assert cure in str(error.value)


@pytest.mark.parametrize("half", ["\ud83d", "\ude00"])
def test_half_of_a_surrogate_pair_is_an_error_with_its_line_and_both_halves_are_text(tmp_path: Path, half: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"a": "\U0001f600"}) + "\n" + json.dumps({"a": half}) + "\n", encoding="ascii")
    rows = files.iterate_jsonl(path)
    assert next(rows) == {"a": "\U0001f600"}
    with pytest.raises(UserError, match=r"line 2: half of a surrogate pair .*; mend or remove the line"):
        next(rows)


@pytest.mark.parametrize("read", [files.read_json, files.read_jsonl])
@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_path_that_is_no_file_is_an_error_that_names_it(tmp_path: Path, read: Callable[[Path], object], name: str):
    with pytest.raises(UserError, match=str(tmp_path / name)):
        read(tmp_path / name)


@pytest.mark.parametrize("text", [b"", b'{"a": ', b'{"a": "\xff"}', b"[1]"], ids=str)
def test_json_that_is_no_object_is_an_error_that_names_the_file(tmp_path: Path, text: bytes):
    path = tmp_path / "manifest.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match=str(path)):
        files.read_json(path)


def test_a_files_sha256_is_that_of_all_its_blocks(tmp_path: Path):
    content = bytes(range(256)) * 8000 + b"the rest"  # more than is read at a time
    (tmp_path / "data").write_bytes(content)
    assert files.sha256_file(tmp_path / "data") == hashlib.sha256(content).hexdigest()


def test_publishing_a_folder_replaces_the_old_one_and_keeps_the_source(tmp_path: Path):
    source, final = tmp_path / "work", tmp_path / "out" / "final"
    for folder, names in ((source, "ab"), (final, "bz")):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(f"{name} of {folder.name}", encoding="utf-8")
    files.publish_folder(source, final)
    expected = {"a": "a of work", "b": "b of work"}
    for folder in (source, final):
        assert {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()} == expected
    assert [file.name for file in final.parent.iterdir()] == ["final"]


def test_publishing_copies_nothing(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "shard").write_bytes(b"x")
    files.publish_folder(tmp_path / "work", tmp_path / "final")
    assert (tmp_path / "final" / "shard").samefile(tmp_path / "work" / "shard")


def test_a_link_is_a_copy_where_the_file_system_cannot_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cannot(*_):
        raise OSError("cross-device link")

    monkeypatch.setattr(os, "link", cannot)
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    files.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"new"
    assert not (tmp_path / "b").samefile(tmp_path / "a")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
