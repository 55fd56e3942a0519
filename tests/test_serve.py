# SPDX-License-Identifier: Apache-2.0
"""All servers are up at once, each on devices of its own; or, where the devices do not suffice, one after the other."""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from pilotfish import engine, evaluation, files, manifest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "serve.py"
SERVERS = ("baseline", "eagle3", "published")
DEVICES = "CUDA_VISIBLE_DEVICES"
OPTIONS = {
    "max_model_len": 256, "dtype": "bfloat16", "tensor_parallel": 1, "max_num_seqs": 8, "enforce_eager": True,
    "kv_cache_gib": None, "gpu_memory_utilization": 0.9, "port": None, "stall_timeout": 60,
    "start_timeouts": dict.fromkeys(engine.STAGES, 60), "restarts": 1, "extra_args": [],
}  # fmt: skip
SPEC = {
    "servers": {"eagle3": 3, "published": 7},
    "sets": {"heldout": 2, "humaneval": 1},
    "concurrency": [1, 8],
    "sampling": {"max_tokens": 4},
    "reasoning_parser": None,
    "trust_remote_code": False,
}


class Engine:
    """Notes how engines are started and stopped, in `events`."""

    events: ClassVar[list[tuple]] = []

    def __init__(self, line: list[str], options: dict, log: Path):
        self.line, self.options, self.name = line, options, log.name.removesuffix(".engine.log")

    def __enter__(self) -> "Engine":
        self.events.append(("start", self.name, os.environ.get(DEVICES), self.options["port"]))
        return self

    def __exit__(self, *_) -> None:
        self.events.append(("stop", self.name))

    def view(self) -> dict:
        return {"seen by": self.name}


def measured_on(name: str, chosen: str, level: int) -> dict:
    return {"measured on": [name, chosen, level], "answers": [], "tokens": 0}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script on a stand-in of a run; returns the events, with what was measured together."""
    for folder, schema in (("target", "target"), ("export/eagle3", "export"), ("references/published", "reference")):
        path = tmp_path / folder / "manifest.json"
        manifest.write(path, schema=schema, paths=[], spec="{}", code="", statistics={})
    for name in SPEC["sets"]:
        files.write_jsonl(tmp_path / "prompts" / f"{name}.jsonl", [{"id": str(n), "messages": []} for n in range(3)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Engine, "events", [])
    losses: list[tuple[str, int]] = []
    monkeypatch.setattr(engine, "Engine", Engine)

    def measure_all(engines: dict, sets: dict, levels: list[int], session: evaluation.Session, kept) -> None:
        asked = {name: len(prompts) for name, prompts in sets.items()}
        Engine.events.append(("measure", tuple(engines), asked, levels, session.rest))
        for chosen, level in evaluation.to_measure(engines, sets, levels, kept):
            if (chosen, level) in losses:
                losses.remove((chosen, level))
                raise engine.EngineLost("it died")
            kept.keep(chosen, level, {name: measured_on(name, chosen, level) for name in engines})

    monkeypatch.setattr(evaluation, "measure_all", measure_all)

    def run(together: bool, gpus: int = 0, lost: tuple = (), **options) -> list[tuple]:
        losses.extend(lost)
        line = ["serve.py", "--spec", json.dumps(SPEC | {"together": together}), "--gpus", str(gpus)]
        line += ["--target", "target/manifest.json", "--prompts", *(f"prompts/{name}.jsonl" for name in SPEC["sets"])]
        line += ["--drafters", "export/eagle3/manifest.json", "--references", "references/published/manifest.json"]
        line += ["--engine", json.dumps(OPTIONS | options), "--engine-logs", "logs"]
        line += ["--outputs", *(f"evaluation/{name}/served.json" for name in SERVERS)]
        monkeypatch.setattr(sys, "argv", line)
        runpy.run_path(str(SCRIPT), run_name="in_process")["main"]()
        return Engine.events

    return run


ASKED = ({"heldout": 2, "humaneval": 1}, [1, 8])


def test_all_servers_are_up_while_they_take_turns_and_rest_between_them_on_a_cpu(started):
    events = started(together=True)
    assert [event[:2] for event in events[:3]] == [("start", name) for name in SERVERS]
    assert events[3] == ("measure", SERVERS, *ASKED, evaluation.SPIN_SECONDS)
    assert sorted(events[4:]) == [("stop", name) for name in sorted(SERVERS)]


def test_one_after_the_other_each_is_stopped_before_the_next_starts_and_none_rests(started):
    events = started(together=False)
    for number, name in enumerate(SERVERS):
        start, measure, stop = events[3 * number : 3 * number + 3]
        assert (start[:2], measure, stop) == (("start", name), ("measure", (name,), *ASKED, 0), ("stop", name))


def test_each_server_has_devices_and_a_port_of_its_own(started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DEVICES, "0,1,2,3,4,5")
    events = started(together=True, gpus=6, port=9000)
    assert [event[2:] for event in events[:3]] == [("0,1", 9000), ("2,3", 9001), ("4,5", 9002)]
    assert events[3][-1] == 0  # the workers of other servers are on other devices
    assert os.environ[DEVICES] == "0,1,2,3,4,5"


def test_servers_differ_in_their_drafter_alone_and_each_has_its_own_file(started, tmp_path: Path):
    started(together=True)
    served = {name: files.read_json(tmp_path / "evaluation" / name / "served.json") for name in SERVERS}
    plain = served["baseline"]["arguments"]
    assert "--speculative-config" not in plain
    for name, folder in (("eagle3", "export/eagle3"), ("published", "references/published")):
        line = served[name]["arguments"]
        assert line[: len(plain)] == plain
        assert json.loads(line[line.index("--speculative-config") + 1]) == {
            "model": folder,
            "num_speculative_tokens": SPEC["servers"][name],
        }
        sets = {each: {str(level): measured_on(name, each, level) for level in (1, 8)} for each in SPEC["sets"]}
        assert (served[name]["sets"], served[name]["engine"]) == (sets, {"seen by": name})


def test_when_a_server_is_lost_all_start_anew_and_what_was_measured_is_kept(started, tmp_path: Path):
    events = started(together=True, lost=(("heldout", 8),))
    assert [event[0] for event in events].count("measure") == 2
    served = files.read_json(tmp_path / "evaluation" / "eagle3" / "served.json")["sets"]
    assert served["heldout"]["1"] == measured_on("eagle3", "heldout", 1)
    assert served["humaneval"]["8"] == measured_on("eagle3", "humaneval", 8)
    assert not list(tmp_path.rglob("*.work"))


def test_a_job_that_lost_too_many_servers_goes_on_where_it_was(started, tmp_path: Path):
    with pytest.raises(engine.EngineLost):
        started(together=True, lost=(("heldout", 8), ("heldout", 8)))
    (kept,) = tmp_path.rglob("measured.jsonl")
    assert [(each["set"], each["level"]) for each in files.read_checked(kept)] == [("heldout", 1)]
    started(together=True)
    assert not kept.exists()
