# SPDX-License-Identifier: Apache-2.0
"""Each preset is a valid configuration, explains its lines, and can be planned from the target's facts alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from pilotfish import settings

# As the targets' config.json say.
FACTS = {
    "qwen3-8b-eagle3": {
        "hidden_size": 4096, "layers": 36, "vocab_size": 151_936, "parameters": 8_190_735_360,
        "intermediate_size": 12_288, "heads": 32, "kv_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
PRESETS = {path.stem: path for path in (REPOSITORY / "config").glob("*.yaml") if path.stem not in ("default", "tiny")}


def test_every_preset_has_facts_to_be_planned_with():
    assert PRESETS.keys() == FACTS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_named_after_its_file(name: str):
    assert settings.load(settings.read(PRESETS[name])).run == name


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_of_a_preset_is_explained(name: str):
    lines = PRESETS[name].read_text(encoding="utf-8").splitlines()
    bare = [line for line in lines if re.match(r"\s*(- )?\w+: *[^\s#]", line) and "#" not in line]
    explained_above = ["algorithm"]
    assert [line for line in bare if line.split(":")[0].strip() not in explained_above] == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_planned_from_the_targets_facts_alone(name: str, tmp_path: Path):
    line = [sys.executable, str(REPOSITORY / "scripts" / "plan.py"), str(PRESETS[name]), "--hardware", "gpu"]
    done = subprocess.run([*line, "--facts", json.dumps(FACTS[name])], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    facts = FACTS[name]
    per_token = 2 * facts["hidden_size"] * 4 + 8  # three layers and the last, in bf16
    assert f"{per_token:,} bytes" in " ".join(done.stdout.split())


@pytest.mark.parametrize("name", PRESETS)
def test_what_comes_from_the_hub_is_pinned_to_a_commit(name: str):
    chosen = settings.load(settings.read(PRESETS[name]))
    assert re.fullmatch("[0-9a-f]{40}", chosen.target.revision)
