# SPDX-License-Identifier: Apache-2.0
"""Ten clean runs with other seeds, sizes and settings, through the real engine: no gate may raise a false alarm.

python tests/clean_runs.py FOLDER [NAME ...]

About half an hour on two cores for all; FOLDER must not exist yet.
"""

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from conftest import REPOSITORY, copy_workflow, snakemake
from tiny_target import build_tiny_target

# Changes to config/tiny.yaml, `section.key: value`; each run also has a seed of its own.
SMALL = {"prompts.train": 48, "prompts.heldout": 16, "responses.parts": 1, "evaluation.sets.heldout.prompts": 16}
VARIANTS: dict[str, dict] = {
    "as it is": {},
    "small": SMALL,
    "three parts": {**SMALL, "responses.parts": 3},
    "sampled": {**SMALL, "responses.temperature": 0.8, "responses.top_p": 0.95},
    "slower": {**SMALL, "drafters.eagle3.learning_rate": 1.0e-3, "drafters.eagle3.epochs": 30},
    "hard labels": {**SMALL, "drafters.eagle3.loss": "ce"},
    "five tokens": {**SMALL, "drafters.eagle3.speculative_tokens": 5, "drafters.eagle3.ttt_steps": 5},
    "smaller vocabulary": {**SMALL, "drafters.eagle3.draft_vocab_size": 120},
    "cut answers left out": {
        **SMALL,
        "responses.max_tokens": 48,
        "evaluation.max_tokens": 48,
        "responses.truncated": "drop",
    },
    "few rows a batch": {**SMALL, "engine.max_num_seqs": 4, "evaluation.concurrency": [2]},
}


def changed(config: dict, changes: dict) -> dict:
    """The configuration with `section.key` changes."""
    made = copy.deepcopy(config)
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = made
        for section in sections:
            place = place[section]
        place[key] = value
    return made


def main() -> int:
    """Run every variant in its own copy of the workflow; returns the number of those that did not pass."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    build_tiny_target(folder / "tiny-target")
    config = yaml.safe_load((REPOSITORY / "config" / "tiny.yaml").read_text(encoding="utf-8"))
    failed = 0
    for seed, (name, changes) in enumerate(VARIANTS.items()):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        ran, gates = run(folder, changed(config, {"seed": seed, **changes}), seed)
        failed += ran.returncode != 0
        verdict = f"{gates} gates passed" if ran.returncode == 0 else f"FAILED, see {folder / f'run-{seed}'}"
        print(f"{seed}  {name:22} {verdict}", flush=True)
    return failed


def run(folder: Path, config: dict, seed: int) -> tuple[subprocess.CompletedProcess, int]:
    """One run; what came of it, and how many gates passed."""
    root = copy_workflow(folder / f"run-{seed}")
    (root / "results").mkdir()
    shutil.copytree(folder / "tiny-target", root / "results" / "tiny-target")
    (root / "config" / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    ran = snakemake(root)
    said = ran.stdout + ran.stderr
    (root / "said.txt").write_text(said, encoding="utf-8")
    return ran, len(set(re.findall(r"benchmark: (\S*/validate_\S+)", said)))


if __name__ == "__main__":
    sys.exit(main())
