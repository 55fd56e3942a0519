# SPDX-License-Identifier: Apache-2.0
"""Faults of a run itself: what kills it, fills its disk, or changes its files behind its back."""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from faults import Scene, fault
from helpers import executable, execute, flip_bit, plan
from pilotfish import files, generation, reuse, shards, work
from pilotfish.errors import UserError

PART = "00000-of-00002"
# Answers as vLLM does when asked for its health and its models; a request for an answer meets its DEED.
SERVER = """
import http.server, json, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        root = sys.argv[sys.argv.index("--model") + 1]
        names = sys.argv[sys.argv.index("--served-model-name") + 1 :][:2]
        body = json.dumps({"data": [{"id": name, "root": root} for name in names]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        DEED
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def serve(scene: Scene, deed: str) -> None:
    """Have the next engine be a server that does `deed` when it is asked for an answer."""
    code = SERVER.replace("DEED", deed)
    scene.monkeypatch.setattr(sys, "executable", executable(scene.root / "server", code))


def forget(scene: Scene, split: str = "heldout") -> Path:
    """Remove the responses of one part, their copy too, so that its job has all to do; returns its work folder."""
    (job,) = (j for j in plan(scene.root) if j.rule == "respond" and j.wildcards == {"split": split, "part": PART})
    line = dict(zip(job.line[2::2], job.line[3::2], strict=True))
    Path(line["--output"]).unlink()
    (Path(line["--captured"]) / reuse.ANSWERS).unlink(missing_ok=True)
    inputs = [Path(line["--target"]), Path(line["--prompts"])]
    return work.folder(Path(line["--output"]), line["--spec"], line["--code"], inputs)


def respond(scene: Scene) -> None:
    scene.run("respond", split="heldout", part=PART)


@fault(
    "Runs",
    "killed mid-write",
    "validate_responses",
    r"00000-of-00002\.jsonl, line \d+: not valid JSON .*the file ends inside it",
)
def _(scene: Scene) -> None:
    path = scene.path(f"responses/train/{PART}.jsonl")
    os.truncate(path, path.stat().st_size // 2)


@contextmanager
def lines() -> Iterator[list[str]]:
    """What jobs log meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield said
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


@fault("Runs", "killed mid-shard", "respond", r"16 of 24 rows are already done")
def _(scene: Scene) -> str:
    """Of three shards in the unfinished work the last was cut; the job keeps 16 rows and asks for 8 again."""
    scene.monkeypatch.setattr(shards, "ROWS_PER_SHARD", 8)
    rows = files.read_jsonl(scene.path(f"responses/heldout/{PART}.jsonl"))
    folder = forget(scene) / "captured"
    folder.mkdir(parents=True)
    reader = shards.ShardReader([scene.path(f"responses/heldout/{PART}.captured/index.json")])
    for row in rows:
        files.append_checked(folder.parent / "rows.jsonl", {**row, "states": "gone", "layers": reader.captured})
    for start, end in shards.shard_ranges(0, len(rows)):
        path = folder / shards.shard_name(start, end)
        shards.write_shard(path, [(row, reader.read(row)) for row in range(start, end)], reader.captured)
        entry = {"layers": reader.captured, **shards.describe(path)}
        files.append_checked(folder.parent / "shards.jsonl", entry)
    os.truncate(path, path.stat().st_size - 100)
    serve(scene, "os._exit(9)")
    with lines() as said, pytest.raises(UserError, match="exit status 9"):
        respond(scene)  # until the rows of the cut shard are asked for
    return "\n".join(said)


@fault(
    "Runs",
    "server dies mid-run",
    "respond",
    r"the engine ended with exit status 9\. Last 30 lines of logs/tiny/respond/heldout-00000-of-00002\.engine\.log",
)
def _(scene: Scene) -> None:
    forget(scene)
    serve(scene, "os._exit(9)")
    respond(scene)


@fault(
    "Runs",
    "server hangs without dying",
    "respond",
    r"no row finished for engine\.stall_timeout = \d+ s \(0 of 1 done\): the engine hangs, "
    r"or the limit is too short for such long answers; last lines of logs/tiny/respond/",
)
def _(scene: Scene) -> None:
    forget(scene)
    serve(scene, "signal.pause()")

    class Clock:
        """Hours pass between two looks at it, so that nobody need wait."""

        hours = 0.0

        def monotonic(self) -> float:
            self.hours += 10
            return 3600 * self.hours

    scene.monkeypatch.setattr(generation, "time", Clock())
    respond(scene)


@fault(
    "Runs",
    "disk full",
    "collect_prompts",
    r"results/tiny/prompts/train\.jsonl: cannot be written \(No space left on device\); free some space and run again",
)
def _(scene: Scene) -> None:
    # The device that is always full stands where the job writes first.
    scene.path(f"prompts/.train.jsonl.{os.getpid()}.tmp").symlink_to("/dev/full")
    scene.run("collect_prompts")


@fault(
    "Runs",
    "output folder not writable",
    "collect_prompts",
    r"results/tiny/prompts/train\.jsonl: cannot be written \(.*\); give yourself the right to write there",
)
def _(scene: Scene) -> None:
    # Here not even root may make a file.
    scene.path("prompts").rename(scene.path("before"))
    scene.path("prompts").symlink_to("/sys/kernel")
    scene.run("collect_prompts")


@fault(
    "Runs",
    "two runs at once",
    "snakemake",
    r"Directory cannot be locked\. Please make sure that no other Snakemake process .* --unlock",
)
def _(scene: Scene) -> str:
    locks = scene.root / ".snakemake" / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    for kind in ("input", "output"):
        (locks / f"0.{kind}.lock").write_text("results/tiny/report.md\n", encoding="utf-8")
    line = [sys.executable, "-m", "snakemake", "--profile", "profiles/cpu", "--configfile", "config/tiny.yaml"]
    with open(scene.root / ".snakemake" / "running", "w", encoding="utf-8") as first:
        fcntl.flock(first, fcntl.LOCK_EX)  # as the first run holds it while it lives; else its locks are cleared
        second = subprocess.run(line, cwd=scene.root, capture_output=True, text=True)
    assert second.returncode != 0
    return " ".join((second.stdout + second.stderr).split())


def reruns(scene: Scene, **changes) -> list[str]:
    """Rules that a run would execute now, with changes to the drafter's settings."""
    config = yaml.safe_load((scene.root / "config" / "tiny.yaml").read_text(encoding="utf-8"))
    config["drafters"]["eagle3"] |= changes
    file = scene.root / "changed.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    graph = execute(scene.root, file, "dryrun", forceall=False)
    return sorted({job.rule.name for job in graph.jobs if graph.needrun(job)})


@fault("Runs", "clock moved back", "snakemake", r"^nothing runs again$")
def _(scene: Scene) -> str:
    """Every product becomes older than what it was made from; the bytes are what counts."""
    times = {path: path.stat().st_mtime for path in scene.run_folder.rglob("*") if path.is_file()}
    newest = max(times.values())
    for path, time in times.items():
        os.utime(path, (newest - time, newest - time), follow_symlinks=False)
    return ", ".join(reruns(scene)) or "nothing runs again"


@fault(
    "Runs",
    "artifact edited by hand",
    "verify",
    r"results/tiny: 1 file\(s\) damaged or lost:\n  results/tiny/responses/heldout/00001-of-00002\.jsonl: other bytes "
    r"than manifest\.json vouches for(?s:.*)the next run rebuilds just them",
)
def _(scene: Scene) -> None:
    flip_bit(scene.path("responses/heldout/00001-of-00002.jsonl"), from_end=40)
    scene.run("verify")


@fault(
    "Runs",
    "artifact edited by hand, to another length",
    "map_vocabulary",
    r"samples\.arrow: \d+ bytes where .*manifest\.json vouches for \d+; the file changed after its gate\. Delete it",
)
def _(scene: Scene) -> None:
    with open(scene.path("samples/train/samples.arrow"), "ab") as file:
        file.write(b"\0")
    scene.run("map_vocabulary")


@fault(
    "Runs",
    "partial rerun after each kind of fix re-runs its cone and nothing else",
    "snakemake",
    r"^all, export, replay, report, serve, train, validate_drafter, validate_evaluation, validate_export$",
)
def _(scene: Scene) -> str:
    """One kind here, on a run that really was; the other kinds are the table of test_plan.py."""
    assert reruns(scene) == []
    return ", ".join(reruns(scene, learning_rate=1.0e-3))
