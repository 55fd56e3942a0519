# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a folder: what Snakemake's own lock leaves open. Imported while planning."""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from pilotfish.errors import UserError

# The kernel's lock on it lasts as long as the run that took it; Snakemake's own outlives one that was killed.
RUNNING = Path(".snakemake/running")


def clear_stale_locks() -> None:
    """Remove Snakemake's locks from this folder where the run that took them is dead."""
    if not RUNNING.is_file():
        return
    with open(RUNNING, encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for left in RUNNING.with_name("locks").glob("*.lock"):
            left.unlink(missing_ok=True)


def hold() -> TextIO:
    """Take this folder for a run: until what is returned is closed, or the process ends however it does."""
    lock = open(RUNNING, "w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"another run is at work in {Path.cwd()}; wait for its end") from None
    return lock


def refuse_the_future(inputs: Iterable[str]) -> None:
    """Snakemake removes what a job made of an input that is younger than it: all the work that it was."""
    for file in sorted(filter(os.path.exists, inputs)):
        if os.stat(file).st_mtime > time.time() + 1:
            raise UserError(
                f"{file}: written in the future, as this machine's clock has it; set the clock right, "
                f"or run `touch {file}`, and run again"
            )
