# SPDX-License-Identifier: Apache-2.0
"""What may befall a run, on real jobs that need no engine: it says what is wrong, loses nothing and goes on."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import copy_workflow, snakemake
from helpers import execute, flip_bit, heed_signals
from pilotfish import files, repairs, work
from same_products import left_over

RUN = Path("results") / "tiny"
SAMPLES = RUN / "samples" / "fresh" / "samples.arrow"
MAP = RUN / "vocabulary" / "256" / "map.safetensors"
PROMPTS = RUN / "prompts" / "train.jsonl"
DAY = 86_400  # seconds
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WAITS = (signal.SIGTERM, signal.SIGINT)  # Snakemake lets running jobs finish, and starts no other
# Rules whose jobs can be held at their first write, and what that is.
HELD = {"collect_prompts": PROMPTS, "assemble_samples": SAMPLES, "map_vocabulary": MAP}


@pytest.fixture(scope="module")
def finished(tiny_run: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the present workflow, as Snakemake believes."""
    root = copy_workflow(tmp_path_factory.mktemp("finished") / "work")
    shutil.copytree(tiny_run[0] / "results", root / "results", symlinks=True)
    execute(root, root / "config" / "tiny.yaml", "touch", forceall=True)
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """A private copy of it, times included."""
    shutil.copytree(finished, tmp_path / "work", symlinks=True)
    return tmp_path / "work"


def run(root: Path, *arguments: str) -> tuple[int, str]:
    """Exit status of a run, and what it said."""
    ran = snakemake(root, *arguments)
    return ran.returncode, ran.stdout + ran.stderr


def mounted(root: Path, script: str) -> subprocess.CompletedProcess:
    """Run a shell script in `root` that may mount file systems which nobody else sees, and call `run TARGET`."""
    line = f"{sys.executable} -m snakemake $1 --profile profiles/cpu --configfile config/tiny.yaml"
    ran = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"set -e\nrun() {{ {line}; }}\n{script}"],
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    if "unshare failed" in ran.stderr or "Operation not permitted" in ran.stderr:
        pytest.skip(f"this machine allows no user namespace to mount a full or read-only disk in: {ran.stderr}")
    return ran


def said(ran: subprocess.CompletedProcess) -> str:
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("place", [".", "results", str(RUN)])
def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(root: Path, place: str):
    (root / SAMPLES).unlink()
    ran = mounted(root, f"mount --bind {place} {place}; cd $PWD; mount -o remount,bind,ro {place}; run {SAMPLES}")
    folder = (root / place).absolute()
    assert ran.returncode != 0
    assert f"{folder}: cannot be written; give yourself the right to, or run in another folder" in said(ran)
    assert "Traceback" not in said(ran)
    assert run(root, str(SAMPLES))[0] == 0


@pytest.mark.parametrize("product", [SAMPLES, MAP])
def test_a_disk_that_fills_up_stops_the_job_cleanly_and_when_there_is_room_the_run_goes_on(root: Path, product: Path):
    sound = (root / product).read_bytes()
    (root / product).unlink()
    folder = product.parent
    ran = mounted(
        root,
        f"""mkdir full; mount -t tmpfs -o size=8k none full; cp -a {folder} full/it
        mv {folder} kept; ln -s $PWD/full/it {folder}
        run {product} && exit 9 || true
        echo left: $(ls -A full/it)""",
    )
    assert ran.returncode == 0, said(ran)
    assert f"{product}: cannot be written (No space left on device); free some space and run again" in said(ran)
    assert "left: manifest.json\n" in said(ran)
    assert "Traceback" not in said(ran)
    (root / folder).unlink()
    (root / "kept").rename(root / folder)
    assert run(root, str(product))[0] == 0
    assert (root / product).read_bytes() == sound
    assert left_over(root) == []


def holding(root: Path, rule: str) -> None:
    """Have the rule's job wait, once it has written its first file and before that has its name, for a reader and a
    word of `hold`; the code's digest stays what it is, since it knows scripts and modules alone."""
    os.mkfifo(root / "at_work")
    os.mkfifo(root / "hold")
    (root / "sitecustomize.py").write_text(
        f"""
import os, sys
if sys.argv and sys.argv[0].endswith("{rule}.py") or "{rule}.py" in " ".join(sys.orig_argv):
    replace = os.replace
    def hold(source, destination):
        os.replace = replace
        open("at_work", "w").close()
        open("hold").read()
        replace(source, destination)
    os.replace = hold
""",
        encoding="utf-8",
    )


def start(root: Path, target: Path, rule: str) -> tuple[subprocess.Popen, psutil.Process]:
    """Start a run, and wait until the job of `rule` is held in the middle; returns the run and the job."""
    holding(root, rule)
    line = [sys.executable, "-m", "snakemake", str(target), "--profile", "profiles/cpu"]
    begun = subprocess.Popen(
        [*line, "--configfile", "config/tiny.yaml"], cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(root)}, start_new_session=True, preexec_fn=heed_signals,
    )  # fmt: skip
    open(root / "at_work").close()
    (job,) = (each for each in psutil.Process(begun.pid).children(recursive=True) if is_job(each, rule))
    return begun, job


def is_job(process: psutil.Process, rule: str) -> bool:
    line = process.cmdline()
    return line[0].endswith("python") and line[1].endswith(f"{rule}.py")


@pytest.mark.parametrize(
    ("whom", "number", "rule"),
    [
        (whom, number, list(HELD)[(turn + turn // 3) % len(HELD)])
        for turn, (number, whom) in enumerate(itertools.product(SIGNALS, ("job", "run", "all")))
    ],
)
def test_after_a_kill_the_next_run_finishes_with_the_same_bytes_and_nothing_is_left_over(
    root: Path, whom: str, number: signal.Signals, rule: str
):
    product = HELD[rule]
    sound = (root / product).read_bytes()
    (root / product).unlink()
    begun, job = start(root, product, rule)
    assert list((root / product).parent.glob(f".{product.name}.*.tmp"))
    if whom == "all":
        os.killpg(begun.pid, number)
    else:
        os.kill(job.pid if whom == "job" else begun.pid, number)
    finishes = whom == "run" and number in WAITS
    if finishes:
        (root / "hold").write_text("go on", encoding="utf-8")
    assert psutil.wait_procs([job], timeout=60)[1] == [], f"the job outlives its run by {number.name}"
    begun.wait(60)
    (root / "sitecustomize.py").unlink()
    assert (root / product).exists() == finishes
    code, text = run(root, str(product))
    assert code == 0, text
    assert (root / product).read_bytes() == sound
    assert left_over(root) == []


def test_a_second_run_in_the_folder_is_refused_and_the_first_loses_nothing(root: Path):
    sound = (root / SAMPLES).read_bytes()
    (root / SAMPLES).unlink()
    first, _ = start(root, SAMPLES, "assemble_samples")
    code, text = run(root, str(SAMPLES))
    assert code != 0
    assert "Directory cannot be locked" in text
    (root / "hold").write_text("go on", encoding="utf-8")
    assert first.wait(60) == 0
    assert (root / SAMPLES).read_bytes() == sound
    assert left_over(root) == []


def test_a_run_whose_records_are_lost_does_nothing_again(root: Path):
    shutil.rmtree(root / ".snakemake")
    code, text = run(root)
    assert (code, "Nothing to be done" in text) == (0, True), text


def test_without_records_what_is_missing_is_made_and_nothing_else(root: Path):
    sound = (root / SAMPLES).read_bytes()
    (root / SAMPLES).unlink()
    shutil.rmtree(root / ".snakemake")
    code, text = run(root, str(SAMPLES))
    assert (code, "1 of 1 steps (100%) done" in text) == (0, True), text
    assert (root / SAMPLES).read_bytes() == sound


@pytest.mark.parametrize("moved", [-DAY, DAY])
def test_a_clock_that_is_moved_makes_nothing_run_again(root: Path, moved: int):
    """What a gate wrote looks older, or newer, than all that is made from it and all that it was made from."""
    for name in ("samples/train/manifest.json", "samples/train/samples.arrow", "hidden_states/train/manifest.json"):
        when = (root / RUN / name).stat().st_mtime + moved
        os.utime(root / RUN / name, (when, when))
    code, text = run(root)
    assert (code, "Nothing to be done" in text) == (0, True), text


def test_a_clock_that_went_back_behind_an_input_is_said_before_a_job_works_in_vain(root: Path):
    """Snakemake would do the job, and then remove what it made."""
    (root / SAMPLES).unlink()
    manifest = RUN / "responses" / "fresh" / "manifest.json"
    later = time.time() + DAY
    os.utime(root / manifest, (later, later))
    code, text = run(root, str(SAMPLES))
    assert code != 0
    assert f"{manifest}: written in the future, as this machine's clock has it" in text
    assert "assemble_samples.py" not in text
    os.utime(root / manifest)
    assert run(root, str(SAMPLES))[0] == 0


def test_damages_of_several_stages_are_rebuilt_stage_by_stage_and_then_the_run_is_sound(root: Path):
    # Nothing lies between them: the tiny run's gates may be of an older version, and write other bytes now.
    damaged = [SAMPLES, RUN / "vocabulary" / "whole" / "map.safetensors", RUN / "export" / "eagle3" / "config.json"]
    sound = [(root / path).read_bytes() for path in damaged]
    for path in damaged:
        flip_bit(root / path, from_end=40)
    code, text = run(root, "verify")
    assert code != 0
    assert all(f"{path}: other bytes than manifest.json vouches for" in text for path in damaged)
    steps = []
    for _ in damaged:
        code, text = run(root)
        assert code == 0, text
        steps.append([f"{path.parent}/manifest.json" in text.partition("Rebuilt: ")[2] for path in damaged])
        assert "3 of 3 steps (100%) done" in text
    assert steps == [[True, False, False], [False, True, False], [False, False, True]]
    assert [(root / path).read_bytes() for path in damaged] == sound
    assert not (root / RUN / repairs.DAMAGED).exists()
    assert run(root, "verify")[0] == 0


HOLDER = """
import sys, time
from pathlib import Path
from pilotfish import work
print(work.take(Path(sys.argv[1]), "{}", "c", []), flush=True)
time.sleep(600)
"""


def test_a_forsaken_job_is_ended_by_the_next_one_which_has_its_work(tmp_path: Path):
    scripts = str(Path(work.__file__).parents[1])
    forsaken = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "part.jsonl")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": scripts},
    )  # fmt: skip
    assert forsaken.stdout is not None
    mine = Path(forsaken.stdout.readline().strip())
    files.write_text(mine / "rows.jsonl", "{}\n")
    assert work.take(tmp_path / "part.jsonl", "{}", "c", []) == mine
    assert forsaken.wait(60) == -signal.SIGTERM
    assert (mine / "rows.jsonl").is_file()
    shutil.rmtree(mine.parent)
    assert work.take(tmp_path / "part.jsonl", "{}", "c", []).is_dir()
