# SPDX-License-Identifier: Apache-2.0
"""Kill a run of the tiny workflow over and over, in all of its stages; what comes of it must be as if nothing had been.

python tests/kills.py FOLDER [--kills 50] [--seed 0] [--undisturbed RUN] [--only RULE ...]

Starts Snakemake, waits for a seeded moment of a job, sends a seeded signal to a seeded victim (the run, the job, its
engine, or the whole group), starts Snakemake again, and so on, until as many kills are done as were asked for; then it
lets the run finish. Compares every manifest byte for byte with those of an undisturbed run of the same code, made in
FOLDER too unless RUN is one; counts what was done twice; looks for what was left over. Ninety minutes on two cores.

One thing may differ: an engine that was started again batches its rows in another way, and the hidden states that it
captures can be a rounding of their type off. They are compared within that; and all that is made of states is compared
with what an undisturbed run makes of the very same ones, of the killed run's.

With --only, the products of these rules (their gates' too) are made anew on the other results of RUN, both times: a
minute or two for rules that need no engine. FOLDER must not exist yet.
"""

import argparse
import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from conftest import REPOSITORY, copy_workflow
from helpers import execute, heed_signals, plan
from same_products import FROM_STATES, STEP, differences, found_in, left_over, read_json
from tiny_target import build_tiny_target

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
CONFIG = ["--profile", "profiles/cpu", "--configfile", "config/tiny.yaml"]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the worst twice as often
LONG = {"respond": 5, "rehearse": 3, "train": 5, "serve": 5, "capture": 2, "replay": 2}  # shares of the kills; others 1
STEPS = {"serve": 3}  # how far a job may get, of all that it has to do
ENGINE = re.compile(r"pilotfish\.launch|VLLM::")
NONE = "between jobs"  # in the place of a rule: Snakemake is at work alone
AHEAD = 1.2  # times its share that a rule may get, since the last ones are quick and some kills come too late
STALL = 3600  # seconds without any end that are a failure


@dataclass
class Kill:
    """What was done to whom, and how far the work then was."""

    rule: str
    victim: str
    number: signal.Signals
    moment: str

    def __str__(self) -> str:
        return f"{self.rule:24} {self.victim:7} {self.number.name:8} {self.moment}"


@dataclass
class Work:
    """Unfinished work on the disk, as it was seen last: what is in it may grow, and not be done again."""

    root: Path
    rows: dict[Path, int] = field(default_factory=dict)  # lines of a journal that say what one before them said
    steps: dict[Path, int] = field(default_factory=dict)  # of a training's state
    shards: dict[Path, int] = field(default_factory=dict)  # when each was written, nanoseconds
    repeated: list[str] = field(default_factory=list)

    def look(self) -> int:
        """Note all progress, and what is done again; returns the rows, steps and shards that there are."""
        for journal in self._journals():
            done = list(_done(journal))
            again = len(done) - len(set(done))
            if again > self.rows.get(journal, 0):
                self.repeated.append(f"{journal}: {again} lines are there twice")
            self.rows[journal] = again
        for state in found_in(self.root, "results/**/*.work/*/state/state.json"):
            step = (read_json(state) or {}).get("global_step", 0)
            if step < self.steps.get(state, 0):
                self.repeated.append(f"{state}: step {self.steps[state]} was saved, and now {step} is")
            self.steps[state] = step
        for shard in found_in(self.root, "results/**/*.work/*/*/rows_*.safetensors"):
            if (when := _written(shard)) != self.shards.setdefault(shard, when):
                self.repeated.append(f"{shard}: written twice")
        return self.amount()

    def amount(self) -> int:
        lines = sum(len(list(_done(path))) for path in self._journals())
        return lines + sum(self.steps.values()) + len(self.shards)

    def _journals(self) -> list[Path]:
        """Of answers, and of what has been measured of servers."""
        return [
            path for name in ("rows", "measured") for path in found_in(self.root, f"results/**/*.work/*/{name}.jsonl")
        ]

    def forget(self) -> None:
        """Drop what is no longer there: its job has published it."""
        for held in (self.rows, self.steps, self.shards):
            for path in [path for path in held if not path.exists()]:
                del held[path]


def _done(journal: Path) -> Iterator[str]:
    """What each whole line of a journal stands for: a row, or a set at one concurrency."""
    try:
        lines = journal.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        yield " ".join(str(found.get(key)) for key in ("row", "set", "level"))


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class Killer:
    """One run that is killed until the kills are used up; `shares` says how many of them each rule gets.

    `seconds` are how long each rule's jobs take undisturbed.
    """

    def __init__(self, root: Path, line: list[str], seconds: dict[str, float], kills: int, seed: int):
        self.root, self.line, self.draw, self.seconds = root, line, random.Random(seed), seconds
        self.kills, self.done = kills, list[Kill]()
        self.work, self.finished, self.again = Work(root), Counter(), list[str]()
        weights = {rule: LONG.get(rule, 1) for rule in seconds}
        self.shares = {rule: kills * weight / sum(weights.values()) for rule, weight in weights.items()}

    def wants(self, rule: str) -> bool:
        """Whether a job of this rule is to be killed: its share, and what those before it were too quick for."""
        if rule not in self.shares or len(self.done) >= self.kills:
            return False
        if rule == NONE:
            return sum(kill.rule == NONE for kill in self.done) < self.shares[NONE]
        order = list(self.shares)
        due = sum(self.shares[each] for each in order[: order.index(rule) + 1])
        return len(self.done) < math.ceil(AHEAD * due)

    def go(self) -> None:
        """Start, kill and start again until a run ends well unkilled; SystemExit if it fails unkilled."""
        starts = 0
        while True:
            starts += 1
            said = self.root / f"said-{starts:03d}.txt"
            before = len(self.done)
            with open(said, "wb") as out:
                run = subprocess.Popen(
                    self.line, cwd=self.root, stdout=out, stderr=out, start_new_session=True, preexec_fn=heed_signals
                )
                self._accompany(run)
            self._note_finished(said)
            if run.returncode == 0 and len(self.done) == before:
                return
            if len(self.done) == before:
                sys.exit(f"{said}: failed though nothing was killed:\n{said.read_text(errors='replace')[-6000:]}")

    def _accompany(self, run: subprocess.Popen) -> None:
        """Watch a run to its end; kill something of it once or, where it goes on after that, several times."""
        aim: tuple[int, float, int] | None = None  # a job, and the time or the progress that it may reach
        until = time.monotonic() + STALL
        while run.poll() is None:
            if time.monotonic() > until:
                os.killpg(run.pid, signal.SIGKILL)
                sys.exit(f"no end of {self.root} within {STALL} s: {self.done[-1] if self.done else 'unkilled'}")
            time.sleep(STEP)
            amount = self.work.look()
            job, rule = self._job_of(run)
            if not self.wants(rule):
                continue
            if aim is None or aim[0] != job:
                aim = (job, time.monotonic() + self._patience(rule), amount + self.draw.randint(1, STEPS.get(rule, 24)))
            if time.monotonic() >= aim[1] or (rule in LONG and amount >= aim[2]):
                self._kill(run, job, rule, amount)
                aim = None
        self.work.forget()

    def _patience(self, rule: str) -> float:
        """Seconds that a job may go on if it does not get on before: none knows how long its engine takes to start."""
        longest = self.seconds[rule]
        if rule in LONG and self.draw.random() < 0.6:
            return 3 * longest  # until it has got on
        return self.draw.uniform(0, longest)

    def _job_of(self, run: subprocess.Popen) -> tuple[int, str]:
        """Process and rule of a job that runs, one that is to be killed if there is one; else Snakemake's own."""
        found = [(each.pid, script) for each in _descendants(run.pid) if (script := _script(each))]
        return max(found, key=lambda job: self.wants(job[1]), default=(run.pid, NONE))

    def _kill(self, run: subprocess.Popen, job: int, rule: str, amount: int) -> None:
        # The warden, the server by its command line, and its workers by the title that vLLM gives them.
        engine = [each.pid for each in _descendants(job) if rule != NONE and ENGINE.search(" ".join(_line(each)))]
        victim = self.draw.choice(["run", "group", *(["job"] * (rule != NONE)), *(["engine"] * bool(engine))])
        number = self.draw.choice(SIGNALS)
        try:
            if victim == "group":
                os.killpg(run.pid, number)
            else:
                os.kill(self.draw.choice({"run": [run.pid], "job": [job], "engine": engine}[victim]), number)
        except ProcessLookupError:
            return  # it was quicker
        self.done.append(Kill(rule, victim, number, f"{amount} rows, steps and shards unfinished"))
        print(f"{len(self.done):3d}  {self.done[-1]}", flush=True)

    def _note_finished(self, said: Path) -> None:
        """Count how often each job was finished, as Snakemake says it."""
        outputs: dict[str, str] = {}
        current = ""
        for line in said.read_text(encoding="utf-8", errors="replace").splitlines():
            if found := re.match(r"\s+output: (.*)", line):
                current = found[1]
            elif found := re.match(r"\s+jobid: (\d+)", line):
                outputs[found[1]], current = current, ""  # `rule all` has none
            elif found := re.match(r"Finished jobid: (\d+)", line):
                made = outputs.get(found[1], "")
                self.finished[made] += bool(made)
                if self.finished[made] > 1:
                    self.again.append(f"{made}: finished, and made again ({said.name})")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _script(process: psutil.Process) -> str | None:
    """Name of the rule whose script a process runs."""
    line = _line(process)
    if len(line) > 1 and Path(line[0]).name.startswith("python") and Path(line[1]).parent.name == "scripts":
        return Path(line[1]).stem
    return None


def prepare(root: Path, target: Path) -> None:
    """A copy of the workflow in which nothing is made but the tiny target."""
    copy_workflow(root)
    (root / "results").mkdir()
    shutil.copytree(target, root / "results" / "tiny-target")


def prepare_anew(root: Path, finished: Path, rules: Sequence[str], code: Path = REPOSITORY) -> list[str]:
    """A copy of a finished run that lacks what these rules make; returns Snakemake's targets to make it anew.

    `code` is where the workflow is copied from.
    """
    copy_workflow(root, code)
    shutil.copytree(finished / "results", root / "results", symlinks=True)
    with redirect_stderr(io.StringIO()):
        execute(root, root / "config" / "tiny.yaml", "touch", forceall=True)
    targets = [output for job in plan(root) if job.rule in rules for output in job.output]
    for output in targets:
        (root / output).unlink()
    return [*targets, "--allowed-rules", *rules]


def let_run(root: Path, targets: list[str]) -> Path:
    """Run Snakemake to its end, and return the folder; SystemExit if it fails."""
    said = root.with_suffix(".txt")
    with open(said, "wb") as out:
        if subprocess.run([*SNAKEMAKE, *targets, *CONFIG], cwd=root, stdout=out, stderr=out).returncode:
            sys.exit(f"{said}: a run that nothing disturbed failed")
    return root


def undisturbed_seconds(root: Path, only: list[str] | None) -> dict[str, float]:
    """How long the jobs of each rule took, in the order of the flow; Snakemake alone first."""
    found = {NONE: 4.0}
    included = re.findall(r'include: "(.*)"', (root / "Snakefile").read_text(encoding="utf-8"))
    text = "".join((root / file).read_text(encoding="utf-8") for file in included)
    folder = root / "benchmarks" / "tiny"
    for rule in re.findall(r"^rule (\w+):", text, re.MULTILINE):
        tables = [*folder.glob(f"{rule}.tsv"), *folder.glob(f"{rule}/*.tsv")]
        if tables and rule in (only or [rule]):
            found[rule] = max(float(path.read_text(encoding="utf-8").splitlines()[1].split("\t")[0]) for path in tables)
    return found


def report(killer: Killer, wrong: dict[str, list[str]]) -> None:
    stages = list(killer.shares)
    victims = ("run", "job", "engine", "group")
    print(f"\n{'stage':24}", *(f"{victim:>7}" for victim in (*victims, "all")))
    for rule in stages:
        counts = Counter(kill.victim for kill in killer.done if kill.rule == rule)
        print(f"{rule:24}", *(f"{counts[victim] or '':>7}" for victim in victims), f"{counts.total() or '':>7}")
    print(f"{'all':24}", *(f"{sum(k.victim == v for k in killer.done):>7}" for v in victims), f"{len(killer.done):>7}")
    print("signals:", *(f"{name} {count}" for name, count in Counter(k.number.name for k in killer.done).items()))
    for what, lines in wrong.items():
        print("\n  ".join([f"{what}: {len(lines) or 'none'}", *lines]))


def main() -> int:
    """Returns how many things were not as they should be."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--kills", type=int, default=50)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--undisturbed", type=Path, help="a finished run of the same code; with --only, of any")
    made.add_argument("--only", nargs="+", help="rules whose products are made anew; needs --undisturbed")
    arguments = made.parse_args()
    folder, undisturbed = arguments.folder, arguments.undisturbed
    folder.mkdir(parents=True)
    killed, targets = folder / "killed", []
    if arguments.only:
        targets = prepare_anew(killed, undisturbed, arguments.only)
        prepare_anew(folder / "undisturbed", undisturbed, arguments.only)
        undisturbed = let_run(folder / "undisturbed", targets)
    else:
        build_tiny_target(folder / "tiny-target")
        prepare(killed, folder / "tiny-target")
        if undisturbed is None:
            prepare(folder / "undisturbed", folder / "tiny-target")
            undisturbed = let_run(folder / "undisturbed", targets)
    seconds = undisturbed_seconds(undisturbed, arguments.only)
    killer = Killer(killed, [*SNAKEMAKE, *targets, *CONFIG], seconds, arguments.kills, arguments.seed)
    killer.go()
    again = undisturbed
    if not arguments.only:
        again = let_run(folder / "again", prepare_anew(folder / "again", killed, FROM_STATES, code=killed))
    wrong = {
        "manifests that differ": differences(killed, undisturbed, again),
        "work done again": [*killer.work.repeated, *killer.again],
        "left over": left_over(killed),
        "kills too few": [f"{len(killer.done)} of {arguments.kills}"] * (len(killer.done) < arguments.kills),
    }
    report(killer, wrong)
    return sum(map(len, wrong.values()))


if __name__ == "__main__":
    sys.exit(min(main(), 100))
