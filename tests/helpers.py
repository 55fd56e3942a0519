# SPDX-License-Identifier: Apache-2.0
"""Small rows, shards, samples, server scripts and in-process plans that several test files build on."""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, Quietness, ResourceSettings

from pilotfish import samples, shards
from pilotfish.shards import RowStates

HIDDEN = 64
LAYERS = [1, 2, 3, 4]

torch.set_num_threads(1)  # products this small only lose by more


def random_states(ids: Sequence[int], layers: int = len(LAYERS), hidden: int = HIDDEN) -> RowStates:
    """States that depend on the ids alone, one for each, in bf16 as an engine writes them."""
    draw = torch.Generator().manual_seed(sum(ids) + len(ids))
    hidden_states = torch.randn(len(ids), layers, hidden, generator=draw).bfloat16()
    return RowStates(torch.tensor(ids, dtype=torch.long), hidden_states)


def random_ids(length: int, seed: int, vocabulary: int = 200) -> list[int]:
    """`length` token ids."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (length,), generator=draw).tolist()


def response(row: int, prompt: list[int], generated: list[int]) -> dict:
    """A response as `pilotfish.generation` keeps it."""
    return {
        "row": row,
        "id": f"p{row}",
        "prompt_token_ids": prompt,
        "token_ids": generated,
        "text": f"text {row}",
        "reasoning": None,
        "finish_reason": "stop",
        "sampling": {},
        "error": None,
    }


def captured_folder(folder: Path, ids: dict[int, list[int]], layers: Sequence[int] = LAYERS) -> Path:
    """Shards with an index, as one part leaves them; `ids` are each row's tokens, the last has no state."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, rows = [], sorted(ids)
    for start in range(0, len(rows), shards.ROWS_PER_SHARD):
        group = rows[start : start + shards.ROWS_PER_SHARD]
        path = folder / shards.shard_name(group[0], group[-1] + 1)
        shards.write_shard(path, [(row, random_states(ids[row][:-1], len(layers))) for row in group], layers)
        entries.append(shards.describe(path))
    shards.write_index(folder, layers, entries)
    return folder


def arrow_of(folder: Path, responses: Sequence[dict]) -> Path:
    """The samples of `responses` as an Arrow file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in responses)
    (folder / "responses.jsonl").write_text(lines, encoding="utf-8")
    samples.assemble([folder / "responses.jsonl"], folder / "samples.arrow")
    return folder / "samples.arrow"


def flip_bit(path: Path, from_end: int = 1) -> None:
    """Damage one bit of a file."""
    content = bytearray(path.read_bytes())
    content[-from_end] ^= 1
    path.write_bytes(content)


def executable(path: Path, code: str) -> str:
    """A Python script that can be started in the interpreter's place."""
    path.write_text(f"#!{sys.executable} -S\n{code}", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@dataclass(frozen=True)
class PlannedJob:
    """A job as Snakemake would run it: its rule, wildcards, output files, and command line without the log."""

    rule: str
    wildcards: dict[str, str]
    output: tuple[str, ...]
    line: list[str]


_plans: dict[str, list[PlannedJob]] = {}


def plan(root: Path, config: str = "config/tiny.yaml") -> list[PlannedJob]:
    """Every job of the workflow in `root`, planned in this process; one configuration is planned once."""
    text = (root / config).read_text(encoding="utf-8")
    if text not in _plans:
        _plans[text] = [
            PlannedJob(job.rule.name, dict(job.wildcards_dict or {}), tuple(job.output), command_line(job.shellcmd))
            for job in execute(root, root / config, "dryrun", forceall=True).jobs
            if job.rule.name != "all"
        ]
    return _plans[text]


def execute(root: Path, config: Path, executor: str, forceall: bool):
    """Plan (`dryrun`) or `touch` the workflow in `root` in this process; returns Snakemake's graph of jobs."""
    before = Path.cwd()
    try:
        with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
            workflow = api.workflow(
                ResourceSettings(cores=2),
                config_settings=ConfigSettings(configfiles=[config]),
                snakefile=root / "Snakefile",
                workdir=root,
            )
            workflow.dag(DAGSettings(forceall=forceall)).execute_workflow(executor=executor)
            return workflow._workflow.dag
    finally:
        os.chdir(before)


def command_line(shell: str) -> list[str]:
    """The words of a rule's shell line, without its log; `$(dirname x)` becomes the folder."""
    line = shell.partition(" 2>&1 | tee ")[0]
    line = re.sub(r"\$\(dirname ([^)]+)\)", lambda found: str(Path(found[1]).parent), line)
    return shlex.split(line)
