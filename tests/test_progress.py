# SPDX-License-Identifier: Apache-2.0
"""A heartbeat tells finished work, its speed and how the job ended, whatever ends it."""

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish import files, progress
from pilotfish.errors import UserError
from pilotfish.progress import Heartbeat

BEGUN = 1_000_000.0  # unix seconds
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = BEGUN

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs/respond/train.heartbeat.json"


def rows(path: Path | None, clock: Clock, total: int = 640) -> Heartbeat:
    return Heartbeat(path, "respond", total, "rows", clock)


def test_the_file_is_there_from_the_first_moment_and_says_which_process_writes_it(path: Path, clock: Clock):
    with rows(path, clock):
        told = files.read_json(path)
    assert told.keys() == set(progress.KEYS)
    assert (told["job"], told["state"], told["done"], told["total"]) == ("respond", "running", 0, 640)
    assert (told["pid"], told["host"], told["begun"]) == (os.getpid(), socket.gethostname(), BEGUN)
    assert told["rate"] is told["eta_seconds"] is told["tokens_per_second"] is None, "nothing is known yet"


def test_rate_and_time_left_are_of_finished_work(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        beat.advance(0)
        clock.now += 10
        beat.advance(64, 2000)
        told = files.read_json(path)
    assert (told["rate"], told["tokens_per_second"], told["eta_seconds"]) == (6.4, 200, 90)


def test_what_an_earlier_process_finished_counts_as_done_but_not_as_speed(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        beat.advance(600, 90_000)
        clock.now += 10
        beat.advance(610, 91_000)
        told = files.read_json(path)
    assert (told["done"], told["rate"], told["tokens_per_second"], told["eta_seconds"]) == (610, 1, 100, 30)


def test_the_start_of_an_engine_is_no_part_of_the_speed(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        beat.stage("loading weights")
        clock.now += 1440
        beat.advance(0)
        clock.now += 10
        beat.advance(10)
        assert files.read_json(path)["rate"] == 1


def test_the_file_is_written_at_most_once_a_second_and_at_the_end_always(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        for done in (1, 2, 3):
            clock.now += 0.3
            beat.advance(done)
        assert files.read_json(path)["done"] == 0
        clock.now += 0.1
        beat.advance(4)
        assert files.read_json(path)["done"] == 4
        beat.advance(5)
    assert files.read_json(path)["done"] == 5


def test_a_stage_is_written_at_once_and_is_a_sign_of_life_but_no_advance(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        clock.now += 0.5
        beat.stage("loading weights")
        told = files.read_json(path)
        assert (told["stage"], told["moved"], told["advanced"]) == ("loading weights", BEGUN + 0.5, BEGUN)
        clock.now += 60
        beat.stage("loading weights", patience=1800)
        assert files.read_json(path)["moved"] == BEGUN + 0.5, "the same stage again is none"
        assert (told["patience"], files.read_json(path)["patience"]) == (120, 1800)


def test_what_does_not_grow_is_no_advance(path: Path, clock: Clock):
    with rows(path, clock) as beat:
        clock.now += 5
        beat.advance(3)
        clock.now += 100
        beat.advance(3)
        told = files.read_json(path)
    assert (told["advanced"], told["moved"], told["written"]) == (BEGUN + 5, BEGUN + 5, BEGUN + 105)


def test_a_total_that_becomes_known_later_is_taken(path: Path, clock: Clock):
    with rows(path, clock, total=0) as beat:
        assert beat.line() == "0 of 0 rows"
        beat.total = 8
        beat.advance(8)
    assert files.read_json(path)["total"] == 8


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("p.jsonl, line 3: no id\nadd one"), "p.jsonl, line 3: no id"),
        (ValueError("not\nthis"), "ValueError: not"),
        (AssertionError(), "AssertionError"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(143), "stopped (exit status 143)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_job_leaves_the_first_line_of_its_error(path: Path, clock: Clock, error: BaseException, told: str):
    with pytest.raises(type(error)), rows(path, clock):
        raise error
    left = files.read_json(path)
    assert (left["state"], left["error"]) == ("failed", told)


@pytest.mark.parametrize("code", [0, None])
def test_a_job_that_ends_well_is_finished(path: Path, clock: Clock, code: int | None):
    with pytest.raises(SystemExit), rows(path, clock):
        sys.exit(code)
    left = files.read_json(path)
    assert (left["state"], left["error"]) == ("finished", None)


@pytest.mark.parametrize(
    ("sent", "state"), [(signal.SIGTERM, "failed"), (signal.SIGKILL, "running")], ids=["SIGTERM", "SIGKILL"]
)
def test_a_signal_leaves_what_it_can(path: Path, sent: signal.Signals, state: str):
    body = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pilotfish import cli\n"
        "from pilotfish.progress import Heartbeat\ndef main():\n"
        "    with Heartbeat(Path(sys.argv[1]), 'respond', 9, 'rows') as beat:\n"
        f"        beat.advance(4)\n        beat.stage('x')\n        os.kill(os.getpid(), {int(sent)})\n"
        "        signal.pause()\n"
        "cli.run(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    subprocess.run([sys.executable, "-c", body, str(path)], env=environment, capture_output=True)
    left = files.read_json(path)
    assert (left["state"], left["done"]) == (state, 4)


def test_without_a_terminal_progress_is_a_line_every_15_seconds_and_one_at_the_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with rows(None, clock) as beat:
        beat.advance(0)
        for done in range(32, 129, 32):
            clock.now += 7.5
            beat.advance(done, done * 50)
    assert caplog.messages == [
        "64 of 640 rows, 10%, 213 tokens/s, about 2 min left",
        "128 of 640 rows, 20%, 213 tokens/s, about 2 min left",
        "128 of 640 rows, 20%, 213 tokens/s, about 2 min left",
    ]


def test_on_a_terminal_progress_is_a_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with rows(None, clock) as beat:
        beat.stage("generating")
        beat.advance(600)
        clock.now += 20
        beat.advance(640)
    shown = capsys.readouterr().err
    assert "generating" in shown and "640/640" in shown and "tokens/s" not in shown


def test_a_heartbeat_that_cannot_be_written_stops_no_work(tmp_path: Path, clock: Clock, caplog):
    (tmp_path / "logs").write_text("a file where a folder is needed")
    with rows(tmp_path / "logs" / "x.heartbeat.json", clock) as beat:
        beat.advance(1)
    assert "no heartbeat was written, the work goes on" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (240, "4 min"), (12_600, "3.5 h"), (181_440, "2.1 d")]
)
def test_durations_are_told_in_the_unit_that_fits(seconds: float, text: str):
    assert progress.duration(seconds) == text
