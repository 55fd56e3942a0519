# SPDX-License-Identifier: Apache-2.0
"""What a run cost, and what its gates did of that, from Snakemake's benchmarks."""

import os
from pathlib import Path

import pytest

from helpers import rows_of, write_benchmark
from pilotfish import costs, files


@pytest.fixture
def benchmarks(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    write_benchmark(folder / "collect_prompts.tsv", 1.5, "NA")
    write_benchmark(folder / "respond/train-00000-of-00002.tsv", 20.0, "300.0")
    write_benchmark(folder / "respond/train-00001-of-00002.tsv", 30.0, "200.0")
    write_benchmark(folder / "rehearse/mini.tsv", 8.5)
    write_benchmark(folder / "validate_prompts.tsv", 2.0)
    write_benchmark(folder / "validate_samples/train.tsv", 3.0)
    return folder


def test_cost_sums_time_takes_the_peak_of_memory_and_adds_the_gates(tmp_path: Path, benchmarks: Path):
    rows = rows_of(costs.stages(tmp_path / "results", benchmarks, tmp_path / "plan.json"))
    assert rows["collect_prompts"][:2] == ["2", "0"]
    assert rows["respond"][:2] == ["50", "300"]
    assert rows["gates"][0] == "5"
    assert rows["total"][0] == "65"


def test_a_file_with_two_names_is_counted_once(tmp_path: Path, benchmarks: Path):
    captured = tmp_path / "results/responses/train/part.captured/shard"
    adopted = tmp_path / "results/hidden_states/train/part/shard"
    files.write_text(captured, "x" * 2_000_000)
    adopted.parent.mkdir(parents=True)
    os.link(captured, adopted)
    rows = rows_of(costs.stages(tmp_path / "results", benchmarks, tmp_path / "plan.json"))
    assert rows["respond"][-1] == "2.0"
    assert rows["capture"][-1] == "0.0"
    assert rows["total"][-1] == "2.0"


def test_a_target_that_is_only_linked_takes_no_disk(tmp_path: Path):
    files.write_text(tmp_path / "hub/model.safetensors", "x" * 2_000_000)
    (tmp_path / "results/target/model").mkdir(parents=True)
    (tmp_path / "results/target/model/model.safetensors").symlink_to(tmp_path / "hub/model.safetensors")
    assert rows_of(costs.stages(tmp_path / "results", tmp_path, tmp_path / "plan.json"))["prepare_target"][-1] == "0.0"


def test_what_was_planned_stands_beside_what_it_came_to(tmp_path: Path, benchmarks: Path):
    stages = {"respond": {"seconds": 61.4, "kept": 3_500_000}, "gates": {"seconds": 7.0, "kept": 0}}
    files.write_json(tmp_path / "plan.json", {"stages": stages, "seconds": 68.4, "kept": 3_500_000})
    rows = rows_of(costs.stages(tmp_path / "results", benchmarks, tmp_path / "plan.json"))
    assert rows["stage"][-2:] == ["planned, s", "planned, MB"]
    assert rows["respond"] == ["50", "300", "0.0", "61", "3.5"]
    assert rows["gates"] == ["5", "", "", "7", "0.0"]
    assert rows["train"][-2:] == ["", ""]
    assert rows["total"] == ["65", "", "0.0", "68", "3.5"]


def test_a_run_without_a_plan_that_can_be_read_shows_its_costs_alone(tmp_path: Path, benchmarks: Path):
    files.write_text(tmp_path / "plan.json", "{")
    rows = rows_of(costs.stages(tmp_path / "results", benchmarks, tmp_path / "plan.json"))
    assert rows["stage"] == ["wall time, s", "peak memory, MiB", "disk, MB"]


def test_the_share_of_the_gates_is_told_with_and_without_the_rehearsal(tmp_path: Path, benchmarks: Path):
    files.write_text(tmp_path / "results/model.safetensors", "x" * 1_000_000)
    lines = costs.gates(tmp_path / "results", benchmarks)
    rows = rows_of(lines)
    assert (rows["validate_prompts"], rows["validate_samples"]) == (["2.0"], ["3.0"])
    assert any("All gates take 7.7% of the time of all jobs; with the rehearsal" in line for line in lines)
    assert any("before the training starts, 20.8%." in line for line in lines)
    assert lines[-1].startswith("Checksums are computed at ")
