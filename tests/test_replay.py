# SPDX-License-Identifier: Apache-2.0
"""Drafters of either algorithm are opened, and their rounds found on stored samples."""

import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import test_replay_dflash as dflash
from helpers import arrow_of, captured_folder, random_ids, random_target, response
from pilotfish import digest, files, manifest, replay, rounds, samples, shards
from pilotfish.drafting import ReplayRow
from pilotfish.errors import UserError
from test_replay_eagle3 import DRAFT_VOCABULARY, FORWARDS, HIDDEN, VOCABULARY, K, reference_model

CONDITIONING = [1, 2, 3]
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "replay.py"


class Run(NamedTuple):
    """A run's target, drafters of both algorithms by name, and samples with their states."""

    root: Path
    target: Path
    drafters: dict[str, Path]

    @property
    def samples(self) -> Path:
        return self.root / "samples" / "samples.arrow"

    def reader(self) -> shards.ShardReader:
        return shards.ShardReader([self.root / "states" / "part" / shards.INDEX], CONDITIONING)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    root = tmp_path_factory.mktemp("run")
    target = random_target(root / "target" / "model", VOCABULARY)
    models = {"eagle3": reference_model(*FORWARDS[0]), "dflash": dflash.reference_model(target)}
    for name, model in models.items():
        model.save_pretrained(root / name)
    lengths = {row: (3 + row, 2 + row) for row in range(replay.ROWS_PER_BATCH + 2)} | {4: (5, 1)}
    drawn = {row: random_ids(sum(each), row, VOCABULARY) for row, each in lengths.items()}
    arrow_of(
        root / "samples", [response(row, ids[: lengths[row][0]], ids[lengths[row][0] :]) for row, ids in drawn.items()]
    )
    captured_folder(root / "states" / "part", drawn)
    return Run(root, target, {name: root / name for name in models})


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_the_config_says_which_algorithm_a_folder_holds(run: Run, name: str):
    drafter = replay.open_drafter(run.drafters[name], run.target)
    assert isinstance(drafter, {"eagle3": replay.Eagle3Drafter, "dflash": replay.DFlashDrafter}[name])
    assert drafter.capture_layers == CONDITIONING
    assert len(drafter.target_ids_V) == DRAFT_VOCABULARY


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculators_model_type": "mtp"}, "a drafter of type 'mtp' cannot be replayed, only eagle3 and dflash"),
        ({"sliding_window_non_causal": False}, "config.json: sliding_window_non_causal = False: the engine would"),
    ],
)
def test_a_drafter_without_a_forward_pass_here_is_refused(run: Run, tmp_path: Path, change: dict, says: str):
    dflash.copy_folder(run.drafters["dflash"], tmp_path, **change)
    with pytest.raises(UserError, match=says):
        replay.open_drafter(tmp_path, run.target)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_each_sample_has_the_rounds_of_its_own_row(run: Run, name: str):
    drafter, every = replay.open_drafter(run.drafters[name], run.target), samples.load(run.samples)
    found, reader = replay.replay_samples(drafter, run.reader(), every, K), run.reader()
    assert list(found) == every["row"]
    assert found[4] == [], "its only token came from prefill"
    for sample in every:
        tokens, prompt = torch.tensor(sample["input_ids"]), sample["prompt_length"]
        if sample["row"] != 4:
            row = ReplayRow(tokens, reader.read(sample["row"]).hidden_states, prompt, len(tokens) - prompt)
            assert found[sample["row"]] == drafter.sequential(row, K)


def test_a_chain_beside_trees_is_the_chain_alone_and_trees_accept_more(run: Run):
    drafter, every = replay.open_drafter(run.drafters["dflash"], run.target), samples.load(run.samples)
    chain, *trees = replay.replay_trees(drafter, run.reader(), every, dflash.DEPTH, [1, 30, 1000])
    assert chain == replay.replay_samples(drafter, run.reader(), every, dflash.DEPTH)
    taus = [rounds.summarise(list(each.values()), dflash.DEPTH)["tau_micro_incl_bonus"] for each in trees]
    assert taus == sorted(taus)
    assert taus[0] < taus[2]


@pytest.mark.parametrize("prompt, n_out, states", [(0, 4, 9), (6, 5, 9), (6, 0, 9), (6, 4, 10), (6, 4, 8)])
def test_a_row_whose_sizes_do_not_fit_is_refused(prompt, n_out, states):
    with pytest.raises(ValueError, match="a row of 10 tokens"):
        ReplayRow(torch.zeros(10, dtype=torch.long), torch.zeros(states, 3, HIDDEN), prompt, n_out)


def written(run: Run, schema: str, folder: str, paths: list[Path], **statistics) -> Path:
    """A gate's manifest."""
    path = run.root / folder / "manifest.json"
    manifest.write(path, schema=schema, paths=paths, spec="{}", code="", statistics=statistics)
    return path


@pytest.fixture
def line(run: Run):
    """The script's arguments, for a drafter and what its spec adds."""
    target = written(run, "target", "target", [], layers=4)
    written(run, "samples", "samples", [run.samples])
    states = written(run, "hidden_states", "states", [run.root / "states" / "part" / shards.INDEX])

    def made(name: str, **spec) -> list[str]:
        drafter = written(run, spec["kind"], f"{spec['kind']}-{name}", [run.drafters[name] / "config.json"])
        spec = {"name": name, "algorithm": name, "capture_layers": CONDITIONING, "speculative_tokens": K} | spec
        paths = {"target": target, "drafter": drafter, "checkpoint": run.drafters[name], "samples": run.samples}
        paths |= {"states": states, "output": run.root / f"{name}.json"}
        options = [word for option, path in paths.items() for word in (f"--{option}", str(path))]
        return [str(SCRIPT), "--spec", digest.spec_json(spec), *options]

    return made


@pytest.mark.parametrize(("name", "kind", "budgets"), [("eagle3", "drafter", []), ("dflash", "reference", [4, 500])])
def test_the_script_writes_summary_rounds_and_trees(run: Run, line, monkeypatch, name, kind, budgets):
    monkeypatch.setattr(sys, "argv", line(name, kind=kind, tree_budgets=budgets))
    runpy.run_path(str(SCRIPT), run_name="in_process")["main"]()
    written = files.read_json(run.root / f"{name}.json")
    drafter, every = replay.open_drafter(run.drafters[name], run.target), samples.load(run.samples)
    found = replay.replay_samples(drafter, run.reader(), every, K)
    assert written["drafter"] == name
    assert written["summary"] == rounds.summarise(list(found.values()), K)
    assert written["rows"] == [{"row": row, "rounds": [list(each) for each in found[row]]} for row in sorted(found)]
    assert [(tree["budget"], tree["top_k"]) for tree in written["trees"]] == [
        (budget, min(budget, DRAFT_VOCABULARY)) for budget in budgets
    ]


def test_the_script_refuses_states_of_other_layers_than_the_drafters(run: Run, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", line("dflash", kind="drafter", tree_budgets=[], capture_layers=[1, 2]))
    with pytest.raises(UserError, match=r"layers \[1, 2, 3\], where \[1, 2\] are configured"):
        runpy.run_path(str(SCRIPT), run_name="in_process")["main"]()
