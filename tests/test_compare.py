# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: a finished tiny run, and a copy of it in which numbers and settings are edited."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import REPOSITORY
from helpers import rows_of
from pilotfish import comparing, files, seals, status
from pilotfish.errors import UserError

RUN, OTHER = "tiny", "other"


@pytest.fixture
def both(tiny_run: tuple[Path, str], tmp_path: Path) -> Path:
    """A folder with the finished run and its copy; files are links until they are edited."""
    for folder in ("results", "benchmarks"):
        for name in (RUN, OTHER):
            source = tiny_run[0] / folder / RUN
            shutil.copytree(source, tmp_path / folder / name, copy_function=lambda *ends: files.link(*map(Path, ends)))
    return tmp_path


def edit(root: Path, name: str, change: Callable[[dict], None]) -> None:
    """Change a JSON file of the copy, sealed as its gate would have sealed it."""
    path = root / "results" / OTHER / name
    value = files.read_json(path)
    change(value)
    seals.write_json(path, value)


def set_spec(**changes) -> Callable[[dict], None]:
    def change(manifest: dict) -> None:
        manifest["spec"] = json.dumps({**json.loads(manifest["spec"]), **changes})

    return change


def section(page: str, title: str) -> dict[str, list[str]]:
    """The rows of one table of the page."""
    (text,) = (part for part in page.split("\n## ") if part.startswith(title))
    rows = rows_of(text.splitlines())
    return {name: cells for name, cells in rows.items() if name.strip("-")}


def test_a_run_and_its_copy_differ_in_nothing(both: Path):
    page = comparing.compose(both, [RUN, OTHER])
    assert page.startswith("# Runs `tiny` and `other`\n\n## Settings that differ\n\nNone.\n")
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("|  "):
            left, right = rows_of([line]).popitem()[1]
            assert left.strip("-:") == right.strip("-:"), line


def test_only_the_settings_that_differ_are_shown_each_as_a_dotted_path(both: Path):
    edit(both, "drafters/eagle3/manifest.json", set_spec(learning_rate=0.5))
    edit(both, "drafters/eagle3/rehearsal/manifest.json", set_spec(draft_vocab_size=128, loss={"hard": 1.0}))
    edit(both, "target/manifest.json", lambda manifest: manifest["packages"].update(torch="1.0"))
    rows = section(comparing.compose(both, [RUN, OTHER]), "Settings")
    torch = files.read_json(both / "results" / RUN / "target/manifest.json")["packages"]["torch"]
    assert rows.keys() == {
        "drafters.eagle3.draft_vocab_size",
        "drafters.eagle3.learning_rate",
        "drafters.eagle3.loss",
        "drafters.eagle3.loss.hard",
        "packages.torch",
    }
    assert rows["drafters.eagle3.learning_rate"] == ["0.002", "0.5"]
    assert rows["drafters.eagle3.draft_vocab_size"] == ["256", "128"]
    assert rows["drafters.eagle3.loss"] == ["kl_div", "-"]
    # One gate ran with another version, the others of that run did not.
    assert rows["packages.torch"] == [torch, f"1.0, {torch}"]


def test_splits_that_differ_alike_share_a_row(both: Path):
    for split in ("heldout", "train"):
        path = both / "results" / OTHER / "responses" / split / "00000-of-00002.jsonl"
        rows = files.read_jsonl(path)
        rows[0]["sampling"]["temperature"] = 0.75
        files.write_jsonl(path, rows)
    rows = section(comparing.compose(both, [RUN, OTHER]), "Settings")
    assert rows == {"responses.{heldout,train}.sampling.temperature": ["0.0", "0.75"]}


def test_the_engines_own_settings_are_told_from_its_command_line(both: Path):
    def change(served: dict) -> None:
        served["arguments"][served["arguments"].index("--max-num-seqs") + 1] = "4"
        served["sampling"]["max_tokens"] = 7

    edit(both, "evaluation/baseline/served.json", change)
    assert section(comparing.compose(both, [RUN, OTHER]), "Settings") == {
        "evaluation.baseline.engine.max-num-seqs": ["32", "4"],
        "evaluation.baseline.sampling.max_tokens": ["64", "7"],
    }


def test_counts_coverage_and_digests_of_the_data_stand_side_by_side(both: Path):
    edit(both, "responses/train/manifest.json", lambda each: each["statistics"].update(kept=1100, truncated=9))
    edit(both, "samples/train/manifest.json", lambda each: each["files"]["samples.arrow"].update(sha256="ab" * 32))
    edit(both, "vocabulary/256/manifest.json", lambda each: each["statistics"].update(coverage_heldout=0.5))
    page = comparing.compose(both, [RUN, OTHER])
    rows = section(page, "Data")
    assert rows["train: responses kept"] == ["112", "1,100"]
    assert rows["train: cut at max_tokens"] == ["0", "9"]
    assert rows["train: sha256 of the samples"][1] == "ab" * 6
    assert {name.partition(":")[0] for name in rows} == {"train", "heldout", "fresh"}
    assert section(page, "Coverage")["256 tokens: of held-out"] == ["99.78%", "50.00%"]


def test_tau_and_speed_are_those_of_the_report(both: Path):
    page = comparing.compose(both, [RUN, OTHER])
    report = (both / "results" / RUN / "report.md").read_text(encoding="utf-8")
    taus, speeds = section(page, "tau"), section(page, "Speed")
    of_report = [rows_of(part.splitlines()) for part in report.split("## Drafters on each set: ")[1:3]]
    for drafter, chain in (("eagle3", "chain-3"), ("dflash", "chain-5")):
        served = taus[f"{drafter}, heldout: served"][0].removesuffix(f", {chain}")
        replay = taus[f"{drafter}, heldout: replay"][0]
        assert of_report[0][f"{drafter}, {chain}"][0] == f"{served} ({replay})"
        assert speeds[f"{drafter}, heldout, concurrency 1"][0].endswith(of_report[1][drafter][0])
    assert of_report[0]["dflash, DDTree-8"][0] == f"- ({taus['dflash, heldout: replay of DDTree-8'][0]})"
    assert speeds["none, fresh, concurrency 8"][0] == of_report[1]["none"][3]


def test_another_tau_speed_and_verdict_of_a_gate_show_in_the_other_column(both: Path):
    def faster(manifest: dict) -> None:
        level = manifest["statistics"]["sets"]["heldout"]["1"]
        level["summary"]["tau_micro_incl_bonus"] = 9.5
        level.update(tokens_per_second=1000.0, speedup=7.5, speedup_interval_95=None, identical_to_baseline=3)
        level["parity"].update(rounds_equal=1, rounds_compared=2)

    edit(both, "evaluation/eagle3/manifest.json", faster)
    edit(both, "drafters/eagle3/manifest.json", lambda each: each["statistics"]["acceptance"].update(tau_replay=1.25))
    page = comparing.compose(both, [RUN, OTHER])
    assert section(page, "tau")["eagle3, heldout: served"][1] == "9.500, chain-3"
    assert section(page, "Speed")["eagle3, heldout, concurrency 1"][1] == "1000.0 tok/s, 7.50x"
    gates = section(page, "What the gates saw")
    assert gates["eagle3: tau of its gate"][1] == "1.250"
    assert gates["eagle3, heldout, concurrency 1: rounds as replayed"][1] == "50.0% of 2"
    assert gates["eagle3, heldout, concurrency 1: texts as without it"][1] == "3 of 24"


def test_time_and_disk_of_each_stage_add_up_to_the_total(both: Path):
    benchmark = next((both / "benchmarks" / OTHER / "train").glob("*.tsv"))
    header, line = benchmark.read_text(encoding="utf-8").splitlines()
    rest = line.partition("\t")[2]
    files.write_text(benchmark, f"{header}\n1000000\t{rest}\n")
    before, after = section(comparing.compose(both, [RUN, OTHER]), "Cost")["total"]
    assert int(after.replace(",", "").partition(" s")[0]) > 1_000_000 > int(before.replace(",", "").partition(" s")[0])
    assert before.partition("s, ")[2] == after.partition("s, ")[2] != ""


def test_an_unfinished_run_shows_what_is_there_and_says_what_is_not(both: Path):
    results = both / "results" / OTHER
    for name in ("evaluation", "export", "drafters"):
        shutil.rmtree(results / name)
    (results / "report.md").unlink()
    page = comparing.compose(both, [RUN, OTHER])
    lacking = "rehearse, validate_rehearsal, train, validate_drafter, export, validate_export, replay, serve"
    assert f"- `other` is unfinished; of these stages nothing is there yet: {lacking}, validate_evaluation" in page
    assert "`tiny` is unfinished" not in page
    lacks = "drafters.dflash, drafters.eagle3, evaluation.baseline, evaluation.dflash, evaluation.eagle3"
    assert f"`other` has no {lacks}" in page
    assert section(page, "Data")["train: prompts"] == ["112", "112"]
    assert section(page, "tau")["eagle3, heldout: served"][1] == "-"
    assert section(page, "Speed")["none, heldout, concurrency 1"][1] == "-"


def test_two_runs_that_have_only_begun_can_be_compared(both: Path):
    for run in (RUN, OTHER):
        for each in (both / "results" / run).iterdir():
            if each.name != "target":
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        shutil.rmtree(both / "benchmarks" / run)
    page = comparing.compose(both, [RUN, OTHER])
    assert "None." in page
    assert page.count("Nothing yet.") == 5


def test_a_drafter_that_one_run_lacks_leaves_its_cells_empty(both: Path):
    for kind in ("evaluation", "export", "drafters"):
        shutil.rmtree(both / "results" / OTHER / kind / "dflash")
    page = comparing.compose(both, [RUN, OTHER])
    assert "is unfinished" not in page
    assert "`other` has no drafters.dflash, evaluation.dflash." in page
    here, gone = section(page, "tau")["dflash, heldout: served"]
    assert here.endswith(", chain-5") and gone == "-"


def test_more_than_two_runs_have_a_column_each(both: Path):
    shutil.copytree(both / "results" / RUN, both / "results" / "third")
    page = comparing.compose(both, [OTHER, RUN, "third"])
    assert page.startswith("# Runs `other` and `tiny` and `third`")
    assert section(page, "Data")["train: prompts"] == ["112"] * 3
    assert section(page, "Cost")["serve"][2].endswith("MB")


def test_a_manifest_that_was_edited_by_hand_is_named(both: Path):
    edit(both, "samples/train/manifest.json", lambda _: None)
    path = both / "results" / OTHER / "samples/train/manifest.json"
    files.write_text(path, path.read_text(encoding="utf-8").replace('"rows": 112', '"rows": 113'))
    page = comparing.compose(both, [RUN, OTHER])
    assert "- `other`: samples/train/manifest.json was edited since its gate; run `snakemake verify`." in page


def test_what_is_no_manifest_is_an_error_that_names_it(both: Path):
    edit(both, "samples/train/manifest.json", lambda each: each.pop("statistics"))
    with pytest.raises(UserError, match=r"results/other/samples/train/manifest\.json: no manifest as a gate writes it"):
        comparing.compose(both, [RUN, OTHER])


@pytest.mark.parametrize("names", [[], [RUN], [RUN, RUN], [RUN, OTHER, RUN]], ids=str)
def test_fewer_than_two_different_runs_are_an_error_that_shows_the_line_to_write(both: Path, names: list[str]):
    with pytest.raises(UserError, match=r'two different runs.*make compare RUNS="a b"; there are: other, tiny'):
        comparing.compose(both, names)


@pytest.mark.parametrize("name", ["missing", "../results/tiny", "empty", ""])
def test_a_run_that_is_not_there_is_an_error_that_says_which_are(both: Path, name: str):
    (both / "results" / "empty").mkdir()
    with pytest.raises(UserError, match=rf"results/{name}: no such run, or nothing of it is finished; .*: other, tiny"):
        comparing.compose(both, [RUN, name])


def test_every_stage_that_a_run_may_leave_out_is_one():
    assert set(comparing.OPTIONAL) < status.OUTPUTS.keys()


def test_the_script_prints_the_page_or_one_line_of_error(both: Path):
    line = [sys.executable, REPOSITORY / "scripts" / "compare.py", RUN]
    good = subprocess.run([*line, OTHER], cwd=both, capture_output=True, text=True)
    assert (good.returncode, good.stdout) == (0, comparing.compose(both, [RUN, OTHER])), good.stderr
    bad = subprocess.run(line, cwd=both, capture_output=True, text=True)
    assert bad.returncode == 1
    assert "[compare] error: name two different runs" in bad.stderr
    assert "Traceback" not in bad.stderr
