# SPDX-License-Identifier: Apache-2.0
"""Every fault of the matrix, injected into a copy of a finished run, is refused by the gate that must catch it."""

from pathlib import Path

import pytest

from faults import FAULTS, Fault, Scene, catch


@pytest.fixture
def scene(tiny_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tiny_run[0], tmp_path / "work", monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_refused_by_its_gate_with_the_place_and_the_cure(fault: Fault, scene: Scene):
    catch(fault, scene)
