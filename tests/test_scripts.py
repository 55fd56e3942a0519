# SPDX-License-Identifier: Apache-2.0
"""Every script answers --help, and every rule is of the house's form."""

import io
import itertools
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((REPOSITORY / "scripts").glob("*.py"))
WORKFLOW = [REPOSITORY / "Snakefile", *sorted((REPOSITORY / "rules").glob("*.smk"))]
RULES = {
    name: body
    for path in WORKFLOW
    for name, body in re.findall(r"^rule (\w+):\n((?:[ \t].*\n|\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if name != "all"
}
# One interpreter for all, since several scripts import torch: each runs as `python SCRIPT --help` does.
HELP_OF_ALL = """
import contextlib, io, json, runpy, sys
found = {}
for script in sys.argv[2:]:
    sys.argv[:2] = [script, "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(script, run_name="__main__")
            code = "did not exit"
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    found[script] = [code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, list]:
    """Exit code and standard output of each script's --help."""
    line = [sys.executable, "-c", HELP_OF_ALL, "", *map(str, SCRIPTS)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=SCRIPTS[0].parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_answers_help(script: Path, help_texts: dict[str, list]):
    code, said = help_texts[str(script)]
    assert code == 0
    assert said.startswith(f"usage: {script.name} ")
    assert ("--spec" in said) == (script.stem in RULES)


def test_a_light_script_answers_help_on_its_own():
    script = REPOSITORY / "scripts" / "collect_prompts.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")


def forbidden_in(text: str) -> list[str]:
    """Snakemake features that the house does without; strings and comments may name them."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in (tokenize.NL, tokenize.COMMENT)
    ]
    return [
        f"line {first.start[0]}: {first.string}"
        for first, second in itertools.pairwise(tokens)
        if (first.string in ("run", "script") and second.string == ":")
        or (first.string in ("directory", "touch", "service") and second.string == "(")
        or (first.string == "checkpoint" and second.type == tokenize.NAME)
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rule a:\n    run:\n        pass\n", ["line 2: run"]),
        ('rule a:\n    script:\n        "x.py"\n', ["line 2: script"]),
        (
            'rule a:\n    output:\n        directory("x"),\n        touch ("y"),\n',
            ["line 3: directory", "line 4: touch"],
        ),
        ('checkpoint a:\n    output:\n        service("x"),\n', ["line 1: checkpoint", "line 3: service"]),
        ('# run: touch(x)\nrule a:\n    """A checkpoint x."""\n    params:\n        run=S.run,\n', []),
    ],
)
def test_a_forbidden_feature_is_found_in_code_and_not_in_words(text: str, found: list[str]):
    assert forbidden_in(text) == found


@pytest.mark.parametrize("path", WORKFLOW, ids=lambda path: path.name)
def test_no_rule_uses_what_the_house_does_without(path: Path):
    assert forbidden_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_a_docstring_a_log_and_calls_the_script_of_its_name(name: str):
    body = RULES[name]
    assert re.match(r'    """\S.*\."""\n', body)
    assert re.search(r"^    log:\n", body, re.MULTILINE)
    assert re.findall(r"python (\S+)", body) == [f"{{SCRIPTS}}/{name}.py"]
    assert "2>&1 | tee {log}" in body


def test_every_script_has_its_rule_but_those_that_look_at_any_run():
    assert set(RULES) == {path.stem for path in SCRIPTS} - {"status", "compare"}
