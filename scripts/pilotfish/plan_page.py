# SPDX-License-Identifier: Apache-2.0
"""A plan as a page of at most 80 columns."""

import textwrap

from pilotfish.disk import amount
from pilotfish.planning import Plan

WIDTH = 80
SHAPE = "{:<22} {:>5} {:>4} {:>7} {:>7} {:>7} {:>7}  {}"


def count(number: float) -> str:
    """A count as people write it, in powers of 1,000: "21.0M"."""
    unit = 0
    while number >= 999.5 and unit < 4:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f}" if not unit else f"{number:.{1 if number < 99.95 else 0}f}{'kMGT'[unit - 1]}"


def duration(seconds: float) -> str:
    """Seconds as people say them: "33 s", "12 min", "3.4 h", "5.2 d"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} min" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def render(made: Plan, free: int | None = None) -> str:
    """The plan as a page of at most 80 columns; `free` are the bytes free where results/ lies."""
    runs: dict[str, str] = {}
    lines = [SHAPE.format("stage", "jobs", "GPUs", "rows", "tokens", "disk", "time", "rates")]
    for stage in made.stages:
        numbers = [stage.jobs, stage.gpus, stage.rows, stage.tokens]
        shown = [count(number) if number else "-" for number in numbers]
        if not stage.jobs:
            continue
        disk = amount(stage.kept) if stage.kept else "-"
        lines.append(SHAPE.format(stage.name, *shown, disk, duration(stage.seconds), _marked(stage.basis, runs)))
    jobs = sum(stage.jobs for stage in made.stages)
    lines.append(SHAPE.format("total", jobs, "", "", "", amount(made.kept), duration(made.seconds), "").rstrip())
    tail = [
        f"Peak disk {amount(made.peak)}, of which hidden states {amount(made.state_bytes)}: {count(made.state_tokens)} "
        f"tokens of {made.bytes_per_token:,} bytes." + ("" if free is None else f" Free: {amount(free)}."),
        f"GPU-hours, where each job has its GPUs: {made.gpu_hours:.1f}. Times sum over jobs; jobs that run side by "
        "side take less.",
        *(f"{mark} {basis}" for basis, mark in runs.items()),
        *(f"- {note}" for note in made.notes),
        *filter(None, [made.advice(free)]),
    ]
    wrapped = [line for text in tail for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]
    head = textwrap.wrap(f"Plan of run {made.run}, from nothing. Target {made.target}", WIDTH)
    return "\n".join([*head, "", *lines, "", *wrapped]) + "\n"


def _marked(basis: str, runs: dict[str, str]) -> str:
    """`assumed`, or a mark for where a rate was measured, explained below the table."""
    if basis == "assumed":
        return basis
    return runs.setdefault(basis, f"[{len(runs) + 1}]")
