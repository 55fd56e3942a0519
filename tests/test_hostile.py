# SPDX-License-Identifier: Apache-2.0
"""Whatever lies in a file that comes from outside, it is read rightly, or refused by name and with a cure."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conftest import CONFIG, changed, copy_workflow
from helpers import execute, read_prompts
from hostile import VALUES, at, damaged, fuzzed, places, settled, with_value
from pilotfish import evaluation_sets, files, prompts, settings
from pilotfish.errors import UserError
from pilotfish.strict import LONGEST_TEXT, MOST_VALUES

LONGEST = 100  # tokens of a prompt


PROMPT = {"id": 1, "conversation": "a", "messages": [{"role": "user", "content": "hé"}]}
GOOD_LINES = "".join(json.dumps({**PROMPT, "id": number}) + "\n" for number in range(3)).encode()
PROMPT_PLACES = [*places(PROMPT), ("messages", 0, "name")]
PROMPTS = st.tuples(st.sampled_from(PROMPT_PLACES), VALUES).map(lambda change: with_value(PROMPT, *change))
LINES = (
    damaged(GOOD_LINES)
    | st.binary(max_size=40)
    | st.lists(VALUES | PROMPTS, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
)


@fuzzed(600)
@given(content=LINES)
def test_any_prompt_file_gives_right_prompts_or_an_error_with_its_name(tmp_path: Path, content: bytes):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    found = settled(lambda: read_prompts(path, LONGEST), path)
    if found is not None:
        assert all(prompts.fault(each) is None for each in found)
        assert len({each["id"] for each in found}) == len(found)
        files.write_jsonl(tmp_path / "again.jsonl", found)
        assert files.read_jsonl(tmp_path / "again.jsonl") == found


@fuzzed(400)
@given(content=LINES, field=st.sampled_from([None, "messages", "id", "no"]))
def test_any_file_of_an_evaluation_set_gives_prompts_or_an_error_that_names_it(
    tmp_path: Path, content: bytes, field: str | None
):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    spec = {"source": str(path), "prompts": 1, "field": field, "seed": 0, "max_model_len": LONGEST}
    found = settled(lambda: evaluation_sets.collect("mine", spec), path)
    assert found is None or all(prompts.fault(each) is None for each in found)


@fuzzed(400)
@given(content=LINES)
def test_any_lines_are_rows_or_an_error_with_file_and_line(tmp_path: Path, content: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    rows = settled(lambda: files.read_jsonl(path), f"{path}, line ")
    assert rows is None or [json.dumps(row) for row in rows] == [
        json.dumps(json.loads(line)) for line in content.splitlines()
    ]


@fuzzed(400)
@given(content=LINES)
def test_of_any_journal_the_whole_lines_are_read_and_a_torn_one_cut_off(tmp_path: Path, content: bytes):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    rows = files.read_appended(path)
    assert all(isinstance(row, dict) for row in rows)
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]
    files.append_jsonl(path, {"row": 7})
    assert files.read_appended(path) == [*rows, {"row": 7}]


def test_a_journal_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(UserError, match=f"{tmp_path}: Is a directory; mend its rights, or delete it"):
        files.read_appended(tmp_path)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_prompts(path, LONGEST)
    return str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON (maximum recursion depth exceeded"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "lists or objects more than 100 deep; mend or remove the line"),
        (b'{"id": 1, "id": 2}', "not valid JSON (the key 'id' is repeated); mend or remove the line"),
        (b'{"id": NaN}', "not valid JSON (NaN is not a finite number)"),
        (b'{"id": -Infinity}', "not valid JSON (-Infinity is not a finite number)"),
        (b'{"id": 1e999}', "not valid JSON (1e999 is not a finite number)"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
        (b'{"id": ' + b"9" * 4000 + b"}", "`id` has more than 500 characters"),
        (b'{"id": "' + b"a" * 501 + b'"}', "`id` has more than 500 characters"),
        (b'{"id": "a\0b"}', "not valid JSON (Invalid control character"),
        (b"\0" * 4096, "not valid JSON (Expecting value"),
        (b'{"id": 1, "conversation": ["a"]}', "`conversation` is neither text nor a number"),
    ],
    ids=lambda each: str(each[:40]),
)
def test_a_hostile_line_is_refused_with_its_number_and_the_cure(tmp_path: Path, line: bytes, reason: str):
    said = refusal(tmp_path / "p.jsonl", GOOD_LINES + line + b"\n")
    assert said.startswith(f"{tmp_path / 'p.jsonl'}, line 4: {reason}")
    assert len(said) < 400


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    said = refusal(tmp_path / "p.jsonl", GOOD_LINES + b"[" + b" " * 1000)
    assert said == (
        f"{tmp_path / 'p.jsonl'}, line 4: longer than 1,000 bytes; shorten or remove the line, or, if the file is one "
        "large list, name it .json, or write one JSON object a line"
    )


def test_a_file_of_100_mb_in_one_line_takes_no_more_memory_than_the_limit(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    with open(path, "wb") as handle:
        handle.truncate(100_000_000)  # a hole of zeros, which takes no room on the disk
    with pytest.raises(UserError, match="line 1: longer than 33,554,432 bytes; shorten"):
        next(files.iterate_jsonl(path))


def test_a_million_turns_are_refused_in_a_line_that_can_be_read(tmp_path: Path):
    turns = [{"role": "user", "content": "x"}] * 100_000
    said = refusal(tmp_path / "p.jsonl", json.dumps({"id": 1, "messages": turns}).encode())
    assert "(found user, user, user, user, user, user, ...)" in said
    assert len(said) < 400


def test_nul_within_a_text_is_text(tmp_path: Path):
    row = {"id": "a\0b", "messages": [{"role": "user", "content": "a\0b"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl", LONGEST) == [row]


@pytest.mark.parametrize("part", ["²-of-3", "3-of-3", "-1-of-3", "0-of-0", "9" * 5000 + "-of-3", "a\0", "1-of-3\n", ""])
def test_a_part_that_is_none_is_refused(part: str):
    with pytest.raises(UserError, match="write it as 00003-of-00016"):
        prompts.part_rows(10, part)


CONFIG_PLACES = [
    *places(CONFIG),
    *[("target", "revision"), ("engine", "extra_args"), ("responses", "chat_template_kwargs"), ("references",)],
    *[("references", "a"), ("drafters", "x"), ("evaluation", "sets", "x"), ("drafters", "dflash", "loss"), ("x",)],
]


@fuzzed(1000)
@given(changes=st.lists(st.tuples(st.sampled_from(CONFIG_PLACES), VALUES), min_size=1, max_size=3))
def test_any_configuration_is_taken_whole_or_refused(changes: list[tuple[tuple, object]]):
    config = CONFIG
    for path, value in sorted(changes, key=lambda change: -len(change[0])):
        assume(path[:-1] in ((), *places(config)) and isinstance(at(config, path[:-1]), dict | list))
        config = with_value(config, path, value)
    settled(lambda: settings.load(config), "the configuration ")


def endless() -> list:
    made: list = []
    made.append(made)
    return made


def bomb() -> list:
    """Nine to the power of nine values, as YAML's anchors spell them in ten lines."""
    made: list = ["x"]
    for _ in range(9):
        made = [made] * 9
    return made


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ([CONFIG], "(whole file): Input should be an object"),
        (None, "(whole file): Input should be an object (found None)"),
        ("run: a", "(whole file): Input should be an object (found 'run: a')"),
        ({b"run": 1}, "(whole file): the key \"b'run'\" is no text; put it in quotes"),
        (changed(run="../../x"), "run: '../../x' names a folder: use letters, digits, - and _ only"),
        (changed(run="a" * 300), "run: String should have at most 100 characters"),
        (changed(drafters={"../x": CONFIG["drafters"]["eagle3"]}), "drafters.../x.[key]: '../x' names a folder"),
        (changed(drafters={"x": None}), "drafters.x: Input should be an object (found None)"),
        (changed(drafters={"x": {"algorithm": ["eagle3"]}}), "drafters.x.algorithm: ['eagle3']; choose eagle3 or"),
        (changed(prompts__train=10**20), "prompts.train: beyond 1,000,000,000,000; no number here is as large"),
        (changed(seed=10**5000), "seed: beyond 1,000,000,000,000"),
        (changed(responses__parts=10**9), "responses.parts: Input should be less than or equal to 99999"),
        (
            changed(prompts__sources=[{"source": "a\0b"}]),
            "prompts.sources.0.source: with a control character ('a\\x00b'); remove it",
        ),
        (changed(prompts__sources=[{"source": "\ud800"}]), "prompts.sources.0.source: with half of a surrogate pair"),
        (changed(target__source="x" * (LONGEST_TEXT + 1)), "target.source: of 10,001 characters; no text here needs"),
        (changed(responses__chat_template_kwargs=endless()), "mappings or lists more than 20 deep; write it flatter"),
        (changed(responses__chat_template_kwargs={"a": bomb()}), f"more than {MOST_VALUES:,} values up to here"),
        (changed(evaluation__concurrency=[1] * 5000), "concurrency [1, 1, 1"),
        (changed(engine__extra_args=[1] * 5000), "has 5000 fault(s):\n  engine.extra_args.0: Input should be a valid"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_hostile_configuration_is_refused_in_a_few_lines(config: Any, reason: str):
    with pytest.raises(UserError) as error:
        settings.load(config)
    assert reason in str(error.value)
    assert len(str(error.value)) < 3000


def test_a_home_that_nobody_has_is_no_folder():
    config = changed(target__source="~nobody-of-this-name/model", target__revision="main")
    assert settings.load(config).target.revision == "main"


HOSTILE = ["$(touch made)", "`touch made`", "'; touch made; '", '"; touch made; "', "| touch made", "\n touch made \n"]


def test_nothing_of_a_data_file_or_its_name_reaches_a_shell(tmp_path: Path):
    root = copy_workflow(tmp_path)
    source = root / 'it\'s $(touch made); `touch made` "quoted" &.jsonl'
    rows = [
        {"id": f"{number} {text}", "conversation": text, "messages": [{"role": "user", "content": text}]}
        for number, text in enumerate(HOSTILE)
    ]
    files.write_jsonl(source, rows)
    config = changed(prompts__sources=[{"source": source.name}], prompts__train=len(rows) - 1, prompts__heldout=1)
    config["evaluation"]["sets"] = {"heldout": {"prompts": 1}}
    files.write_json(root / "my.json", config)
    lines = {job.rule.name: job.shellcmd for job in execute(root, root / "my.json", "dryrun", forceall=True).jobs}
    (root / "logs/default").mkdir(parents=True)
    ran = subprocess.run(["bash", "-c", lines["collect_prompts"]], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not list(root.rglob("made"))
    collected = [
        row
        for split in ("train", "heldout")
        for row in files.read_jsonl(root / f"results/default/prompts/{split}.jsonl")
    ]
    assert sorted(row["id"] for row in collected) == sorted(row["id"] for row in rows)
    assert not [name for name, line in lines.items() if name != "collect_prompts" and "touch" in (line or "")]
