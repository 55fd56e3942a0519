# SPDX-License-Identifier: Apache-2.0
"""A run that cannot fit on the disk is refused before its first job; its plan is noted for the report."""

import dataclasses

import pytest
import yaml
from snakemake.exceptions import WorkflowError

from conftest import CONFIG, changed, copy_workflow
from helpers import execute
from pilotfish import disk, files, fitting, settings
from pilotfish.errors import UserError
from test_planning import SMOLLM2, planned, stage

CHOSEN = settings.load(CONFIG)
PART = "00000-of-00001"
PLAN = planned(CONFIG, SMOLLM2, 50, 100)


def of_split(rule: str, split: str) -> tuple[str, dict[str, str]]:
    return rule, {"split": split, "part": PART}


ALL = [*(of_split("respond", split) for split in PLAN.shares), ("train", {}), ("serve", {})]


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: count)


def test_a_stage_is_pending_by_the_share_of_its_jobs():
    jobs = [of_split("respond", "train"), ("train", {"drafter": "eagle3"}), ("validate_samples", {}), ("report", {})]
    shares = fitting.pending(PLAN, CHOSEN, jobs)
    assert shares == {"respond": pytest.approx(400 / 444), "train": 0.5, "gates": 1.0}


def test_there_is_room_down_to_the_reserve_and_not_below(tmp_path, monkeypatch):
    needed = PLAN.still_to_write(dict.fromkeys(("respond", "train", "serve"), 1.0), {}) + disk.RESERVE
    free(monkeypatch, needed)
    fitting.check(PLAN, CHOSEN, tmp_path, ALL)
    free(monkeypatch, needed - 1)
    with pytest.raises(UserError):
        fitting.check(PLAN, CHOSEN, tmp_path, ALL)


def test_the_refusal_names_the_numbers_and_the_cure(tmp_path, monkeypatch):
    free(monkeypatch, 2_500_000_000)
    with pytest.raises(UserError) as refused:
        fitting.check(PLAN, CHOSEN, tmp_path, ALL)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path}: this run has up to ")
    for words in (
        "GB of respond",
        "1.1 GB in reserve",
        "2.5 GB are free",
        "lower prompts.train",
        "Nothing was started",
    ):
        assert words in said


def test_states_that_never_fit_are_refused_with_the_advice_to_train_online(tmp_path, monkeypatch):
    free(monkeypatch, 1_000_000_000)
    with pytest.raises(UserError, match=r"too large to store.*trained online.*not offered yet"):
        fitting.check(PLAN, CHOSEN, tmp_path, ALL)


def test_what_is_begun_is_not_asked_for_again(tmp_path):
    work = tmp_path / "responses/train" / f"{PART}.jsonl.work" / "0123" / "captured"
    files.write_text(work / "rows_0000000-0000064.safetensors", "x" * 5_000)
    files.write_text(tmp_path / "responses/train/manifest.json", "of an older run, replaced when the new one is there")
    assert fitting.begun(tmp_path)["respond"] == 5_000


def test_jobs_that_write_next_to_nothing_run_on_a_full_disk(tmp_path, monkeypatch):
    free(monkeypatch, 0)
    fitting.check(PLAN, CHOSEN, tmp_path, [("validate_samples", {}), ("report", {}), of_split("replay", "heldout")])


def test_of_answers_that_are_there_only_the_layers_they_lack_are_captured(tmp_path):
    listing = tmp_path / "responses/train" / f"{PART}.captured/index.json"
    files.write_json(listing, {"shards": [{"layers": [2, 15, 27, 30]}]})
    assert PLAN.layers == (2, 9, 15, 21, 27, 28, 30)
    added = fitting.recaptured(PLAN, CHOSEN, tmp_path, [of_split("capture", "train")])
    assert added == pytest.approx(PLAN.state_bytes * 400 / 444 * 3 / 7, abs=1)
    with_answers = [of_split("capture", "train"), of_split("respond", "train")]
    assert fitting.recaptured(PLAN, CHOSEN, tmp_path, with_answers) == 0


def test_the_plan_that_a_run_began_with_is_kept_until_its_configuration_changes(tmp_path):
    fitting.note(PLAN, CONFIG, tmp_path)
    first = files.read_json(tmp_path / "plan.json")
    assert first["stages"]["respond"]["kept"] == stage(PLAN, "respond").kept
    later = dataclasses.replace(PLAN, stages=())
    fitting.note(later, CONFIG, tmp_path)
    assert files.read_json(tmp_path / "plan.json") == first
    fitting.note(later, changed(seed=3), tmp_path)
    assert files.read_json(tmp_path / "plan.json")["stages"] == {}


@pytest.fixture
def workflow(tmp_path):
    root = copy_workflow(tmp_path / "work")
    (root / "my.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return root


def test_snakemake_stops_before_the_first_job_where_the_run_cannot_fit(workflow, monkeypatch):
    free(monkeypatch, 3_000_000_000)
    with pytest.raises(WorkflowError, match=r"still to write.*3\.0 GB are free.*Nothing was started"):
        execute(workflow, workflow / "my.yaml", "local", forceall=False)
    assert not [path for name in ("results", "logs", "benchmarks") for path in (workflow / name).rglob("*")]


def test_a_dry_run_of_a_run_that_cannot_fit_is_shown(workflow, monkeypatch):
    free(monkeypatch, 0)
    dag = execute(workflow, workflow / "my.yaml", "dryrun", forceall=False)
    assert "respond" in {job.rule.name for job in dag.jobs}
