# SPDX-License-Identifier: Apache-2.0
"""What a run is doing, read from disk alone: heartbeats, logs and outputs, whoever runs it and wherever."""

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pilotfish import costs, files
from pilotfish.errors import UserError
from pilotfish.progress import FAILED, FINISHED, KEYS, PATIENCE, RUNNING, duration

STALE, GONE, WAITING = "stale", "gone", "waiting"
FAULTS = (FAILED, GONE, STALE)  # shown in red; the first of a stage's parts names the stage
GATES = "gates"
TAIL = 8192  # bytes of a log in which a fault is looked for
PART = re.compile(r"(.*?)\d{5}-of-(\d{5})")
# What a job leaves below results/RUN when all of it is done; its name is made of what stands for the stars.
NUMBERED = "[0-9]*-of-[0-9]*"
OUTPUTS = {
    "prepare_target": "target/manifest.json",
    "collect_prompts": "prompts/train.jsonl",
    "collect_evaluation_set": "prompts/*.jsonl",
    "validate_prompts": "prompts/*/manifest.json",
    "respond": f"responses/*/{NUMBERED}.jsonl",
    "validate_responses": "responses/*/manifest.json",
    "assemble_samples": "samples/*/samples.arrow",
    "validate_samples": "samples/*/manifest.json",
    "capture": f"hidden_states/*/{NUMBERED}/index.json",
    "validate_hidden_states": "hidden_states/*/manifest.json",
    "map_vocabulary": "vocabulary/*/map.safetensors",
    "validate_vocabulary": "vocabulary/*/manifest.json",
    "rehearse": "drafters/*/rehearsal/served.json",
    "validate_rehearsal": "drafters/*/rehearsal/manifest.json",
    "train": "drafters/*/checkpoint/model.safetensors",
    "validate_drafter": "drafters/*/manifest.json",
    "export": "export/*/model.safetensors",
    "validate_export": "export/*/manifest.json",
    "adopt_reference": "references/*/adopted.json",
    "validate_reference": "references/*/manifest.json",
    "replay": "evaluation/*/*/replay.json",
    "serve": "evaluation/baseline/served.json",
    "validate_evaluation": "evaluation/*/manifest.json",
    "report": "report.md",
}


class Folders(NamedTuple):
    """Where a run leaves its traces."""

    results: Path
    logs: Path
    benchmarks: Path


@dataclass(frozen=True)
class Part:
    """One job of a stage; times in unix seconds, None where nothing tells."""

    name: str
    state: str
    advanced: float | None = None
    heartbeat: dict | None = None
    note: str = ""  # what went wrong


@dataclass(frozen=True)
class Stage:
    """All that is known of a rule's jobs, or of all gates."""

    name: str
    parts: list[Part]
    disk: int | None  # bytes; None where the stage has no folder of its own

    @property
    def state(self) -> str:
        """The worst that a part is; finished only where all are."""
        found = {part.state for part in self.parts}
        return next((state for state in (*FAULTS, RUNNING, WAITING, FINISHED) if state in found), "")

    @property
    def finished(self) -> int:
        return sum(part.state == FINISHED for part in self.parts)

    def heartbeats(self, *states: str) -> list[dict]:
        return [part.heartbeat for part in self.parts if part.heartbeat and (not states or part.state in states)]


def runs(root: Path) -> list[str]:
    """Names of the runs below `root`, in order."""
    return sorted(path.name for path in root.glob("logs/*") if path.is_dir())


def read(root: Path, run: str, now: float) -> list[Stage]:
    """The stages of a run in the workflow's order, its gates and its report last; UserError where it has no logs."""
    folders = Folders(*[root / name / run for name in ("results", "logs", "benchmarks")])
    if run not in runs(root):
        raise UserError(f"logs/{run}: no such run; there are: {', '.join(runs(root)) or 'none yet'}")
    seen_files: set[int] = set()
    stages = [
        Stage(rule, _parts(folders, rule, now), _disk(folders.results / folder, seen_files) if folder else None)
        for rule, folder in costs.STAGES
    ]
    gates = [
        Part(f"{rule} {part.name}".strip(), part.state, part.advanced, part.heartbeat, part.note)
        for rule in OUTPUTS
        if rule.startswith("validate_")
        for part in _parts(folders, rule, now)
    ]
    return [*stages, Stage(GATES, gates, None), Stage("report", _parts(folders, "report", now), None)]


def _parts(folders: Folders, rule: str, now: float) -> list[Part]:
    """Every job of a rule that left a log or a heartbeat, and the other parts of its split."""
    outputs = _outputs(folders.results, OUTPUTS[rule])
    one_job = "*" not in OUTPUTS[rule]
    place = "" if one_job else f"{rule}/"  # the log of a rule with one job lies beside the others' folders
    seen = {rule} & _seen(folders.logs) if one_job else _seen(folders.logs / rule)
    names = sorted({each for name in seen for each in _siblings(name)})
    return [_part(folders, f"{place}{name}", "" if one_job else name, outputs, now) for name in names]


def _seen(folder: Path) -> set[str]:
    """Names of the jobs that have a log or a heartbeat in a folder of logs."""
    logs = {path.stem for path in folder.glob("*.log") if not path.stem.endswith(".engine")}
    return logs | {path.name.removesuffix(".heartbeat.json") for path in folder.glob("*.heartbeat.json")}


def _siblings(name: str) -> Iterator[str]:
    """A part's name says how many parts there are: all of them, begun or not."""
    if matched := PART.fullmatch(name):
        prefix, count = matched.groups()
        yield from (f"{prefix}{number:05d}-of-{count}" for number in range(int(count)))
    else:
        yield name


def _outputs(results: Path, pattern: str) -> dict[str, Path]:
    """Jobs whose output is there, by name; "" for a rule of one job."""
    fields = re.compile("/".join(re.escape(step).replace(r"\*", "([^/]*)") for step in _starred(pattern).split("/")))
    found = ((fields.fullmatch(path.relative_to(results).as_posix()), path) for path in results.glob(pattern))
    return {"-".join(matched.groups()): path for matched, path in found if matched}


def _starred(pattern: str) -> str:
    return pattern.replace(NUMBERED, "*")


def _part(folders: Folders, place: str, name: str, outputs: dict[str, Path], now: float) -> Part:
    """The state of a job whose log lies at `place` below the run's logs, from what it left on disk."""
    log_file, output = folders.logs / f"{place}.log", outputs.get(name)
    log, heartbeat = _changed(log_file), _heartbeat(folders.logs / f"{place}.heartbeat.json")
    if heartbeat and heartbeat["state"] == RUNNING:
        return _beating(name, heartbeat, now)
    if heartbeat and heartbeat["state"] == FAILED:
        return Part(name, FAILED, heartbeat["advanced"], heartbeat, heartbeat.get("error") or "failed")
    if output:
        return Part(name, FINISHED, heartbeat["advanced"] if heartbeat else _changed(output), heartbeat)
    benchmark = _changed(folders.benchmarks / f"{place}.tsv") or 0  # written by Snakemake after the job's end
    if log is None or log <= max(benchmark, heartbeat["written"] if heartbeat else 0):
        return Part(name, WAITING)  # not begun, or its output was taken away
    if fault := _fault(log_file):
        return Part(name, FAILED, log, note=fault)
    if now - log > PATIENCE:
        return Part(name, STALE, log, note=f"its log is silent for {duration(now - log)}, and there is no output")
    return Part(name, RUNNING, log)


def _beating(name: str, heartbeat: dict, now: float) -> Part:
    """The state of a job whose heartbeat says that it runs."""
    advanced, here = heartbeat["advanced"], heartbeat["host"] == socket.gethostname()
    if here and not _alive(heartbeat["pid"]):
        note = f"process {heartbeat['pid']} is gone; run again: what was finished is kept"
        return Part(name, GONE, advanced, heartbeat, note)
    quiet = now - heartbeat["moved"]
    if quiet > heartbeat["patience"]:
        where = f"process {heartbeat['pid']} on {heartbeat['host']}"
        note = f"not moved for {duration(quiet)}: {heartbeat['stage']} ({where})"
        return Part(name, STALE, advanced, heartbeat, note)
    return Part(name, RUNNING, advanced, heartbeat)


def _heartbeat(path: Path) -> dict | None:
    """A job's heartbeat; None where there is none, or none that can be read."""
    try:
        found = files.read_json(path)
    except UserError:
        return None
    return found if found.keys() >= set(KEYS) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _changed(path: Path) -> float | None:
    """When a file was last written, in unix seconds; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _fault(log: Path) -> str:
    """The error that a job's log ends with, in one line; empty where there is none."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, log.stat().st_size - TAIL))
            text = handle.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    if told := re.findall(r"^\[\w+\] error: (.*)$", text, re.MULTILINE):
        return told[-1]
    _, traceback, after = text.rpartition("Traceback (most recent call last):")
    raised = [line for line in after.splitlines() if line and not line[0].isspace()]
    return raised[0] if traceback and raised else ""


def _disk(folder: Path, seen: set[int]) -> int:
    """Bytes below a folder; a file with two names counts once, one that vanishes meanwhile not at all."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                size += found.st_size
    return size
