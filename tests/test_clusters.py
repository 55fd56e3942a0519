# SPDX-License-Identifier: Apache-2.0
"""Clusters: jobs through a real Slurm, one of them cancelled at its work; what else the profiles ask for."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import slurm
from conftest import REPOSITORY, changed
from pilotfish import files
from workspace import Workspace

RUN = Path("results") / "tiny"
PART = "00001-of-00002"  # of the held-out prompts: the one whose job is cancelled
MADE_ANEW = ("responses", "samples", "hidden_states")
ENDED = Counter(respond=2, capture=2, validate_responses=1, assemble_samples=1, validate_samples=1)
ENDED += Counter(validate_hidden_states=1)
PATIENCE = 300  # seconds until an engine must have answered something
POLL_SECONDS = 0.05


@contextmanager
def started(line: list[str], root: Path, environment: dict[str, str], said: Path):
    """A run that is ended in any case."""
    with open(said, "wb") as out:
        running = subprocess.Popen(line, cwd=root, env=environment, stdout=out, stderr=out)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def cancel_at_work(root: Path, environment: dict[str, str], running: subprocess.Popen) -> None:
    """Cancel the Slurm job of `PART` once its engine has answered a first row."""
    answered = root / RUN / "responses" / "heldout"
    until = time.monotonic() + PATIENCE
    while not any(path.stat().st_size for path in answered.glob(f"{PART}.jsonl.work/*/rows.jsonl")):
        assert running.poll() is None and time.monotonic() < until, "no row was answered"
        time.sleep(POLL_SECONDS)
    (job,) = (
        job for job, comment in slurm.jobs(environment).items() if comment.endswith(f"respond_wildcards_heldout_{PART}")
    )
    subprocess.run(["scancel", job], env=environment, check=True)


@pytest.mark.skipif(bool(slurm.missing()), reason="no Slurm here: apt-get install slurm-wlm munge")
def test_a_part_that_is_cancelled_is_retried_alone_and_slurm_makes_what_one_machine_makes(
    tiny_run: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    """All held-out rows anew, from the answers on: engines and a gate lease the devices that Slurm gave their jobs."""
    root, said = tmp_path / "work", tmp_path / "said.txt"
    # Short, since vLLM's sockets lie in it.
    temporary = Path(tempfile.mkdtemp(prefix="pilotfish-"))
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    shutil.copytree(tiny_run[0], root, symlinks=True)
    for folder in MADE_ANEW:
        shutil.rmtree(root / RUN / folder / "heldout")
    monkeypatch.setenv("TMPDIR", str(temporary))
    line = slurm.line(str(RUN / "hidden_states" / "heldout" / "manifest.json"))
    with slurm.running(tmp_path / "slurm") as environment, started(line, root, environment, said) as running:
        cancel_at_work(root, environment, running)
        ended = running.wait()
    told = said.read_text(encoding="utf-8")
    assert ended == 0, told[-6000:]

    assert Counter(re.findall(r"^rule (\w+):", told, re.MULTILINE)) == ENDED + Counter(respond=1)
    assert told.count("Trying to restart job") == told.count("SLURM status is: 'CANCELLED'") == 1
    log = (root / "logs" / "tiny" / "respond" / f"heldout-{PART}.log").read_text(encoding="utf-8")
    assert re.search(r"[1-9]\d* of 24 rows are already done", log)
    for name in ("responses", "samples"):
        manifest = RUN / name / "heldout" / "manifest.json"
        assert (root / manifest).read_bytes() == (tiny_run[0] / manifest).read_bytes()
    assert states_of(root) == states_of(tiny_run[0])
    # Two engines at once, and each took the lock of its own device.
    locks = {path.stem for path in temporary.glob("pilotfish-gpus-*/*.lock")}
    assert locks == {f"{slurm.NODE}-{number}" for number in range(2)}


def states_of(root: Path) -> dict:
    """Numbers of rows, tokens and layers; the states themselves differ by roundings."""
    return files.read_json(root / RUN / "hidden_states" / "heldout" / "manifest.json")["statistics"]


def planned(root: Path, profile: str, config: dict, *arguments: str) -> list[str]:
    """The jobs of a dry run of everything, a text each."""
    (root / "my.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    line = [slurm.python_of(profile), "-m", "snakemake", "-n", "--forceall", "--profile", f"profiles/{profile}"]
    ran = subprocess.run([*line, "--configfile", "my.yaml", *arguments], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.split(r"\n(?=rule )", ran.stdout + ran.stderr)


def test_parts_are_jobs_of_their_own_with_an_engine_on_the_gpus_of_one_node_each(workspace: Workspace):
    config = changed(responses__parts=4, engine__tensor_parallel=8, evaluation__together=False)
    jobs = [job for job in planned(workspace.root, "slurm", config) if job.startswith("rule respond:")]
    parts = Counter(re.findall(r"part=(\S+)", "".join(jobs)))
    assert set(parts) == {f"{part:05d}-of-00004" for part in range(4)} and len(jobs) == sum(parts.values())
    assert all("gpu=8" in job and "nodes=1" in job for job in jobs)


def test_where_slurm_cannot_be_reached_the_run_says_where_to_start_it(workspace: Workspace, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "uname", "which"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    line = [slurm.python_of("slurm"), "-m", "snakemake", "--forceall", "--profile", "profiles/slurm"]
    environment = {**os.environ, "PATH": str(tmp_path / "bin")}
    ran = subprocess.run(line, cwd=workspace.root, env=environment, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "no `sbatch` on PATH: start the run on a node that submits jobs to Slurm" in ran.stdout + ran.stderr


def test_kubernetes_is_planned_and_its_profile_says_that_it_was_never_executed(workspace: Workspace):
    jobs = planned(workspace.root, "kubernetes", changed(), "--default-storage-prefix", str(workspace.root))
    asks = "gpu_manufacturer=nvidia, scale=0, gpu=1"
    assert [job for job in jobs if job.startswith("rule train:") and asks in job.replace("mem_mb=16000, ", "")]
    assert "NEVER EXECUTED" in (REPOSITORY / "profiles" / "kubernetes" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes"])
def test_what_lies_over_the_environment_pins_nothing_to_another_version(cluster: str):
    over, cpu, gpu = (pins(REPOSITORY / "envs" / f"{name}.txt") for name in (cluster, "cpu", "gpu"))
    assert over["snakemake"] == cpu["snakemake"] == gpu["snakemake"]
    assert all(version == below.get(name, version) for below in (cpu, gpu) for name, version in over.items())


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE))
