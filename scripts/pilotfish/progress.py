# SPDX-License-Identifier: Apache-2.0
"""The heartbeat of a long job: how much of its work is finished and on disk, how fast, and how long it has to go."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pilotfish import files
from pilotfish.errors import UserError

WRITE_EVERY = 1.0  # seconds between two writes of the file
LOG_EVERY = 15.0  # seconds between two log lines
PATIENCE = 120  # seconds without a sign of life after which a job is shown as stale, unless its stage takes longer
RUNNING, FINISHED, FAILED = "running", "finished", "failed"
# What a heartbeat's file holds; times in unix seconds, rates of this process alone, null where unknown.
KEYS = (
    "job", "stage", "state", "error", "done", "total", "unit", "tokens", "begun", "advanced", "moved", "patience",
    "written", "rate", "tokens_per_second", "eta_seconds", "pid", "host",
)  # fmt: skip

logger = logging.getLogger(__name__)


class _Start(NamedTuple):
    """What was there as this process's work began."""

    time: float  # unix seconds
    done: int
    tokens: int


class Heartbeat:
    """A job's progress in a JSON file, on a bar where stderr is a terminal, and in log lines elsewhere.

    `done` and `tokens` are totals of finished work: what a job that is killed now would not do again. The first
    `advance`, made before any work, tells what an earlier process left, and starts the clock: rates and the time left
    are of this process alone, and know nothing of an engine's start. `with` notes how the job ends; a job that is
    killed outright leaves "running", and its pid shows that it is gone.
    """

    def __init__(self, path: Path | None, job: str, total: int, unit: str, clock: Callable[[], float] = time.time):
        """`path` None writes no file; `total` units (plural, as "rows") may be set again once it is known."""
        self.path, self.job, self.total, self.unit = path, job, total, unit
        self._clock = clock
        self._stage, self._state, self._error = "starting", RUNNING, None
        self._patience: float = PATIENCE
        self._done = self._tokens = 0
        self._start: _Start | None = None
        self._begun = self._advanced = self._moved = self._logged = clock()
        self._written = float("-inf")
        self._bar: tqdm | None = None
        self._held = ExitStack()

    def __enter__(self) -> "Heartbeat":
        if sys.stderr.isatty():
            self._held.enter_context(logging_redirect_tqdm())
            self._bar = self._held.enter_context(tqdm(total=self.total, unit=f" {self.unit}", disable=False))
        self._write()
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        self._state = FINISHED if ended_well else FAILED
        self._error = None if ended_well else _first_line(error)
        self._write()
        self._held.close()
        if ended_well and self._bar is None and self._start:
            logger.info("%s", self.line())

    def stage(self, text: str, patience: float = PATIENCE) -> None:
        """Say what the job does now, such as "loading weights"; each is written at once, so say it rarely.

        A new text is a sign of life (`moved`), no finished work (`advanced`). `patience`: the seconds that this
        stage may take without another.
        """
        if text != self._stage:
            self._moved = self._clock()
        self._stage, self._patience = text, patience
        if self._bar is not None:
            self._bar.set_description(text)
        self._write()

    def advance(self, done: int, tokens: int = 0) -> None:
        """Totals so far, of finished work. What does not grow is no advance: it leaves `advanced` as it was."""
        now = self._clock()
        if self._start is None:
            self._start = _Start(now, done, tokens)
        if done > self._done or tokens > self._tokens:
            self._advanced = self._moved = now
        self._done, self._tokens = done, tokens
        if now - self._written >= WRITE_EVERY:
            self._write()
        if self._bar is not None:
            self._show()
        elif now - self._logged >= LOG_EVERY:
            self._logged = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """Progress in words: "64 of 640 rows, 10%, 212 tokens/s, about 4 min left"."""
        share = f", {self._done / self.total:.0%}" if self.total else ""
        per_second = self._tokens_per_second()
        tokens = f", {per_second:,.0f} tokens/s" if per_second else ""
        left = self._seconds_left()
        ahead = f", about {duration(left)} left" if left else ""
        return f"{self._done} of {self.total} {self.unit}{share}{tokens}{ahead}"

    def _rate(self, so_far: int, first: int) -> float | None:
        """What grew from `first` to `so_far`, a second: since this process's work began, until its last advance."""
        if self._start is None or self._advanced <= self._start.time:
            return None
        return (so_far - first) / (self._advanced - self._start.time)

    def _units_per_second(self) -> float | None:
        return self._rate(self._done, self._start.done) if self._start else None

    def _tokens_per_second(self) -> float | None:
        return self._rate(self._tokens, self._start.tokens) if self._start else None

    def _seconds_left(self) -> float | None:
        left = max(0, self.total - self._done)
        rate = self._units_per_second()
        return left / rate if rate else None

    def _show(self) -> None:
        self._bar.total = self.total
        if self._bar.initial == 0 and self._bar.n == 0 and self._start:
            self._bar.initial = self._start.done  # the bar's own rate leaves out what was there before
        self._bar.n = self._done
        self._bar.refresh()

    def _write(self) -> None:
        if self.path is None:
            return
        self._written = self._clock()
        try:
            files.write_json(self.path, self._report())
        except (UserError, OSError) as error:
            logger.warning("no heartbeat was written, the work goes on: %s", error)

    def _report(self) -> dict:
        return {
            "job": self.job,
            "stage": self._stage,
            "state": self._state,
            "error": self._error,
            "done": self._done,
            "total": self.total,
            "unit": self.unit,
            "tokens": self._tokens,
            "begun": self._begun,
            "advanced": self._advanced,
            "moved": self._moved,
            "patience": self._patience,
            "written": self._written,
            "rate": self._units_per_second(),
            "tokens_per_second": self._tokens_per_second(),
            "eta_seconds": self._seconds_left(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }


def _first_line(error: BaseException) -> str:
    """What ended a job, in one line."""
    if isinstance(error, SystemExit):
        return f"stopped (exit status {error.code})"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}".removesuffix(": ")


def duration(seconds: float) -> str:
    """Seconds for a reader: "40 s", "4 min", "3.5 h", "2.1 d"."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds / size < limit:
            return f"{seconds / size:.1f} h" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} d"
