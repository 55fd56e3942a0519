# SPDX-License-Identifier: Apache-2.0
"""Two jobs never hold the same GPU, and what a job changed in its environment is put back."""

import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from pilotfish import gpus
from pilotfish.errors import UserError

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
DEVICES = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, locks that no other process on this machine shares, and no patience."""
    monkeypatch.setattr(gpus, "PATIENCE", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(DEVICES, "0,1")


def in_another_process(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), DEVICES: "0,1"}
    code = f"import os\nfrom pilotfish import gpus\ngpus.PATIENCE = 0\n{code}"
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
        who = rf"2 GPU\(s\) asked for, 1 of 2 free after 0 s: process {os.getpid()} holds the rest. End it if"
        with pytest.raises(UserError, match=who), gpus.lease(2):
            pass
        with gpus.lease(1) as held:
            assert held == ["1"]


def test_another_process_is_kept_out_as_well():
    with gpus.lease(1):
        other = in_another_process("with gpus.lease(1) as held: print(held)")
        both = in_another_process("with gpus.lease(2): pass")
    assert other.stdout == "['1']\n"
    assert f"process {os.getpid()} holds the rest" in both.stderr


def test_a_killed_process_gives_its_devices_back():
    killed = in_another_process("with gpus.lease(2): os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    with gpus.lease(2) as held:
        assert held == ["0", "1"]


def test_a_process_killed_while_it_chooses_keeps_no_other_from_choosing():
    killed = in_another_process("gpus.os.pwrite = lambda *_: os.kill(os.getpid(), 9)\nwith gpus.lease(2): pass")
    assert killed.returncode == -9
    with gpus.lease(2) as held:
        assert held == ["0", "1"]


def test_a_lease_waits_for_a_job_that_is_just_ending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "PATIENCE", 60)
    with ExitStack() as ending:
        ending.enter_context(gpus.lease(2))
        monkeypatch.setenv(DEVICES, "0,1")
        monkeypatch.setattr(time, "sleep", lambda _: ending.close())
        with gpus.lease(2) as held:
            assert held == ["0", "1"]


def test_a_lease_that_waits_holds_nothing_that_another_could_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "PATIENCE", 60)

    def meanwhile(_: float) -> None:
        assert in_another_process("with gpus.lease(1) as held: print(held)").stdout == "['1']\n"
        raise KeyboardInterrupt

    with gpus.lease(1):
        monkeypatch.setenv(DEVICES, "0,1")
        monkeypatch.setattr(time, "sleep", meanwhile)
        with pytest.raises(KeyboardInterrupt), gpus.lease(2):
            pass


COMPETITORS, LEASES = 36, 5  # processes, and how often each leases; every third dies with its devices held
DEVICE_NAMES = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
# A line is one write to a file opened with O_APPEND: lines of all processes stand in the order in which they were made.
COMPETITOR = """
import os, sys
from pilotfish import gpus
journal = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def write(what, held):
    os.write(journal, "".join(f"{what} {number} {device}\\n" for device in held).encode())
number = int(sys.argv[1])
def waits(seconds, sleep=gpus.time.sleep):
    write("waits", ["for-any"])
    sleep(seconds / 10)
gpus.time.sleep = waits
sys.stdin.read()  # until all are let go at once
for turn in range(LEASES):
    os.environ["CUDA_VISIBLE_DEVICES"] = DEVICES
    with gpus.lease(1 + (number + turn) % 3) as held:
        write("takes", held)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(held)
        while len({line.split()[1] for line in open("journal")}) < COMPETITORS:  # until all have come
            os.sched_yield()
        if number % 3 == 0 and turn == number % LEASES:
            write("dies_with", held)
            os.kill(os.getpid(), 9)
        write("gives", held)
"""


def test_of_dozens_of_processes_no_two_ever_hold_one_device_though_holders_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ",".join(DEVICE_NAMES)
    code = f"LEASES, COMPETITORS, DEVICES = {LEASES}, {COMPETITORS}, {names!r}\n{COMPETITOR}"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), DEVICES: names}
    reading, writing = os.pipe()
    competitors = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            cwd=tmp_path,
            env=environment,
            stdin=reading,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(COMPETITORS)
    ]
    os.close(reading)
    os.close(writing)
    said = [each.communicate()[1] for each in competitors]
    ended = [each.returncode for each in competitors]
    assert ended == [0 if number % 3 else -9 for number in range(COMPETITORS)], "".join(said)
    holders: dict[str, str] = {}
    waited = set()
    for line in (tmp_path / "journal").read_text(encoding="utf-8").splitlines():
        what, number, device = line.split()
        if what == "waits":
            waited.add(number)
        elif what == "takes":
            assert device not in holders, f"{device} had two holders, {number} and {holders[device]}"
            holders[device] = number
        else:
            assert holders.pop(device) == number
    assert holders == {}
    assert len(waited) >= COMPETITORS - len(DEVICE_NAMES)
    monkeypatch.setenv(DEVICES, names)
    with gpus.lease(len(DEVICE_NAMES)) as held:
        assert held == DEVICE_NAMES


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


def test_a_number_on_another_node_is_another_device_though_the_nodes_share_the_folder_of_locks(
    monkeypatch: pytest.MonkeyPatch,
):
    with gpus.lease(2):
        monkeypatch.setenv(DEVICES, "0,1")
        monkeypatch.setattr(platform, "node", lambda: "another")
        with gpus.lease(2) as held:
            assert held == ["0", "1"]


@pytest.mark.parametrize("names", [("0", "GPU-a"), ("GPU-a", "0")])
def test_a_number_and_a_uuid_are_one_device_where_the_driver_says_so_on_whatever_node(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpus, "_uuids", lambda: {"0": "GPU-a"})
    first, second = names
    monkeypatch.setenv(DEVICES, first)
    with gpus.lease(1):
        monkeypatch.setenv(DEVICES, second)
        monkeypatch.setattr(platform, "node", lambda: "another")
        with pytest.raises(UserError, match="0 of 1 free"), gpus.lease(1):
            pass


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
