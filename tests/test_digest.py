# SPDX-License-Identifier: Apache-2.0
"""Which edit of the code reruns which scripts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import digest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
HELPER = '"""A helper."""\n\n\ndef twice(x):\n    return 2 * x\n'
SMALL = {
    "pilotfish/helper.py": HELPER,
    "pilotfish/between.py": "from pilotfish.helper import twice\n",
    "from_package.py": "from pilotfish import helper\n",
    "from_module.py": "from pilotfish.helper import twice\n",
    "plain_import.py": "import pilotfish.helper as h\n",
    "inside_function.py": "def main():\n    from pilotfish import helper\n    return helper\n",
    "through_another.py": "from pilotfish import between\n",
    "by_name.py": 'CONNECTOR = "pilotfish.helper"\n',
    "unrelated.py": "import json\n",
}


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    for function in vars(digest).values():
        getattr(function, "cache_clear", lambda: None)()


def digests(scripts: Path) -> dict[str, str]:
    """Digest of each script in a folder, as a new process would compute it."""
    forget()
    return {path.stem: digest.code_digest(path) for path in sorted(scripts.glob("*.py"))}


def differing(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A copy of the project's scripts."""
    return shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Scripts that reach a helper in every way there is, and one that does not."""
    for name, text in SMALL.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def test_comments_blank_lines_and_docstrings_change_no_digest_of_any_script(real: Path):
    before = digests(real)
    for path in real.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text("# a comment\n\n" + text.replace('"""', '"""Truly: ', 1) + "\n\n# the end\n", encoding="utf-8")
    assert len(before) > 10
    assert digests(real) == before


@pytest.mark.parametrize(
    "text",
    [
        HELPER.replace("A helper.", "An excellent helper."),
        HELPER.replace("    return", '    """Twice x."""\n\n    # doubled\n    return'),
        HELPER.replace("2 * x", "(2*x)"),
        HELPER.removeprefix('"""A helper."""'),
    ],
    ids=["other docstring", "new docstring and comment", "layout", "no docstring"],
)
def test_what_python_does_not_see_changes_nothing(small: Path, text: str):
    before = digests(small)
    (small / "pilotfish/helper.py").write_text(text, encoding="utf-8")
    assert digests(small) == before


def test_a_helpers_change_reaches_exactly_the_scripts_that_import_it(small: Path):
    before = digests(small)
    (small / "pilotfish/helper.py").write_text(HELPER.replace("2 * x", "x + x"), encoding="utf-8")
    assert differing(before, digests(small)) == set(before) - {"unrelated"}


def test_a_scripts_own_change_reaches_no_other(small: Path):
    before = digests(small)
    (small / "unrelated.py").write_text("import os\n", encoding="utf-8")
    assert differing(before, digests(small)) == {"unrelated"}


def test_a_string_in_the_code_is_code(small: Path):
    before = digests(small)
    (small / "unrelated.py").write_text('import json\nNAME = "x"\n', encoding="utf-8")
    assert differing(before, digests(small)) == {"unrelated"}


@pytest.mark.parametrize(
    ("module", "reached", "spared"),
    [
        ("capture", {"respond", "capture"}, {"collect_prompts", "train", "report"}),
        ("vocabulary", {"map_vocabulary", "validate_vocabulary"}, {"respond", "train", "report"}),
        ("report", {"report"}, {"respond", "train", "serve", "validate_evaluation"}),
    ],
)
def test_a_modules_change_reaches_its_cone_in_the_projects_own_scripts(
    real: Path, module: str, reached: set[str], spared: set[str]
):
    before = digests(real)
    with open(real / "pilotfish" / f"{module}.py", "a", encoding="utf-8") as handle:
        handle.write("\nADDED = 1\n")
    after = differing(before, digests(real))
    assert reached <= after
    assert not spared & after


def test_the_digest_does_not_depend_on_where_the_scripts_lie(real: Path):
    assert digests(real) == digests(SCRIPTS)


def test_a_relative_import_is_refused_since_it_would_not_be_followed(small: Path):
    (small / "pilotfish/between.py").write_text("from .helper import twice\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"between\.py: relative imports are not followed"):
        digests(small)


def test_equal_specs_are_equal_strings():
    assert digest.spec_json({"b": [1], "a": {"d": 1, "c": "é"}}) == '{"a":{"c":"é","d":1},"b":[1]}'
    assert digest.spec_json({"a": 1}) != digest.spec_json({"a": 1.5})


def test_a_spec_with_no_number_in_it_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        digest.spec_json({"a": float("nan")})
