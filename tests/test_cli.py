# SPDX-License-Identifier: Apache-2.0
"""What a script's user sees: options, logs, and one message for a fault of theirs."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish import cli
from pilotfish.errors import UserError

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def run(folder: Path, body: str) -> subprocess.CompletedProcess:
    """Run a script whose main has this body."""
    script = folder / "sample_script.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    script.write_text(
        "import logging, os, signal\nfrom pathlib import Path\nfrom pilotfish import cli\n"
        f"from pilotfish.errors import UserError\ndef main():\n{lines}\ncli.run(main)\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    return subprocess.run([sys.executable, str(script)], env=environment, cwd=folder, capture_output=True, text=True)


def test_a_users_fault_is_one_message_without_a_traceback(tmp_path: Path):
    done = run(tmp_path, 'raise UserError("p.jsonl, line 3: no id; add one")')
    assert done.returncode == 1
    assert done.stderr == "\n[sample_script] error: p.jsonl, line 3: no id; add one\n\n"


def test_our_own_fault_keeps_its_traceback(tmp_path: Path):
    done = run(tmp_path, "assert not 'a bug'")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_success_is_exit_0_and_logs_go_to_stderr_under_the_scripts_name(tmp_path: Path):
    done = run(tmp_path, 'logging.info("3 rows")')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "[sample_script] 3 rows\n")


def test_sigterm_unwinds_so_that_engines_stop_and_locks_are_given_back(tmp_path: Path):
    body = "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    signal.pause()\nfinally:\n    Path('cleaned').touch()"
    assert run(tmp_path, body).returncode == 143
    assert (tmp_path / "cleaned").exists()


def test_the_spec_is_parsed():
    made = cli.parser("A script.")
    arguments = made.parse_args(["--spec", '{"train": 3}'])
    assert cli.spec_of(arguments) == {"train": 3}
    assert arguments.code == "by-hand", "a script run by hand says so in its manifest"


@pytest.mark.parametrize(
    ("text", "message"),
    [("{train: 3}", "--spec: not valid JSON"), ("[1]", "--spec: a JSON object"), ("", "--spec: not valid")],
)
def test_a_spec_that_is_no_json_object_is_a_users_fault(text: str, message: str):
    with pytest.raises(UserError, match=message):
        cli.spec_of(argparse.Namespace(spec=text))


@pytest.mark.parametrize("line", [["--path", "a"], ["--spec", "{}"]])
def test_the_spec_and_every_path_are_required(line: list[str], capsys: pytest.CaptureFixture):
    made = cli.parser("A script.")
    cli.path_argument(made, "--path", "a path")
    with pytest.raises(SystemExit):
        made.parse_args(line)
    assert "required" in capsys.readouterr().err


def test_an_option_takes_one_path_or_several():
    made = cli.parser("A script.")
    cli.path_argument(made, "--one", "a path")
    cli.path_argument(made, "--many", "paths", many=True)
    arguments = made.parse_args(["--spec", "{}", "--one", "a", "--many", "b", "c"])
    assert (arguments.one, arguments.many) == (Path("a"), [Path("b"), Path("c")])


def test_a_heartbeat_is_written_only_where_one_is_asked_for():
    made = cli.parser("A script.")
    cli.heartbeat_argument(made)
    assert made.parse_args(["--spec", "{}"]).heartbeat is None
    assert made.parse_args(["--spec", "{}", "--heartbeat", "a.json"]).heartbeat == Path("a.json")
