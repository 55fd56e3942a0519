# SPDX-License-Identifier: Apache-2.0
"""Lease GPUs for one job: Snakemake only counts them, so the job itself takes exclusive locks."""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pilotfish.errors import UserError


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
    """Hold `count` GPUs exclusively and put them into CUDA_VISIBLE_DEVICES; UserError if they are not free.

    The lock is an flock, so it goes when the process does, however it ends.
    """
    if count == 0:
        yield []
        return
    visible = visible_gpus()
    if count > len(visible):
        raise UserError(f"{count} GPU(s) asked for, {len(visible)} visible; lower `gpu` in the profile")
    folder = Path(tempfile.gettempdir()) / f"pilotfish-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    uuids = _uuids()
    held: dict[str, int] = {}
    try:
        for name in visible:
            if len(held) == count:
                break
            handle = os.open(folder / f"{uuids.get(name, name).replace('/', '_')}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[name] = handle
            except BlockingIOError:
                os.close(handle)
        if len(held) < count:
            raise UserError(
                f"{count} GPU(s) asked for, {len(held)} of {len(visible)} free: another job holds the rest; "
                "let Snakemake schedule both jobs (`resources: gpu` in one profile), or wait for it"
            )
        with show(list(held)):
            yield list(held)
    finally:
        for handle in held.values():
            os.close(handle)


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
