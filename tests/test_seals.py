# SPDX-License-Identifier: Apache-2.0
"""A sealed file shows any change of its own bytes."""

from pathlib import Path

import pytest

from pilotfish import files, seals


def test_sealed_json_reads_as_it_was_and_equal_values_give_equal_bytes(tmp_path: Path):
    value = {"rows": 3, "note": 'é, a quote " and "seal": "', "nested": {"seal": "not the place"}}
    seals.write_json(tmp_path / "a.json", value)
    seals.write_json(tmp_path / "b.json", dict(reversed(value.items())))
    read = files.read_json(tmp_path / "a.json")
    assert {name: each for name, each in read.items() if name != seals.SEAL} == value
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert seals.fault(tmp_path / "a.json") is None


def test_what_was_read_is_sealed_again_under_its_own_seal(tmp_path: Path):
    seals.write_json(tmp_path / "a.json", {"rows": 3})
    seals.write_json(tmp_path / "b.json", {**files.read_json(tmp_path / "a.json"), "rows": 4})
    assert seals.fault(tmp_path / "b.json") is None


def test_sealed_markdown_ends_with_a_comment_that_no_reader_shows(tmp_path: Path):
    seals.write_markdown(tmp_path / "a.md", "# Report\n")
    assert (tmp_path / "a.md").read_text(encoding="utf-8").startswith("# Report\n\n<!-- seal: ")
    assert seals.fault(tmp_path / "a.md") is None


@pytest.mark.parametrize("suffix", ["json", "md"])
def test_no_byte_can_be_changed_left_out_or_added_without_being_seen(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.{suffix}"
    if suffix == "json":
        seals.write_json(path, {"rows": 3, "name": "é"})
    else:
        seals.write_markdown(path, "# é\n")
    content = path.read_bytes()
    for place in range(len(content)):
        for other in (
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
            content[:place] + content[place + 1 :],
            content[:place] + b"0" + content[place:],
            content[:place],
        ):
            path.write_bytes(other)
            assert seals.fault(path) or other == content, other


def test_a_file_without_a_seal_and_one_that_is_not_there_are_told_apart(tmp_path: Path):
    files.write_json(tmp_path / "old.json", {"rows": 3})
    assert seals.fault(tmp_path / "old.json") == seals.WITHOUT
    assert seals.fault(tmp_path / "none.json") == "missing"
