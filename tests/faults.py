# SPDX-License-Identifier: Apache-2.0
"""The fault matrix's machinery: a fault, a copy of a finished run to inject it into, and its gates in order.

The faults themselves are in `faults_*.py`; `test_faults.py` runs them, and the README's table is made from them.
"""

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import plan
from pilotfish import files, samples
from pilotfish.errors import UserError

# The gates of a run in the order of its flow: the first that refuses is the one that caught a fault.
FLOW = (
    "validate_prompts",
    "validate_responses",
    "validate_samples",
    "validate_vocabulary",
    "validate_hidden_states",
    "validate_rehearsal",
    "validate_drafter",
    "validate_export",
    "validate_reference",
    "validate_evaluation",
)


GROUPS = ("Data", "Masks", "Map", "Capture", "Training", "Export and serving", "Runs")


@dataclass(frozen=True)
class Fault:
    """One row of the matrix: what goes wrong, who must refuse it, and what the refusal must say (a pattern)."""

    group: str
    name: str
    gate: str
    says: str
    inject: Callable[["Scene"], str | None]


FAULTS: list[Fault] = []


def fault(group: str, name: str, gate: str, says: str) -> Callable:
    """Register a function that injects one fault into a Scene.

    A fault caught by a gate only injects; one caught by another job runs it, with `Scene.run`, and the
    refusal comes out of it. A fault that a job mends by itself returns what the job said.
    """

    assert group in GROUPS, group

    def register(inject: Callable[["Scene"], None]) -> Callable[["Scene"], None]:
        FAULTS.append(Fault(group, name, gate, says, inject))
        return inject

    return register


class Scene:
    """A private copy of a finished tiny run, whose jobs can be run in this process as their rules would."""

    def __init__(self, finished: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
        shutil.copytree(finished, root, symlinks=True, ignore=shutil.ignore_patterns("logs", "locks", ".git"))
        self.root, self.monkeypatch = root, monkeypatch
        self.run_folder = Path("results") / "tiny"
        self.refused_by: str | None = None  # the gate that is running, or ran last
        monkeypatch.chdir(root)

    def path(self, name: str) -> Path:
        """A file of the run, such as `responses/train/00000-of-00002.jsonl`."""
        return self.run_folder / name

    def edit_rows(self, name: str, change: Callable[[list[dict]], Iterable[dict] | None]) -> None:
        """Rewrite a JSONL file of the run; `change` edits the rows in place or returns others."""
        rows = files.read_jsonl(self.path(name))
        files.write_jsonl(self.path(name), change(rows) or rows)

    def edit_json(self, name: str, change: Callable[[dict], None]) -> None:
        """Rewrite a JSON file of the run; `change` edits the object in place."""
        value = files.read_json(self.path(name))
        change(value)
        files.write_json(self.path(name), value)

    def edit_samples(self, split: str, change: Callable[[list[dict]], None]) -> None:
        """Rewrite a split's samples; `change` edits the rows in place."""
        path = self.path(f"samples/{split}/samples.arrow")
        rows = list(samples.load(path))
        change(rows)
        path.unlink()
        samples.write(rows, path)

    def run(self, rule: str, extra: Iterable[str] = (), **wildcards: str) -> None:
        """Run each job of a rule, or the one with these wildcards; a refusal is the job's own UserError."""
        jobs = [job for job in plan(self.root) if job.rule == rule and wildcards.items() <= job.wildcards.items()]
        if rule == "verify":  # no part of a run
            jobs = plan(self.root, target="verify")
        assert jobs, f"no job of {rule} with {wildcards}"
        for job in jobs:
            run_line([*job.line, *extra], self.monkeypatch)

    def run_gates(self, last: str) -> None:
        """Run the gates of the flow in order, up to and with `last`; the name of one that refuses is kept."""
        planned = {job.rule for job in plan(self.root)}
        for gate in FLOW[: FLOW.index(last) + 1]:
            if gate in planned:  # a run without references has none of theirs
                self.refused_by = gate
                self.run(gate)


def run_line(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python scripts/x.py ...` in this process; errors come out as they are."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", line[1:])
        runpy.run_path(line[1], run_name="in_process")["main"]()


def catch(fault: Fault, scene: Scene) -> str:
    """Inject a fault and return the message of the refusal; fails unless the right gate refuses with it."""
    try:
        message = fault.inject(scene)
        if message is None:
            assert fault.gate in FLOW, f"{fault.gate} is no gate, and what the fault ran refused nothing"
            scene.run_gates(fault.gate)
            pytest.fail(f"{fault.gate} let it pass")
    except UserError as refusal:
        message = str(refusal)
    if fault.gate in FLOW:
        assert scene.refused_by == fault.gate, f"{scene.refused_by or 'the injection'} refused first: {message}"
    assert re.search(fault.says, message), f"the refusal does not say {fault.says!r}:\n{message}"
    return message
