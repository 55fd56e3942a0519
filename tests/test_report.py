# SPDX-License-Identifier: Apache-2.0
"""The report's tables, costs and numbers, from a small run made by hand."""

from pathlib import Path

import pytest

from helpers import rows_of, write_benchmark
from pilotfish import files, report

NEAR = {"error": 0.0125, "next_best": "h(3)", "next_error": 0.375}
ACCEPTANCE = {"rows": 4, "tau_replay": 2.5, "tau_most_frequent": 1.25}
FACTS = {
    "mini": {"kind": "drafter", "algorithm": "dflash", "size": "64", "speculative_tokens": 2},
    "published": {"kind": "reference", "algorithm": "eagle3", "speculative_tokens": 2},
}
SETS = ["heldout", "fresh"]
SUMMARY = {"tau_micro_incl_bonus": 2.25, "joint": [0.75, 0.5], "rounds": 40}
REPLAY = {**SUMMARY, "rows": 9, "tau_micro_interval_95": [2.125, 2.375]}
TREE = {"budget": 8, "top_k": 8, "depth": 2, "summary": {**REPLAY, "tau_micro_incl_bonus": 2.5}}


def level(speed: float, identical: int, floor: int) -> dict:
    return {
        "baseline_tokens_per_second": 100.0,
        "tokens_per_second": 100.0 * speed,
        "speedup": speed,
        "speedup_interval_95": [speed - 0.25, speed + 0.25] if speed > 1 else None,
        "time_per_output_token_ms": {"p50": 10.0, "p99": 20.0},
        "summary": SUMMARY,
        "prompts": 8,
        "identical_to_baseline": identical,
        "baseline_identical_to_its_first_level": floor,
        "text_against_baseline": {"rows_differing": 8 - identical, "rows_judged": 8 - identical, "largest_gap": 0.125},
        "parity": {
            "rounds_equal": 39,
            "rounds_compared": 40,
            "rounds_served": 44,
            "tau_served": 2.25,
            "tau_replay": 2.2499,
        },
    }


def logged(kind: str, loss: float, drafted: int, **more) -> dict:
    accuracy = {f"full_acc_{place}": loss + place for place in range(drafted)}
    return {"kind": kind, "loss": loss, **accuracy, **more}


def write_run(root: Path, drafted: int = 2) -> tuple[Path, Path]:
    """Results and benchmarks of a finished run with one drafter and one reference, on two sets."""
    results, benchmarks = root / "results", root / "benchmarks"
    counts = {"ok": 9, "failed": 1, "kept": 8, "truncated": 2, "cut_in_reasoning": 1, "loops": 3}
    tokens = {"prompt_tokens": 90, "response_tokens": 900, "reasoning_tokens": 400}
    responses = {**counts, **tokens, "mode": "thinking", "left_out": {"flawed": 1}}
    heldout = logged("heldout", 0.25, drafted, epoch=0)
    levels = {"1": level(1.5, identical=8, floor=8), "8": level(0.875, identical=5, floor=6)}
    statistics = {
        "target": {"source": "package:tiny", "architecture": "LlamaForCausalLM"},
        "responses/train": {**responses, "finish_reasons": {"stop": 7, "length": 2}},
        **{f"responses/{name}": {**responses, "finish_reasons": {"stop": 9}} for name in SETS},
        "hidden_states/train": {
            "capture_layers": [1, 2, 3, 4],
            "recomputed": {"rows": 3, "layers": {"10": NEAR, "2": NEAR}},
        },
        "drafters/mini/rehearsal": {"row": 5, "steps": 31, "per_step_accepted": [2, 2, 2, 1]},
        "vocabulary/64": {"draft_vocab_size": 64, "coverage_train": 0.9876, "coverage_heldout": 0.5}
        | {"coverage_heldout_reasoning": 0.625, "coverage_heldout_answer": 0.25, "tau_ceiling_heldout": {"2": 2.5}},
        "drafters/mini": {"heldout": [heldout], "acceptance": ACCEPTANCE, "parameters": 1_730_200_000},
        **{f"evaluation/{name}": {"sets": dict.fromkeys(SETS, levels)} for name in FACTS},
    }
    for folder, facts in statistics.items():
        files.write_json(results / folder / "manifest.json", {"statistics": facts})
    for name, facts in FACTS.items():
        trees = [TREE] if facts["algorithm"] == "dflash" else []
        for chosen in SETS:
            files.write_json(
                results / "evaluation" / name / chosen / "replay.json", {"summary": REPLAY, "trees": trees}
            )
    log = [logged("train", float(step), drafted) for step in range(20)]
    replayed = {"kind": "replay", "epoch": 0, "tau": 2.125, "rows": 9}
    files.write_jsonl(results / "drafters/mini/checkpoint/training_log.jsonl", [*log, replayed, heldout])
    write_benchmark(benchmarks / "collect_prompts.tsv", 1.5, "NA")
    files.write_text(results / "target/model/model.safetensors", "weights")
    return results, benchmarks


@pytest.fixture
def text(tmp_path: Path) -> str:
    return report.compose(*write_run(tmp_path), tmp_path / "plan.json", "trial", FACTS, SETS)


def test_first_come_all_drafters_on_all_sets(text: str):
    tau, speed = text.split("## Drafters on each set: ")[1:3]
    rows = rows_of(tau.splitlines())
    assert rows["none"] == ["1", "1"]
    assert rows["mini, chain-2"] == rows["published, chain-2"] == ["2.250 (2.250, 2.12 to 2.38)"] * 2
    assert rows["mini, DDTree-8"] == ["- (2.500, 2.12 to 2.38)"] * 2
    assert "1 + accepted / rounds" in tau
    rows = rows_of(speed.splitlines())
    assert rows["none"] == ["100.0 tok/s"] * 4
    assert rows["mini"] == ["1.50x (1.25 to 1.75)", "0.88x"] * 2


def test_the_summary_holds_data_vocabulary_and_results(text: str):
    rows = rows_of(text.splitlines())
    assert text.startswith("# Pilotfish run `trial`\n")
    assert rows["target"] == ["package:tiny (LlamaForCausalLM)"]
    assert rows["train: rows"] == ["9 answered, 1 refused (2 length, 7 stop)"]
    assert rows["fresh: answers"] == [
        "thinking, 8 kept, 1 left out as flawed; 2 cut, 1 inside the reasoning; 3 end in a loop",
    ]
    assert rows["heldout: tokens"] == ["90 prompt, 900 response (400 of them reasoning)"]
    assert rows["capture layers, h(k)"] == ["1 2 3 4"]
    assert rows["mini: parameters"] == ["1730.2 M"]
    assert rows["mini: draft vocabulary"] == [
        "64 tokens, covers 98.76% of training, 50.00% of held-out tokens (62.50% of reasoning, 25.00% of answer); "
        "no tau above 2.50 is possible with it",
    ]
    assert rows["mini: held-out loss, accuracy by drafted token"] == ["0.250, 0.250 1.250"]
    assert rows["layers against transformers"] == [
        "relative error h(2) 0.013 (next h(3) 0.38), h(10) 0.013 (next h(3) 0.38); 3 rows recomputed"
    ]
    assert rows["mini: rehearsal"] == ["row 5 learnt by heart in 31 steps, served in 3 full blocks of 4"]
    assert rows["mini: replay tau at the gate"] == [
        "2.500 on 4 held-out rows, where the most frequent continuations give 1.250",
    ]


def test_training_shows_each_epoch_with_its_replay_and_the_mean_of_the_last_tenth(text: str):
    rows = rows_of(text.splitlines())
    assert rows["held out, epoch 1"] == ["0.250", "0.250", "1.250", "2.125"]
    assert rows["training, last tenth"] == ["18.500", "18.500", "19.500", ""]
    assert "20 steps." in text
    assert "Training of `published`" not in text


def test_serving_shows_each_set_and_concurrency_with_identity_and_parity(text: str):
    rows = rows_of(text.splitlines())
    assert rows["heldout, 1"] == ["100.0", "150.0", "10.0", "20.0", "2.250", "0.750", "0.500", "40"]
    served = [line for line in text.splitlines() if line.startswith("- heldout, concurrency")]
    assert "8 of 8 greedy outputs identical to the baseline's at the same concurrency." in served[0]
    assert "5 of 8" in served[1]
    assert "(the baseline agrees with its own first level in 6)" in served[1]
    assert "logits lie at most 0.12 standard deviations apart (3 of 3 places judged)" in served[1]
    assert "equal: 97.5% of the 40 that lie in text both share (44 served)" in served[1]


def test_the_report_ends_with_the_lines_that_serve_each_drafter(text: str, tmp_path: Path):
    model = tmp_path / "results/target/model"
    for folder in ("export/mini", "references/published"):
        speculative = f'{{"model": "{tmp_path}/results/{folder}", "num_speculative_tokens": 2}}'
        assert f"vllm serve {model} --speculative-config '{speculative}'" in text


def test_accuracies_stand_in_the_order_of_their_places(tmp_path: Path):
    text = report.compose(*write_run(tmp_path, drafted=12), tmp_path / "plan.json", "trial", FACTS, SETS)
    (shown,) = rows_of(text.splitlines())["mini: held-out loss, accuracy by drafted token"]
    assert shown == "0.250, " + " ".join(f"{0.25 + place:.3f}" for place in range(12))
