# SPDX-License-Identifier: Apache-2.0
"""Which change reruns what: plans made in-process on a finished run whose files are stand-ins."""

import copy
import os
import subprocess
import sys

import pytest
from snakemake.exceptions import WorkflowError

from conftest import CONFIG, changed
from pilotfish import verification
from workspace import (
    ALL_PROMPTS,
    CAPTURING,
    EVALUATION,
    HIDDEN_STATES_GATE,
    OF_A_SET,
    PROMPTS,
    REHEARSAL,
    RESPONSES,
    RESULTS,
    SAMPLES,
    STATES,
    TRAINING,
    VOCABULARY,
    Workspace,
)  # fmt: skip


def test_a_finished_run_has_nothing_to_do(workspace: Workspace):
    assert workspace.reruns() == set()


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"engine__port": 8123, "engine__stall_timeout": 60}, set()),
        ({"responses__max_failed": 3, "responses__max_truncated": 0.8, "responses__max_flawed": 0.2}, set()),
        ({"responses__truncated": "drop"}, {"validate_responses"} | SAMPLES),
        ({"prompts__max_near_duplicates": 0.2}, set()),
        ({"engine__max_num_seqs": 32}, EVALUATION),
        ({"evaluation__max_tokens": 64}, EVALUATION),
        ({"evaluation__sets__heldout__prompts": 10}, EVALUATION),
        ({"drafters__eagle3__learning_rate": 1.0e-3}, TRAINING),
        ({"drafters__eagle3__draft_vocab_size": 2048}, VOCABULARY),
        ({"drafters__eagle3__capture_layers": [3, 15, 27]}, STATES),
        ({"responses__max_tokens": 160}, RESPONSES),
        ({"prompts__train": 360}, PROMPTS),
        ({"engine__max_model_len": 768}, ALL_PROMPTS),
        ({"seed": 1}, ALL_PROMPTS),
        ({"target__reasoning_parser": "qwen3"}, {"prepare_target"} | RESPONSES),
        ({"target__source": "package:another"}, {"prepare_target"} | RESPONSES),
    ],
    ids=str,
)
def test_a_changed_setting_reruns_exactly_its_cone(workspace: Workspace, change: dict, rules: set[str]):
    assert workspace.reruns(changed(**change)) == rules


@pytest.mark.parametrize(
    ("path", "old", "new", "rules"),
    [
        ("scripts/pilotfish/vocabulary.py", "ranked = np.lexsort", "ranked = 0 + np.lexsort", VOCABULARY),
        ("scripts/pilotfish/training.py", "_PER_EPOCH = 4", "_PER_EPOCH = 5", REHEARSAL),
        ("scripts/pilotfish/report.py", "run `{run}`", "report of `{run}`", {"report", "all"}),
        ("scripts/pilotfish/overlap.py", "PHRASE = 13", "PHRASE = 14", {"validate_prompts"} | RESPONSES),
        ("scripts/pilotfish/capture.py", "event.synchronize()", "event.synchronize(), None", CAPTURING),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_a_fix_in_the_code_reruns_exactly_the_rules_that_can_reach_it(
    workspace: Workspace, path: str, old: str, new: str, rules: set[str]
):
    workspace.edit(path, old, new)
    assert workspace.reruns() == rules


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("scripts/pilotfish/generation.py", "ATTEMPTS = 5  # per row", "ATTEMPTS = 5  # for every row"),
        ("scripts/pilotfish/shards.py", '"""Write rows, each', '"""Write some rows, each'),
        ("scripts/respond.py", "import asyncio\n", "import asyncio\n\n# A comment.\n"),
        ("rules/drafters.smk", '"""Checkpoint of a', '"""The checkpoint of a'),
        ("config/default.yaml", "seed: 0", "seed: 0 # a comment"),
    ],
    ids=lambda value: value if "/" in value else "",
)
def test_a_comment_or_docstring_reruns_nothing(workspace: Workspace, path: str, old: str, new: str):
    workspace.edit(path, old, new)
    assert workspace.reruns() == set()


def test_a_git_checkout_reruns_nothing(workspace: Workspace):
    """Git writes the same bytes with a new time."""
    for folder in ("rules", "scripts", "config"):
        for file in (workspace.root / folder).rglob("*.*"):
            os.utime(file)
    assert workspace.reruns() == set()


def test_a_changed_prompt_file_reruns_its_cone(workspace: Workspace):
    with open(workspace.root / "config" / "prompts" / "python_stdlib.jsonl", "a", encoding="utf-8") as file:
        file.write("{}\n")
    assert workspace.reruns() == PROMPTS


@pytest.mark.parametrize(
    ("lost", "rules"),
    [
        ("report.md", {"report", "all"}),
        ("export/eagle3/model.safetensors", {"export", "validate_export"} | EVALUATION),
    ],
)
def test_a_lost_product_reruns_its_rule_and_what_follows(workspace: Workspace, lost: str, rules: set[str]):
    (workspace.root / RESULTS / lost).unlink()
    assert workspace.reruns() == rules


@pytest.mark.parametrize("lost", ["hidden_states/train/00000-of-00001/index.json", "responses/train/manifest.json"])
def test_a_lost_intermediate_that_nothing_needs_any_more_reruns_nothing(workspace: Workspace, lost: str):
    """So the bulky hidden states can be deleted once a drafter is trained."""
    (workspace.root / RESULTS / lost).unlink()
    assert workspace.reruns() == set()


@pytest.mark.parametrize(
    ("lost", "change", "rules"),
    [
        ("hidden_states/train/manifest.json", {"drafters__eagle3__epochs": 9}, HIDDEN_STATES_GATE | REHEARSAL),
        ("vocabulary/4096/manifest.json", {"drafters__eagle3__epochs": 9}, VOCABULARY - {"map_vocabulary"}),
        ("prompts/heldout.jsonl", {"evaluation__max_tokens": 64}, PROMPTS),
    ],
    ids=str,
)
def test_a_lost_file_that_a_change_needs_again_is_remade(
    workspace: Workspace, lost: str, change: dict, rules: set[str]
):
    (workspace.root / RESULTS / lost).unlink()
    assert workspace.reruns(changed(**change)) == rules


@pytest.mark.parametrize(
    ("damaged", "manifest", "rules"),
    [
        ("responses/heldout/00000-of-00001.jsonl", "responses/heldout", {"respond", "validate_responses"}),
        ("samples/train/samples.arrow", "samples/train", {"assemble_samples", "validate_samples"}),
        ("hidden_states/train/00000-of-00001/index.json", "hidden_states/train", {"capture", "validate_hidden_states"}),
        ("export/eagle3/model.safetensors", "export/eagle3", {"export", "validate_export"}),
    ],
)
def test_the_run_after_verify_rebuilds_just_what_was_damaged_though_its_products_are_up_to_date(
    workspace: Workspace, damaged: str, manifest: str, rules: set[str]
):
    results = workspace.root / RESULTS
    found = verification.Damage(results / damaged, results / manifest / "manifest.json", "other bytes")
    verification.take_away(results, [found])
    assert workspace.reruns() == rules | {"all"}


def test_a_file_restored_with_the_same_bytes_reruns_nothing(workspace: Workspace):
    for path in (workspace.root / RESULTS).rglob("*.json*"):
        path.write_bytes(path.read_bytes())
    assert workspace.reruns() == set()


def test_a_second_drafter_trains_beside_the_first_and_touches_no_data(workspace: Workspace):
    config = copy.deepcopy(CONFIG)
    config["drafters"]["longer"] = {**config["drafters"]["eagle3"], "epochs": 5}
    jobs = workspace.needed(config)
    assert {job.rule.name for job in jobs} == REHEARSAL
    # All are served anew, side by side, and so judged anew.
    of_drafters = {job.wildcards_dict.get("drafter") for job in jobs if job.rule.name != "validate_evaluation"}
    assert of_drafters - {None} == {"longer"}


def reruns_of_sets(workspace: Workspace, config: dict) -> tuple[set[str], set[str]]:
    """Names of the rules that would run, and of the splits that they would run for."""
    jobs = workspace.needed(config)
    return {job.rule.name for job in jobs}, {job.wildcards_dict.get("split") for job in jobs} - {None}


FRESH = {"source": "config/prompts/fresh.jsonl", "prompts": 8}


@pytest.fixture
def with_fresh(workspace: Workspace) -> dict:
    """A configuration with an evaluation set more, whose file is there."""
    (workspace.root / FRESH["source"]).write_text("{}\n", encoding="utf-8")
    return changed(evaluation__sets__fresh=FRESH)


def test_a_further_evaluation_set_runs_alone_until_all_sets_are_served(workspace: Workspace, with_fresh: dict):
    assert reruns_of_sets(workspace, with_fresh) == (OF_A_SET | EVALUATION, {"fresh"})


def test_another_number_of_prompts_reruns_only_that_set_until_all_are_served(workspace: Workspace):
    config = changed(evaluation__sets__humaneval__prompts=10)
    assert reruns_of_sets(workspace, config) == (OF_A_SET | EVALUATION, {"humaneval"})


def test_a_set_left_out_runs_nothing_but_what_serves_and_shows_all_of_them(workspace: Workspace):
    config = changed(evaluation__sets={"heldout": CONFIG["evaluation"]["sets"]["heldout"]})
    assert reruns_of_sets(workspace, config) == (EVALUATION, set())


def test_a_changed_file_of_a_set_reruns_only_that_set(workspace: Workspace, with_fresh: dict):
    workspace.finish(with_fresh)
    assert workspace.reruns(with_fresh) == set()
    with open(workspace.root / FRESH["source"], "a", encoding="utf-8") as file:
        file.write("{}\n")
    assert reruns_of_sets(workspace, with_fresh) == (OF_A_SET | EVALUATION, {"fresh"})


def test_the_file_of_a_set_that_is_not_there_stops_the_plan(workspace: Workspace):
    with pytest.raises(WorkflowError, match=r"evaluation\.sets\.fresh\.source: no file 'config/prompts/fresh\.jsonl'"):
        workspace.reruns(changed(evaluation__sets__fresh=FRESH))


def test_a_prompt_file_that_is_not_there_stops_the_plan(workspace: Workspace):
    config = changed(prompts__sources=[{"source": "config/prompts/mine.jsonl"}])
    with pytest.raises(
        WorkflowError, match=r"prompts\.sources\.0\.source: no file 'config/prompts/mine\.jsonl' in .*; check the path"
    ):
        workspace.reruns(config)


def test_the_gpu_profile_plans_on_a_machine_without_one(workspace: Workspace):
    planned = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--forceall", "--profile", "profiles/gpu"],
        cwd=workspace.root, capture_output=True, text=True,
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert "gpu=1" in planned.stdout + planned.stderr


def test_planning_imports_no_heavy_package(workspace: Workspace):
    """Snakemake itself imports pandas, where it is installed, to compare the params of a finished run."""
    program = (
        "import sys; from snakemake.cli import main\n"
        "try: main(['-n', '--quiet', 'all'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'torch', 'pandera', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    planned = subprocess.run([sys.executable, "-c", program], cwd=workspace.root, capture_output=True, text=True)
    assert planned.stdout.splitlines()[-1] == "[]", planned.stderr


def test_a_misspelt_key_stops_the_plan_with_the_key_and_the_cure(workspace: Workspace):
    planned = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "--config", "sede=1"],
        cwd=workspace.root, capture_output=True, text=True,
    )  # fmt: skip
    assert planned.returncode != 0
    said = planned.stdout + planned.stderr
    assert "sede: unknown key; did you mean `seed`?" in said
    assert "Traceback" not in said
