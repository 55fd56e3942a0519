# SPDX-License-Identifier: Apache-2.0
"""After a fix: which rules run again, and for how many rows an engine is asked."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import CONFIG, changed
from helpers import captured_folder, random_ids, read_prompts, response
from pilotfish import evaluation_sets, files, layers, prompts, reuse, settings, shards, work
from pilotfish.adoption import Adoption
from pilotfish.journal import Journal
from workspace import (
    ALL_PROMPTS,
    EVALUATION,
    OF_A_SET,
    PROMPTS,
    RESPONSES,
    RESULTS,
    SAMPLES,
    STATES,
    TRAINING,
    VOCABULARY,
    Workspace,
)  # fmt: skip

SOURCE = CONFIG["prompts"]["sources"][0]["source"]
ROWS = {"train": 400, "heldout": 32, "humaneval": 12}
NONE = dict.fromkeys(ROWS, 0)  # answered once more, none of them by an engine
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
    row = {"id": "one more", "messages": [{"role": "user", "content": "What does `zip` do with lists of two lengths?"}]}
    with open(workspace.root / SOURCE, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return CONFIG


def changed_prompt(workspace: Workspace) -> dict:
    """One prompt that is trained on asks something else."""
    path = workspace.root / SOURCE
    rows = files.read_jsonl(path)
    chosen = asked(workspace, CONFIG)["train"][7]["id"]
    (row,) = (row for row in rows if row["id"] == chosen)
    row["messages"][-1]["content"] += " Give an example."
    files.write_jsonl(path, rows)
    return CONFIG


def captures(*added: int) -> dict[str, tuple[int, list[int]]]:
    return {split: (rows, list(added)) for split, rows in ROWS.items()}


# Each kind of fix: the rules that run again, the rows of each split that are answered anew, and those that an engine
# computes states of anew, with the layers; states come along with answers. What has been asked with the same settings
# and code is not asked again. As planned: where a manifest comes out with the same bytes, what follows does not run.
FIXES = {
    # One prompt more changes what vouches for all sets, since each is compared with the training prompts. Where a
    # prompt goes, its conversation decides.
    "prompt set, one more": (further_prompt, PROMPTS, NONE, {}),
    "prompt set, one changed": (changed_prompt, PROMPTS, NONE | {"train": 1}, {}),
    "more prompts": (setting(prompts__train=440), PROMPTS, NONE | {"train": 40}, {}),
    "fewer prompts": (setting(prompts__train=360), PROMPTS, NONE, {}),
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
        setting(evaluation__sets__humaneval__prompts=10), OF_A_SET | EVALUATION, {"humaneval": 0}, {},
    ),
    "evaluation set, as served": (setting(evaluation__sets__heldout__prompts=10), EVALUATION, {}, {}),
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
def test_a_fix_reruns_exactly_these_rules_and_these_rows(
    workspace: Workspace, answers: dict[str, set[str]], tmp_path: Path, kind: str
):
    fix, rules, answered, captured = FIXES[kind]
    config = fix(workspace)
    assert workspace.reruns(config) == rules
    assert rows_answered(workspace, config, answers) == answered
    assert rows_captured(workspace, config, tmp_path) == captured


@pytest.fixture(scope="module")
def answers(finished: Path) -> dict[str, set[str]]:
    """What the finished run has answered of each split."""
    workspace = Workspace(finished)
    prompts_of = asked(workspace, CONFIG)
    jobs = workspace.jobs(CONFIG, needed_only=False)
    return {
        job.wildcards_dict["split"]: set(questions(workspace, job, prompts_of[job.wildcards_dict["split"]]))
        for job in jobs
        if job.rule.name == "respond"
    }


def asked(workspace: Workspace, config: dict) -> dict[str, list[dict]]:
    """The prompts of each split, as the workflow would collect them."""
    chosen = settings.load(config)
    longest, seed = chosen.engine.max_model_len, chosen.seed
    found = read_prompts(workspace.root / SOURCE, longest)
    sets = {name: each for name, each in chosen.evaluation.sets.items() if each.source}
    return prompts.split(found, chosen.prompts.train, chosen.prompts.heldout, seed) | {
        name: evaluation_sets.collect(name, {**each.model_dump(), "seed": seed, "max_model_len": longest})
        for name, each in sets.items()
    }


def questions(workspace: Workspace, job, rows: list[dict]) -> list[str]:
    """All that a row's answer comes from, for each row of a job that answers."""
    spec = json.loads(job.params.spec)
    origin = reuse.origin(workspace.root / job.input.target, spec, job.params.code)
    part = prompts.part_rows(len(rows), job.wildcards_dict["part"])
    return [f"{origin} {reuse.question(rows[row], {**spec['sampling'], 'seed': spec['seed'] + row})}" for row in part]


def respond_jobs(workspace: Workspace, config: dict) -> dict[str, list]:
    """The jobs of each split that would answer."""
    found: dict[str, list] = {}
    for job in workspace.needed(config):
        if job.rule.name == "respond":
            found.setdefault(job.wildcards_dict["split"], []).append(job)
    return found


def rows_answered(workspace: Workspace, config: dict, answers: dict[str, set[str]]) -> dict[str, int]:
    """Rows of each split that an engine would be asked for."""
    jobs = respond_jobs(workspace, config)
    prompts_of = asked(workspace, config) if jobs else {}
    return {
        split: sum(each not in answers[split] for job in some for each in questions(workspace, job, prompts_of[split]))
        for split, some in jobs.items()
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
    journal = Journal(unfinished(workspace, config), range(32), [])
    for row in range(10):
        journal.finish(response(row, [1, 2], [3, 4]), "")
    workspace.edit("scripts/respond.py", "import asyncio\n", "import asyncio\n\n# A comment.\n")
    assert len(Journal(unfinished(workspace, config), range(32), []).done) == 10
    config["responses"]["max_tokens"] = 160
    assert Journal(unfinished(workspace, config), range(32), []).done == {}


def unfinished(workspace: Workspace, config: dict) -> Path:
    """Where the job that answers the held-out prompts keeps its unfinished work."""
    (job,) = respond_jobs(workspace, config)["heldout"]
    inputs = [workspace.root / path for path in (job.input.target, job.input.prompts)]
    return work.folder(workspace.root / job.output[0], job.params.spec, job.params.code, inputs)
