# SPDX-License-Identifier: Apache-2.0
"""Where a job keeps its unfinished work, so that a rerun of the same work finds it."""

import fcntl
import hashlib
import logging
import os
import platform
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pilotfish import digest, files
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

LOCK = "lock"  # beside the work: which process is at it
PATIENCE = 60  # seconds that a forsaken job has to end its engine
POLL_SECONDS = 0.1

_held: dict[Path, int] = {}  # open locks of this process


def folder(output: Path, spec: str, code: str, inputs: Iterable[Path]) -> Path:
    """`<output>.work/<digest of spec, code and inputs>`: undeclared, since Snakemake deletes declared outputs.

    `inputs` are manifests, or small files, that say what the work is done on: what was begun on other data is not
    gone on with.
    """
    parts = [spec, code, *map(files.sha256_file, inputs)]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return output.with_name(f"{output.name}.work") / key


def origin(target: Path, spec: Mapping, code: str, without: Iterable[str]) -> str:
    """Digest of what products come from, whatever the settings `without` say: the target's manifest, spec and code.

    Products of the same origin may be taken over by a job whose other settings or inputs have changed.
    """
    shared = digest.spec_json({name: value for name, value in spec.items() if name not in without})
    return hashlib.sha256(f"{files.sha256_file(target)}\n{shared}\n{code}".encode()).hexdigest()


def take(output: Path, spec: str, code: str, inputs: Iterable[Path]) -> Path:
    """Make `folder` and be the only process at work in it until this one ends; returns it.

    A job outlives the Snakemake that started it when that one is killed. The next run's job ends the forsaken one,
    with SIGTERM, and goes on from what it had finished. Raises UserError if it does not end, or runs elsewhere.
    """
    mine = folder(output, spec, code, inputs)
    path = mine.parent / LOCK
    try:
        mine.mkdir(parents=True, exist_ok=True)
        _lock(path)
        # What the other one did at its end may have been to remove it all.
        mine.mkdir(parents=True, exist_ok=True)
        os.ftruncate(_held[path], 0)
        os.pwrite(_held[path], f"{os.getpid()} {platform.node()}\n".encode(), 0)
    except OSError as error:
        raise files.unwritable(mine, error) from None
    return mine


def _lock(path: Path) -> None:
    if path in _held:
        os.close(_held.pop(path))
    told, until = None, time.monotonic() + PATIENCE
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace").split()
            os.close(handle)
            if holder and holder != told:
                told = _end(path, holder)
            if time.monotonic() > until:
                who = " on ".join(holder)
                raise UserError(
                    f"{path.parent}: process {who} is at work in it and does not end; end it and run again"
                ) from None
            time.sleep(POLL_SECONDS)
            continue
        # The file may have been removed, with all the work, between its opening and its lock.
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            _held[path] = handle
            return
        os.close(handle)


def _end(path: Path, holder: list[str]) -> list[str]:
    """Ask the process that holds a lock to end; returns who it was."""
    process, host = holder[0], holder[-1]
    if host != platform.node():
        raise UserError(f"{path.parent}: process {process} on {host} is at work in it; end it there and run again")
    logger.warning("process %s is at work in %s, left by a run that ended; it is ended", process, path.parent)
    with suppress(ProcessLookupError):
        os.kill(int(process), signal.SIGTERM)
    return holder
