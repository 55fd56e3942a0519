# SPDX-License-Identifier: Apache-2.0
"""A finished run whose files are stand-ins, planned in-process; and the rules that each kind of change reaches."""

from pathlib import Path

import yaml

from conftest import CONFIG
from helpers import execute
from pilotfish import digest

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
        for job in self.jobs(config, needed_only=False):
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
        return self.jobs(config, needed_only=True)

    def jobs(self, config: dict, needed_only: bool) -> list:
        """The jobs of a run, or those that it would execute now."""
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
