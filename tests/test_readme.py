# SPDX-License-Identifier: Apache-2.0
"""The README's tables of gates and faults are those of the code."""

import importlib.util
import re
from pathlib import Path

import pytest

from faults import FAULTS, FLOW

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def make_tables():
    found = importlib.util.spec_from_file_location("make_tables", REPOSITORY / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(make_tables):
    filled = make_tables.fill(README, "gates", make_tables.gates_table())
    assert make_tables.fill(filled, "faults", make_tables.faults_table()) == README, "run: make tables"


def test_every_gate_is_in_the_flow_and_says_what_it_checks_and_what_it_does_not(make_tables):
    gates = {path.stem for path in (REPOSITORY / "scripts").glob("validate_*.py")}
    assert gates == set(FLOW)
    for name in gates:
        assert all(make_tables.gate_parts(name).values()), name


def test_every_fault_is_named_once():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_a_docstring_without_its_parts_is_told(make_tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "validate_x.py").write_text('"""Gate of x: all.\n\nChecks: y.\n"""\n', encoding="utf-8")
    monkeypatch.setattr(make_tables, "REPOSITORY", tmp_path)
    with pytest.raises(ValueError, match="Does not check"):
        make_tables.gate_parts("validate_x")


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (r"row 3 \(id tiny-\d+\): .* where", "row 3 (id tiny-N): ... where"),
        (r"answers(?s:.*)row 0 of \S+x: (.*\n)+.*b", "answers ... row 0 of ... x: ... b"),
        (r"^nothing runs again$", "nothing runs again"),
    ],
)
def test_a_pattern_is_shown_as_a_message(make_tables, pattern: str, read: str):
    assert make_tables.readable(pattern) == read
    assert not re.search(r"\\d|\(\?", make_tables.readable(pattern))
