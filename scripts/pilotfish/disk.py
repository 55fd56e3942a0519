# SPDX-License-Identifier: Apache-2.0
"""Room on the disk: how much is free where a path lies, and a clean stop before there is too little."""

import os
from pathlib import Path

from pilotfish.errors import UserError

RESERVE = 1 << 30  # bytes that stay free: logs, journals and the rest of the machine go on writing
UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` lies; `path` itself need not exist yet."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def check_room(path: Path, coming: int) -> None:
    """Raise UserError when fewer than `coming` bytes and the reserve are free where `path` lies."""
    free = free_bytes(path)
    if free < coming + RESERVE:
        raise UserError(
            f"{path}: {amount(coming)} are to be written here, and {amount(RESERVE)} stay in reserve, but "
            f"{amount(free)} are free. Make room and run again: finished work is kept, and the next run goes on from it"
        )


def amount(count: float) -> str:
    """Bytes as people write them, in powers of 1,000: "828 GB", "4.2 MB"."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {UNITS[unit]}" if unit and count < 9.95 else f"{count:.0f} {UNITS[unit]}"
