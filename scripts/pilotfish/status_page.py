# SPDX-License-Identifier: Apache-2.0
"""The page that shows what runs are doing: a table for each run, and in red what failed or does not move."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pilotfish.progress import FINISHED, RUNNING, duration
from pilotfish.status import FAULTS, GATES, WAITING, Stage, read


def page(root: Path, names: Iterable[str], now: float) -> Group:
    """A table for each run, the faults of its parts below it, and the room left on the disk."""
    shown = []
    for run in names:
        stages = read(root, run, now)
        shown += [_table(run, stages, now), *_notes(stages), Text("")]
    free = shutil.disk_usage(root).free
    return Group(*shown, Text(f"{_bytes(free)} free on the disk"))


def _table(run: str, stages: list[Stage], now: float) -> Table:
    total = sum(stage.disk or 0 for stage in stages)
    table = Table(
        title=f"{run}, {_bytes(total)} on disk", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("stage", overflow="ellipsis")
    for title in ("parts", "work", "tok/s", "left", "advanced", "disk"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for stage in stages:
        style = "red" if stage.state in FAULTS else "bold" if stage.state == RUNNING else ""
        table.add_row(*_cells(stage, now), style=style)
    return table


def _cells(stage: Stage, now: float) -> list[str]:
    advanced = max((part.advanced for part in stage.parts if part.advanced), default=None)
    return [
        stage.name,
        f"{stage.finished}/{len(stage.parts)}" if stage.parts else "",
        _work(stage),
        _count(speed) if (speed := _tokens_per_second(stage)) else "",
        duration(left) if (left := seconds_left(stage, now)) is not None else "",
        f"{duration(max(0, now - advanced))} ago" if advanced else "",
        _bytes(stage.disk) if stage.disk else "",
        stage.state,
    ]


def _work(stage: Stage) -> str:
    """Units done of those in all parts that have begun."""
    told = stage.heartbeats()
    if not told:
        return ""
    total = sum(each["total"] for each in told)
    return f"{_count(sum(each['done'] for each in told))}/{_count(total)} {told[0]['unit']}"


def _tokens_per_second(stage: Stage) -> float:
    """Of all parts that run now; where none does, what a part made on average."""
    if running := stage.heartbeats(RUNNING):
        return sum(each["tokens_per_second"] or 0 for each in running)
    known = [each["tokens_per_second"] for each in stage.heartbeats(FINISHED) if each["tokens_per_second"]]
    return sum(known) / len(known) if known else 0


def seconds_left(stage: Stage, now: float) -> float | None:
    """At the speed of the parts that run now, parts that wait being as large as those; None where unknown."""
    running = stage.heartbeats(RUNNING)
    rate = sum(each["rate"] or 0 for each in running)
    if not rate:
        return None
    open_units = sum(each["total"] - each["done"] for each in running)
    waiting = sum(part.state == WAITING for part in stage.parts)
    ahead = open_units + waiting * sum(each["total"] for each in running) / len(running)
    since = now - max(each["advanced"] for each in running)
    return max(0.0, ahead / rate - since)


def _notes(stages: list[Stage]) -> list[Text]:
    """A line for each part that runs, of what it does, and for each that failed or does not move, in red."""
    notes = []
    for stage in stages:
        for part in stage.parts:
            name = part.name if stage.name == GATES else f"{stage.name} {part.name}".strip()
            if part.state in FAULTS:
                notes.append(Text(f"{name}: {part.state}: {part.note}", style="red"))
            elif part.state == RUNNING and part.heartbeat:
                notes.append(Text(f"{name}: {part.heartbeat['stage']}"))
    return notes


def _count(number: float) -> str:
    """A count in at most five characters."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 100 * size:
            return f"{number / size:.0f}{letter}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if number >= size:
            return f"{number / size:.{0 if number >= 100 * size else 1}f} {unit}"
    return f"{number / 1e3:.0f} kB"
