# SPDX-License-Identifier: Apache-2.0
"""The project's own prompts are what their generator writes, and fit to be split."""

import subprocess
import sys
from pathlib import Path

from helpers import read_prompts
from pilotfish import prompts

FOLDER = Path(__file__).resolve().parents[1] / "config" / "prompts"
PROMPTS = FOLDER / "python_stdlib.jsonl"


def test_the_file_is_byte_for_byte_what_its_generator_writes(tmp_path: Path):
    made = tmp_path / "made.jsonl"
    line = [sys.executable, str(FOLDER / "make_python_stdlib.py"), "--output", str(made)]
    subprocess.run(line, check=True, env={"PYTHONHASHSEED": "1"})
    assert made.read_bytes() == PROMPTS.read_bytes()


def test_there_are_as_many_prompts_as_promised_and_no_id_twice():
    found = read_prompts(PROMPTS, 512)
    assert 1450 <= len(found) <= 1700
    assert len({prompt["id"] for prompt in found}) == len(found)


def test_no_prompt_is_there_twice():
    texts = [prompt["messages"][-1]["content"] for prompt in read_prompts(PROMPTS, 512)]
    assert len(set(texts)) == len(texts)


def test_the_default_split_can_be_made_of_them():
    chosen = prompts.split(read_prompts(PROMPTS, 512), 480, 48, seed=0)
    assert not {p["conversation"] for p in chosen["train"]} & {p["conversation"] for p in chosen["heldout"]}
