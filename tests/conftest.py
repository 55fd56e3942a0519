# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several modules share: a copy of the workflow, the tiny target, one finished run of it."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = yaml.safe_load((REPOSITORY / "config" / "default.yaml").read_text(encoding="utf-8"))
ABSENT = object()


def changed(**changes) -> dict:
    """The default configuration with `section__key=value` changes; ABSENT removes the key."""
    config = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = config
        for section in sections:
            place = place[section]
        if value is ABSENT:
            del place[key]
        else:
            place[key] = value
    return config


def copy_workflow(root: Path, source: Path = REPOSITORY) -> Path:
    """Copy what a run needs into `root`, so that a test may change it and leaves nothing behind."""
    for name in ("rules", "scripts", "config", "envs", "profiles"):
        shutil.copytree(source / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "Snakefile", root)
    return root


def snakemake(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Snakemake as a user does, on the tiny configuration; output is captured as text."""
    line = [sys.executable, "-m", "snakemake", *arguments, "--profile", "profiles/cpu"]
    return subprocess.run([*line, "--configfile", "config/tiny.yaml"], cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the default configuration, each of whose files is a stand-in."""
    from workspace import Workspace

    workspace = Workspace(copy_workflow(tmp_path_factory.mktemp("finished") / "work"))
    workspace.finish()
    return workspace.root


@pytest.fixture
def workspace(finished: Path, tmp_path: Path):
    """A private copy of the finished run, times included."""
    from workspace import Workspace

    root = tmp_path / "work"
    shutil.copytree(finished, root, copy_function=shutil.copy2)
    return Workspace(root)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target's folder, trained once a session."""
    from tiny_target import build_tiny_target

    folder = tmp_path_factory.mktemp("target") / "tiny-target"
    build_tiny_target(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_workflow(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A copy of the workflow beside the tiny target; nothing has run in it."""
    root = copy_workflow(tmp_path_factory.mktemp("tiny") / "work")
    (root / "results").mkdir()
    shutil.copytree(tiny_target, root / "results" / "tiny-target")
    return root


@pytest.fixture(scope="session")
def tiny_run(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The tiny configuration run from end to end through the real engine: its folder, and what was printed.

    PILOTFISH_TINY_RUN names a folder where that was done already, with the printed text in `said.txt`: for
    work on the tests alone, since a change of the code is not seen.
    """
    if given := os.getenv("PILOTFISH_TINY_RUN"):
        return Path(given), (Path(given) / "said.txt").read_text(encoding="utf-8")
    tiny_workflow = request.getfixturevalue("tiny_workflow")
    ran = snakemake(tiny_workflow)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said[-6000:]
    return tiny_workflow, said


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a hub for anything."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
