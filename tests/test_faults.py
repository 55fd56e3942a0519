# SPDX-License-Identifier: Apache-2.0
"""Every fault of the matrix, injected into a copy of a finished run, is refused by the gate that must catch it."""

from pathlib import Path

import pytest

import faults_capture  # noqa: F401
import faults_data  # noqa: F401
import faults_drafter  # noqa: F401
import faults_prompts  # noqa: F401
import faults_runs  # noqa: F401
import faults_serving  # noqa: F401
import faults_training  # noqa: F401
from faults import FAULTS, Fault, Scene, catch

CLEAN_NOTE = (
    "And the other way: `python tests/clean_runs.py FOLDER` makes ten clean runs with other seeds, sizes and settings "
    "through the real engine; every gate must pass all of them (`docs/benchmarks.md`)."
)


@pytest.fixture
def scene(tiny_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tiny_run[0], tmp_path / "work", monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_refused_by_its_gate_with_the_place_and_the_cure(fault: Fault, scene: Scene):
    catch(fault, scene)
