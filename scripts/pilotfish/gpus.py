# SPDX-License-Identifier: Apache-2.0
"""Lease GPUs for one job: Snakemake only counts them, so the job itself takes exclusive locks."""

import fcntl
import logging
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

GUARD = "guard"  # the lock under which devices are chosen
PATIENCE = 60  # seconds that a job which is ending has to give its devices back
POLL_SECONDS = 0.1


def visible_gpus() -> list[str]:
    """Device names this process may use: CUDA_VISIBLE_DEVICES if set, else what the driver lists."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return list(_uuids())
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    # CUDA itself stops reading at -1.
    return names[: names.index("-1")] if "-1" in names else names


def _uuids() -> dict[str, str]:
    """UUID of each GPU by index; where a cluster shows each job its own GPU 0, only the UUIDs differ."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split(", ", 1) for line in listed.stdout.splitlines())


@contextmanager
def lease(count: int) -> Iterator[list[str]]:
    """Hold `count` GPUs exclusively and put them into CUDA_VISIBLE_DEVICES.

    Snakemake's counting suffices while it lives, but jobs outlive a Snakemake that was killed, and take a while to
    stop their engines: so GPUs that are not free are waited for, PATIENCE seconds, none being held meanwhile. Raises
    UserError if they are not free then. The lock is an flock, so it goes when the process does, however it ends.
    """
    if count == 0:
        yield []
        return
    visible = visible_gpus()
    if count > len(visible):
        raise UserError(f"{count} GPU(s) asked for, {len(visible)} visible; lower `gpu` in the profile")
    held = _wait_for(count, visible)
    try:
        with show(list(held)):
            yield list(held)
    finally:
        for handle in held.values():
            os.close(handle)


def _wait_for(count: int, visible: Sequence[str]) -> dict[str, int]:
    """Open locks of `count` of the visible devices, by name."""
    folder = Path(tempfile.gettempdir()) / f"pilotfish-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    uuids = _uuids()
    locks = {name: folder / f"{_unique(uuids.get(name, name)).replace('/', '_')}.lock" for name in visible}
    until = time.monotonic() + PATIENCE
    told: set[str] = set()
    while True:
        held, holders = _take(folder / GUARD, locks, count)
        if held:
            return held
        free = f"{count} GPU(s) asked for, {len(visible) - len(holders)} of {len(visible)} free"
        who = f"process {', '.join(sorted(holders))} holds the rest"
        if time.monotonic() >= until:
            raise UserError(
                f"{free} after {PATIENCE} s: {who}. End it if an earlier run left it behind; let Snakemake schedule "
                "both jobs if it is another run's (`resources: gpu` in one profile), or wait for it"
            )
        if not told.issuperset(holders):
            logger.info("%s: %s; waiting %d s for it to end", free, who, PATIENCE)
            told.update(holders)
        time.sleep(POLL_SECONDS)


def _unique(device: str) -> str:
    """A device's name among those of all nodes, which may share the folder of locks: a bare number is each node's."""
    return f"{platform.node()}-{device}" if device.isdigit() else device


def _take(guard: Path, locks: Mapping[str, Path], count: int) -> tuple[dict[str, int], list[str]]:
    """Locks of `count` devices, or of none; and the ids of the processes that hold the others that were tried.

    One process at a time tries: of two that each had a part of what both want, neither would get the whole.
    """
    held: dict[str, int] = {}
    holders = []
    with open(guard, "a", encoding="utf-8") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for name, path in locks.items():
            if len(held) == count:
                break
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.append(os.pread(handle, 20, 0).decode())
                os.close(handle)
                continue
            held[name] = handle
            with suppress(OSError):  # a full disk spoils no more than an error's text
                os.pwrite(handle, f"{os.getpid():<20}".encode(), 0)
        if len(held) < count:
            for handle in held.values():
                os.close(handle)
            held.clear()
    return held, [holder.strip() or "?" for holder in holders]


@contextmanager
def show(names: Sequence[str]) -> Iterator[None]:
    """Let processes that start meanwhile see only these GPUs, of those that are held; none changes nothing."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def shares(held: Sequence[str], count: int) -> list[list[str]]:
    """The GPUs of a lease divided evenly among `count` engines; UserError if they cannot be."""
    each, rest = divmod(len(held), count)
    if rest:
        raise UserError(f"{len(held)} GPU(s) cannot be divided among {count} engines; ask for a multiple of {count}")
    return [list(held[start * each : (start + 1) * each]) for start in range(count)]
