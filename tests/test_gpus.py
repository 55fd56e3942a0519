# SPDX-License-Identifier: Apache-2.0
"""Two jobs never hold the same GPU, and what a job changed in its environment is put back."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pilotfish import gpus
from pilotfish.errors import UserError

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
DEVICES = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, and locks that no other process on this machine shares."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(DEVICES, "0,1")


def in_another_process(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), DEVICES: "0,1"}
    code = f"import os\nfrom pilotfish import gpus\n{code}"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("before", [None, "", "0,1"])
def test_a_lease_of_none_changes_nothing(before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    if before is None:
        monkeypatch.delenv(DEVICES)
    else:
        monkeypatch.setenv(DEVICES, before)
    with gpus.lease(0) as held:
        assert held == []
        assert os.environ.get(DEVICES) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("visible", ["", "0", "0,1", " GPU-a , GPU-b,"])
def test_more_than_visible_is_an_error_that_says_how_many_are(visible: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DEVICES, visible)
    count = len(gpus.visible_gpus())
    with (
        pytest.raises(UserError, match=rf"3 GPU\(s\) asked for, {count} visible; lower `gpu`"),
        gpus.lease(3),
    ):
        pass
    assert os.environ[DEVICES] == visible


def test_a_lease_shows_the_job_its_devices_only_and_restores_the_environment():
    with gpus.lease(1) as held:
        assert held == ["0"]
        assert os.environ[DEVICES] == "0"
    assert os.environ[DEVICES] == "0,1"


def test_an_error_in_the_job_restores_the_environment_and_frees_the_device():
    with pytest.raises(RuntimeError), gpus.lease(2):
        raise RuntimeError
    assert os.environ[DEVICES] == "0,1"
    with gpus.lease(2) as held:
        assert held == ["0", "1"]


def test_two_leases_never_share_a_device(monkeypatch: pytest.MonkeyPatch):
    with gpus.lease(1) as first:
        monkeypatch.setenv(DEVICES, "0,1")
        with gpus.lease(1) as second:
            assert (first, second) == (["0"], ["1"])


def test_a_lease_that_is_not_to_be_had_whole_takes_nothing(monkeypatch: pytest.MonkeyPatch):
    with gpus.lease(1):
        monkeypatch.setenv(DEVICES, "0,1")
        with pytest.raises(UserError, match=r"2 GPU\(s\) asked for, 1 of 2 free: another job"), gpus.lease(2):
            pass
        with gpus.lease(1) as held:
            assert held == ["1"]


def test_another_process_is_kept_out_as_well():
    with gpus.lease(1):
        other = in_another_process("with gpus.lease(1) as held: print(held)")
        both = in_another_process("with gpus.lease(2): pass")
    assert other.stdout == "['1']\n"
    assert "another job holds the rest" in both.stderr


def test_a_killed_process_gives_its_devices_back():
    killed = in_another_process("with gpus.lease(2): os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    with gpus.lease(2) as held:
        assert held == ["0", "1"]


TWO = "echo 0, GPU-a; echo 1, GPU-b"


@pytest.mark.parametrize(("driver", "visible"), [(TWO, ["0", "1"]), ("exit 9", []), (None, [])])
def test_without_the_variable_the_driver_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None, visible: list[str]
):
    monkeypatch.delenv(DEVICES)
    monkeypatch.setenv("PATH", str(tmp_path))
    if driver:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpus.visible_gpus() == visible


def test_a_variable_that_was_not_set_is_not_set_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(DEVICES)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0"])
    with gpus.lease(1):
        assert os.environ[DEVICES] == "0"
    assert DEVICES not in os.environ


def test_engines_of_one_job_are_shown_a_share_of_its_lease_each():
    with gpus.lease(2) as held:
        first, second = gpus.shares(held, 2)
        with gpus.show(first):
            assert os.environ[DEVICES] == "0"
        with gpus.show(second):
            assert os.environ[DEVICES] == "1"
        assert os.environ[DEVICES] == "0,1"


def test_engines_on_a_cpu_have_no_share_and_change_nothing():
    with gpus.lease(0) as held:
        assert gpus.shares(held, 3) == [[], [], []]
        with gpus.show([]):
            assert os.environ[DEVICES] == "0,1"


def test_a_lease_that_cannot_be_divided_evenly_is_an_error():
    with pytest.raises(UserError, match=r"2 GPU\(s\) cannot be divided among 3 engines"):
        gpus.shares(["0", "1"], 3)
