# SPDX-License-Identifier: Apache-2.0
"""The page of a run tells what is finished, what moves, and in red what does not, from disk alone."""

import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers import write_benchmark
from pilotfish import costs, files, status, status_page
from pilotfish.errors import UserError
from pilotfish.status import OUTPUTS

NOW = 1_800_000_000.0  # unix seconds
REPOSITORY = Path(__file__).resolve().parents[1]
RED = "\x1b[31m"
FIRST = "respond/train-00000-of-00002"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that has begun: its target is there, and its prompts."""
    for rule, output in (("prepare_target", "target/manifest.json"), ("collect_prompts", "prompts/train.jsonl")):
        log(tmp_path, rule, age=600)
        files.write_text(tmp_path / "results/mini" / output, "{}")
    return tmp_path


def log(root: Path, job: str, text: str = "", age: float = 5) -> None:
    """The log of a job, last written `age` seconds ago."""
    path = root / f"logs/mini/{job}.log"
    files.write_text(path, text)
    os.utime(path, (NOW - age, NOW - age))


def beat(root: Path, job: str = FIRST, age: float = 12, **told) -> None:
    """The heartbeat of a job that advanced `age` seconds ago, in a living process unless told otherwise."""
    written = {
        "job": "respond", "stage": "generating", "state": "running", "error": None, "done": 64, "total": 320,
        "unit": "rows", "tokens": 9000, "begun": NOW - 300, "advanced": NOW - age, "moved": NOW - age,
        "patience": 120, "written": NOW - age, "rate": 2.0, "tokens_per_second": 212.4, "eta_seconds": 128.0,
        "pid": os.getpid(), "host": socket.gethostname(), **told,
    }  # fmt: skip
    files.write_json(root / f"logs/mini/{job}.heartbeat.json", written)


def dead_process() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def stage(root: Path, name: str) -> status.Stage:
    return next(each for each in status.read(root, "mini", NOW) if each.name == name)


def shown(root: Path, colour: bool = False, width: int = 80) -> str:
    """The page as a terminal with colours, or a pipe, gets it."""
    console = Console(file=io.StringIO(), force_terminal=colour, width=width, highlight=False)
    console.print(status_page.page(root, ["mini"], NOW))
    return console.file.getvalue()


def line_of(name: str, text: str) -> list[str]:
    """The cells of a stage's line."""
    return next(re.split(r"  +", line.strip()) for line in text.splitlines() if name in line.split()[:1])


def test_a_running_stage_tells_parts_rows_speed_time_left_and_its_last_advance(root: Path):
    beat(root)
    assert line_of("respond", shown(root)) == ["respond", "0/2", "64/320 rows", "212", "5 min", "12 s ago", "running"]
    assert f"{FIRST.replace('/', ' ')}: generating" in shown(root)


def test_the_name_of_one_part_tells_how_many_there_are(root: Path):
    beat(root, "respond/train-00007-of-00016")
    found = stage(root, "respond")
    assert [part.state for part in found.parts].count("waiting") == 15


def test_parts_that_run_at_once_add_up(root: Path):
    beat(root)
    beat(root, "respond/train-00001-of-00002", done=256)
    assert line_of("respond", shown(root))[1:5] == ["0/2", "320/640 rows", "425", "68 s"]


def test_a_job_is_finished_when_its_output_is_there(root: Path):
    beat(root, state="finished", done=320)
    assert stage(root, "respond").finished == 0
    files.write_text(root / "results/mini/responses/train/00000-of-00002.jsonl", "{}")
    assert stage(root, "respond").finished == 1


def test_output_that_was_taken_away_is_work_that_waits(root: Path):
    log(root, "map_vocabulary/256", age=900)
    write_benchmark(root / "benchmarks/mini/map_vocabulary/256.tsv", 3.0)
    os.utime(root / "benchmarks/mini/map_vocabulary/256.tsv", (NOW - 899, NOW - 899))
    assert stage(root, "map_vocabulary").state == "waiting"


def test_what_has_not_moved_for_two_minutes_is_stale_and_red(root: Path):
    beat(root, age=121)
    assert stage(root, "respond").state == "stale"
    red = [line for line in shown(root, colour=True, width=200).splitlines() if RED in line]
    assert ["respond" in line for line in red] == [True, True], "the stage's line and its note"
    assert f"not moved for 2 min: generating (process {os.getpid()}" in shown(root, width=200)


def test_an_engine_may_take_as_long_to_start_as_the_configuration_lets_it(root: Path):
    beat(root, age=900, stage="starting the engine", patience=1800)
    assert stage(root, "respond").state == "running"
    beat(root, age=1801, stage="starting the engine", patience=1800)
    assert stage(root, "respond").state == "stale"


def test_a_job_between_two_checkpoints_that_still_takes_steps_is_not_stale(root: Path):
    beat(root, "train/eagle3", age=900, moved=NOW - 15)
    assert stage(root, "train").state == "running"


def test_a_job_that_is_gone_is_red_at_once(root: Path):
    beat(root, age=3, pid=dead_process())
    assert stage(root, "respond").state == "gone"
    assert "is gone; run again: what was finished is kept" in shown(root, width=200)


def test_of_a_process_on_another_node_only_its_advance_is_judged(root: Path):
    beat(root, age=3, pid=dead_process(), host="another-node")
    assert stage(root, "respond").state == "running"


def test_a_failed_job_is_red_with_its_error(root: Path):
    beat(root, state="failed", error="row 7: the engine died")
    assert stage(root, "respond").state == "failed"
    assert "respond train-00000-of-00002: failed: row 7: the engine died" in shown(root)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[validate_samples] 3 rows\n\n[validate_samples] error: row 2: no mask\ncure\n", "row 2: no mask"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'row'\n", "KeyError: 'row'"),
    ],
    ids=["a user's fault", "ours"],
)
def test_a_job_without_a_heartbeat_has_failed_when_its_log_says_so(root: Path, text: str, told: str):
    log(root, "validate_samples/train", text)
    assert stage(root, "gates").state == "failed"
    assert f"validate_samples train: failed: {told}" in shown(root)


@pytest.mark.parametrize(("age", "state"), [(5, "running"), (500, "stale")])
def test_a_job_without_a_heartbeat_moves_as_long_as_its_log_does(root: Path, age: float, state: str):
    log(root, "assemble_samples/train", age=age)
    assert stage(root, "assemble_samples").state == state


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "running"}'])
def test_a_heartbeat_that_cannot_be_read_is_as_none(root: Path, content: str):
    log(root, FIRST)
    files.write_text(root / f"logs/mini/{FIRST}.heartbeat.json", content)
    assert stage(root, "respond").state == "running"


def test_an_engines_own_log_is_no_job(root: Path):
    log(root, "serve")
    log(root, "serve/baseline.engine")
    log(root, f"{FIRST}.engine")
    assert [part.name for part in stage(root, "serve").parts] == [""]
    assert stage(root, "respond").parts == []


def test_a_file_with_two_names_is_counted_once(root: Path):
    captured = root / "results/mini/responses/train/00000-of-00001.captured/shard"
    files.write_text(captured, "x" * 2_000_000)
    (root / "results/mini/hidden_states").mkdir()
    os.link(captured, root / "results/mini/hidden_states/shard")
    assert (stage(root, "respond").disk, stage(root, "capture").disk) == (2_000_000, 0)


def test_a_page_fits_80_columns_and_has_no_colour_in_a_pipe(root: Path):
    for part in range(3):
        beat(root, f"respond/train-{part:05d}-of-00128", done=123_456, total=902_087, tokens_per_second=98_765.4)
        beat(root, f"capture/train-{part:05d}-of-00128", age=99_999, pid=dead_process())
    beat(root, "train/eagle3", unit="steps", state="failed", error="a long story " * 20)
    text = shown(root)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert line_of("respond", text)[:4] == ["respond", "0/128", "370k/2706k rows", "296k"]


def test_every_rule_of_the_workflow_is_on_the_page():
    rules = {
        rule
        for path in (REPOSITORY / "rules").glob("*.smk")
        for rule, body in re.findall(r"^rule (\w+):\n((?:[ \t].*\n|\n)*)", path.read_text(), re.MULTILINE)
        if "output:" in body
    }
    assert OUTPUTS.keys() == rules
    assert {rule for rule, _ in costs.STAGES} <= rules


def test_a_run_that_is_not_there_is_named_beside_those_that_are(root: Path):
    with pytest.raises(UserError, match=r"logs/maxi: no such run; there are: mini"):
        status.read(root, "maxi", NOW)


def test_the_script_reads_every_run_without_torch_or_snakemake(root: Path):
    code = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print(sorted({'torch', 'snakemake', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    line = [sys.executable, "-c", code, str(REPOSITORY / "scripts/status.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "scripts")}
    done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mini, ") and done.stdout.endswith("[]\n")
