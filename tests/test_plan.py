# SPDX-License-Identifier: Apache-2.0
"""Which change reruns what: plans made in-process on a finished run whose files are stand-ins."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from snakemake.exceptions import WorkflowError

from conftest import CONFIG, changed, copy_workflow
from helpers import captured_folder, execute, random_ids, response
from pilotfish import digest, layers, prompts, shards, verification, work
from pilotfish.adoption import Adoption
from pilotfish.journal import Journal

RESULTS = "results/default"

EVALUATION = {"serve", "validate_evaluation", "report", "all"}
AFTER_TRAINING = {"validate_drafter", "replay", "export", "validate_export"} | EVALUATION
TRAINING = {"train"} | AFTER_TRAINING
REHEARSAL = {"rehearse", "validate_rehearsal"} | TRAINING
VOCABULARY = {"map_vocabulary", "validate_vocabulary"} | REHEARSAL
STATES = {"capture", "validate_hidden_states"} | REHEARSAL
SAMPLES = {"assemble_samples", "validate_samples"} | STATES | VOCABULARY
RESPONSES = {"respond", "validate_responses"} | SAMPLES
PROMPTS = {"collect_prompts", "validate_prompts"} | RESPONSES
ALL_PROMPTS = {"collect_evaluation_set"} | PROMPTS
OF_A_SET = {"collect_evaluation_set", "validate_prompts", "respond", "validate_responses"}
OF_A_SET |= {"assemble_samples", "validate_samples", "capture", "validate_hidden_states", "replay"}
HIDDEN_STATES_GATE = {"validate_hidden_states"}
CAPTURING = {"respond"} | RESPONSES


class Workspace:
    """A copy of the workflow in which every output exists and Snakemake believes that it made it."""

    def __init__(self, root: Path):
        self.root = root

    def finish(self, config: dict = CONFIG) -> None:
        """Write a stand-in for every output, then have Snakemake record each job as done."""
        for job in self._jobs(config, needed_only=False):
            for path in job.output:
                file = self.root / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"stand-in for {path}\n", encoding="utf-8")
        self._execute(config, "touch", forceall=True)

    def reruns(self, config: dict = CONFIG) -> set[str]:
        """Names of the rules that a run would execute now."""
        return {job.rule.name for job in self.needed(config)}

    def needed(self, config: dict) -> list:
        """The jobs that a run would execute now."""
        return self._jobs(config, needed_only=True)

    def _jobs(self, config: dict, needed_only: bool) -> list:
        dag = self._execute(config, "dryrun", forceall=not needed_only)
        return [job for job in dag.jobs if not needed_only or dag.needrun(job)]

    def _execute(self, config: dict, executor: str, forceall: bool):
        # A new Snakemake process would read the scripts anew.
        digest._imported_files.cache_clear()
        digest._file_digest.cache_clear()
        file = self.root / "my.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        return execute(self.root, file, executor, forceall)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace a text in a file; the text must be there."""
        file = self.root / path
        text = file.read_text(encoding="utf-8")
        assert old in text, f"{path} has changed: {old!r} is gone"
        file.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = Workspace(copy_workflow(tmp_path_factory.mktemp("finished") / "work"))
    workspace.finish()
    return workspace.root


@pytest.fixture
def workspace(finished: Path, tmp_path: Path) -> Workspace:
    """A private copy of the finished run, times included."""
    root = tmp_path / "work"
    shutil.copytree(finished, root, copy_function=shutil.copy2)
    return Workspace(root)


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
        ({"evaluation__sets__heldout__prompts": 12}, EVALUATION),
        ({"drafters__eagle3__learning_rate": 1.0e-3}, TRAINING),
        ({"drafters__eagle3__draft_vocab_size": 2048}, VOCABULARY),
        ({"drafters__eagle3__capture_layers": [3, 15, 27]}, STATES),
        ({"responses__max_tokens": 160}, RESPONSES),
        ({"prompts__train": 400}, PROMPTS),
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


ROWS = {"train": 640, "heldout": 48, "humaneval": 16}
EVERY_RULE = {"prepare_target"} | ALL_PROMPTS
TARGET = {"layers": 30}
FEW = 4  # rows that stand for all of a split
DRAFTERS_LAYERS = layers.layers_to_capture([("eagle3", None), ("dflash", None)], TARGET)


def edit(path: str, old: str, new: str) -> Callable[[Workspace], dict]:
    """A fix in a file."""

    def fix(workspace: Workspace) -> dict:
        workspace.edit(path, old, new)
        return CONFIG

    return fix


def setting(**changes) -> Callable[[Workspace], dict]:
    """A fix in the configuration."""
    return lambda _: changed(**changes)


def further_prompt(workspace: Workspace) -> dict:
    with open(workspace.root / "config" / "prompts" / "python_stdlib.jsonl", "a", encoding="utf-8") as file:
        file.write("{}\n")
    return CONFIG


def captures(*added: int) -> dict[str, tuple[int, list[int]]]:
    return {split: (rows, list(added)) for split, rows in ROWS.items()}


# Each kind of fix: the rules that run again, the rows of each split that are answered anew, and those that an engine
# computes states of anew, with the layers. A job that has ended keeps no journal, so a part is answered whole; its
# states come along. As planned: where a gate's manifest comes out with the same bytes, what follows does not run.
FIXES = {
    # One prompt more changes what vouches for all sets, since each is compared with the training prompts.
    "prompt set": (further_prompt, PROMPTS, ROWS, {}),
    "sampling": (setting(responses__max_tokens=160), RESPONSES, ROWS, {}),
    "sampling that is not greedy": (setting(responses__temperature=0.5), RESPONSES, ROWS, captures(*DRAFTERS_LAYERS)),
    "template": (setting(responses__chat_template_kwargs={"enable_thinking": False}), RESPONSES, ROWS, {}),
    "mask rule": (
        edit("scripts/pilotfish/samples.py", "[False] * len(prompt) + [True]", "[False] * (0 + len(prompt)) + [True]"),
        SAMPLES, {}, {},
    ),
    "mask rule of training": (
        edit("scripts/pilotfish/samples.py", "loss_mask[:-1] & loss_mask[1:]", "loss_mask[1:] & loss_mask[:-1]"),
        SAMPLES, {}, {},
    ),
    "vocabulary size": (setting(drafters__eagle3__draft_vocab_size=2048), VOCABULARY, {}, {}),
    "layer set": (setting(drafters__eagle3__capture_layers=[3, 15, 27]), STATES, {}, captures(3)),
    "layer set, of layers that are there": (setting(drafters__eagle3__capture_layers=[2, 15, 28]), STATES, {}, {}),
    "a drafter's hyper-parameter": (setting(drafters__eagle3__learning_rate=1.0e-3), TRAINING, {}, {}),
    "evaluation set": (
        setting(evaluation__sets__humaneval__prompts=12), OF_A_SET | EVALUATION, {"humaneval": 12}, {},
    ),
    "evaluation set, as served": (setting(evaluation__sets__heldout__prompts=12), EVALUATION, {}, {}),
    "report": (edit("scripts/pilotfish/report.py", "run `{run}`", "report of `{run}`"), {"report", "all"}, {}, {}),
    "comment": (edit("scripts/respond.py", "import asyncio\n", "import asyncio\n\n# A comment.\n"), set(), {}, {}),
    "helper of one stage": (
        edit("scripts/pilotfish/vocabulary.py", "ranked = np.lexsort", "ranked = 0 + np.lexsort"), VOCABULARY, {}, {},
    ),
    "helper of every stage": (
        edit("scripts/pilotfish/files.py", "LONGEST_LINE = 1 << 25", "LONGEST_LINE = 1 << 26"), EVERY_RULE, ROWS, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FIXES)
def test_a_fix_reruns_exactly_these_rules_and_these_rows(workspace: Workspace, tmp_path: Path, kind: str):
    fix, rules, answered, captured = FIXES[kind]
    config = fix(workspace)
    assert workspace.reruns(config) == rules
    assert rows_answered(workspace, config) == answered
    assert rows_captured(workspace, config, tmp_path) == captured


def respond_jobs(workspace: Workspace, config: dict) -> dict[str, list[tuple[Path, range]]]:
    """Of each split the jobs that would answer: where each keeps its unfinished work, and its rows."""
    rows = {name: chosen["prompts"] for name, chosen in config["evaluation"]["sets"].items()}
    rows |= {name: config["prompts"][name] for name in ("train", "heldout")}  # of the held-out ones few are served
    found: dict[str, list[tuple[Path, range]]] = {}
    for job in workspace.needed(config):
        if job.rule.name == "respond":
            split = job.wildcards_dict["split"]
            inputs = [workspace.root / path for path in (job.input.target, job.input.prompts)]
            folder = work.folder(workspace.root / job.output[0], job.params.spec, job.params.code, inputs)
            part = prompts.part_rows(rows[split], job.wildcards_dict["part"])
            found.setdefault(split, []).append((folder, part))
    return found


def rows_answered(workspace: Workspace, config: dict) -> dict[str, int]:
    """Rows of each split that an engine would be asked for: those that the journals do not hold."""
    return {
        split: sum(len(set(part) - set(Journal(folder, part, []).done)) for folder, part in parts)
        for split, parts in respond_jobs(workspace, config).items()
    }


def rows_captured(workspace: Workspace, config: dict, folder: Path) -> dict[str, tuple[int, list[int]]]:
    """Rows of each split that lack states after the adoption of what answering left, and the layers that they lack."""
    answered, found = respond_jobs(workspace, config), {}
    for job in workspace.needed(config):
        if job.rule.name != "capture":
            continue
        split, spec = job.wildcards_dict["split"], json.loads(job.params.spec)
        wanted = layers.layers_to_capture(spec["capture_layers"], TARGET)
        along = wanted if config["responses"]["temperature"] == 0 else []  # with answers that are given anew
        held = along if split in answered else DRAFTERS_LAYERS
        ids = {row: random_ids(5, row) for row in range(FEW)}
        made = Adoption(folder / split / "work", wanted, ids)
        if held:
            made.adopt(captured_folder(folder / split / "captured", ids, held) / shards.INDEX)
        if missing := made.missing():
            assert len(missing) == FEW
            found[split] = (spec["rows"], made.missing_layers())
    return found


def test_a_job_that_was_broken_off_goes_on_after_a_comment_and_begins_anew_after_a_fix(workspace: Workspace):
    for lost in ("00000-of-00001.jsonl", "manifest.json"):
        (workspace.root / RESULTS / "responses" / "heldout" / lost).unlink()
    config = changed(responses__truncated="drop")
    ((folder, part),) = respond_jobs(workspace, config)["heldout"]
    journal = Journal(folder, part, [])
    for row in range(10):
        journal.finish(response(row, [1, 2], [3, 4]), "")
    assert rows_answered(workspace, config) == {"heldout": 38}
    workspace.edit("scripts/respond.py", "import asyncio\n", "import asyncio\n\n# A comment.\n")
    assert rows_answered(workspace, config) == {"heldout": 38}
    config["responses"]["max_tokens"] = 160
    assert rows_answered(workspace, config) == ROWS


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
    config = changed(evaluation__sets__humaneval__prompts=12)
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
    config = changed(prompts__path="config/prompts/mine.jsonl")
    with pytest.raises(
        WorkflowError, match=r"prompts\.path: no file 'config/prompts/mine\.jsonl' in .*; check the path"
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
