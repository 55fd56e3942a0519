# SPDX-License-Identifier: Apache-2.0
"""The printed plan."""

import json
import re
import subprocess
import sys

import pytest

from conftest import CONFIG, REPOSITORY
from pilotfish import facts, plan_page, planning, settings
from pilotfish.planning import FOLDERS, Rate
from test_planning import DFLASH, QWEN36_27B, SMOLLM2, lengths_of, planned, rates_of, real_run


def test_the_page_fits_80_columns_and_names_every_stage_that_runs():
    config = real_run({**DFLASH, "capture_layers": [2, 9, 15, 21, 27, 33]}, 902_087)
    text = plan_page.render(planned(config, QWEN36_27B, 400, 2_000), free=50_000_000_000)
    assert max(map(len, text.splitlines())) <= 80
    for name in set(FOLDERS) - {"collect_evaluation_set", "adopt_reference"}:
        assert re.search(rf"^{name} ", text, re.MULTILINE), name
    assert "Free: 50 GB." in text
    assert "hidden states on the fly are not offered yet" in " ".join(text.split())


def test_a_page_says_of_every_stage_whether_its_rate_was_measured_and_where():
    chosen = settings.load(CONFIG)
    rates = rates_of(chosen, lengths_of(chosen, 50, 100))
    rates.stages["respond"] = Rate(1.0, 1.0, "measured in run earlier")
    text = plan_page.render(planning.plan(chosen, facts.of_mapping(SMOLLM2), rates))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert lines["respond"].endswith("[1]")
    assert lines["serve"].endswith("assumed")
    assert "[1] measured in run earlier" in text.splitlines()


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (21e6, "21.0M"), (2.17e9, "2.2G"), (704, "704")])
def test_counts_are_short(number, text):
    assert plan_page.count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(33, "33 s"), (719, "12 min"), (12_240, "3.4 h"), (450_000, "5.2 d")])
def test_durations_read_as_people_say_them(seconds, text):
    assert plan_page.duration(seconds) == text


def test_the_script_prints_the_plan_of_given_facts_and_loads_no_heavy_package(tmp_path):
    config = real_run(DFLASH, 902_087)
    program = (
        "import runpy, sys; script = sys.argv.pop(1)\n"
        "runpy.run_path(script, run_name='__main__')\n"
        "print(sorted({'torch', 'pandas', 'numpy', 'pyarrow', 'transformers', 'snakemake'} & set(sys.modules)))"
    )
    options = ["--spec", json.dumps(config), "--hardware", "gpu", "--facts", json.dumps(QWEN36_27B)]
    script = str(REPOSITORY / "scripts" / "plan.py")
    line = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY / 'scripts')!r})\n{program}"]
    done = subprocess.run([*line, script, *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "of hidden states are too large to store" in done.stdout


def test_the_script_refuses_a_file_that_is_no_configuration_by_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("- a list", encoding="utf-8")
    line = [sys.executable, str(REPOSITORY / "scripts" / "plan.py"), "mine.yaml"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "mine.yaml: holds no settings" in done.stderr
