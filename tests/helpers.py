# SPDX-License-Identifier: Apache-2.0
"""Small rows, shards, samples, server scripts and in-process plans that several test files build on."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, DAGSettings, OutputSettings, Quietness, ResourceSettings

from pilotfish import files, prompts, samples, shards
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


PROBED = [response(row, random_ids(9, row), random_ids(6 + 5 * row, 50 + row)) for row in range(4)]


def heed_signals() -> None:
    """In a new process: signals do what they do to a program at a terminal, though the tests may run under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def source_of(path: Path, **more: object) -> dict:
    """A file as a source of prompts, as its rule hands it over."""
    return {
        "source": str(path),
        **dict.fromkeys(("field", "split", "config", "revision", "rows")),
        "max_bad": 0,
        **more,
    }


def read_prompts(path: Path, max_model_len: int) -> list[dict]:
    """All prompts of a file."""
    return prompts.read("prompts.sources.0", source_of(path), max_model_len)


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
    samples.write((samples.sample_of(each) for each in responses), folder / "samples.arrow")
    return folder / "samples.arrow"


SMALL_LAYER = {  # of a random drafter
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def served_as(algorithm: str, k: int):
    """What a speculators config says of a drafter of k tokens for no target in particular."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=k)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def randomise(model: torch.nn.Module) -> torch.Generator:
    """Give a drafter weights whose attention and norms matter (with unit norms some faults cannot be seen)."""
    draw = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        gain = 4.0 if "o_proj" in name else 1.0
        weight.data = gain * noise / weight.shape[-1] ** 0.5 if weight.dim() == 2 else 1.0 + 0.5 * noise
    return draw


def random_map(model, draw: torch.Generator, vocabulary: int, size: int) -> None:
    """Give a drafter the map of a random draft vocabulary of this size."""
    ids = torch.randperm(vocabulary, generator=draw)[:size].sort().values
    model.load_vocab_mappings(torch.isin(torch.arange(vocabulary), ids), ids - torch.arange(size))


def even_map(vocabulary: int, size: int) -> dict[str, torch.Tensor]:
    """The map of a draft vocabulary of evenly spaced tokens, all where the sizes are equal."""
    chosen = torch.arange(size) * (vocabulary // size)
    t2d = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(size), "t2d": t2d}


def random_probe(folder: Path, target: Path, spec: dict, vocabulary: int, size: int):
    """Probes of a fresh drafter over `PROBED`, with the map of every second token, or of all."""
    from pilotfish import probes

    ids = {each["row"]: each["prompt_token_ids"] + each["token_ids"] for each in PROBED}
    captured = captured_folder(folder / "captured", ids)
    reader = shards.ShardReader([captured / shards.INDEX], LAYERS)
    rows = list(samples.load(arrow_of(folder, PROBED)))
    return probes.of_rows(spec, target, even_map(vocabulary, size), rows, reader)


def random_target(folder: Path, vocabulary: int = 200) -> Path:
    """A random target of four layers, as `LAYERS` and `HIDDEN` say, in a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


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


_plans: dict[tuple[str, str], list[PlannedJob]] = {}


def plan(root: Path, config: str = "config/tiny.yaml", target: str = "all") -> list[PlannedJob]:
    """Every job that `target` takes in `root`, planned in this process; one configuration is planned once."""
    key = ((root / config).read_text(encoding="utf-8"), target)
    if key not in _plans:
        _plans[key] = [
            PlannedJob(job.rule.name, dict(job.wildcards_dict or {}), tuple(job.output), command_line(job.shellcmd))
            for job in execute(root, root / config, "dryrun", forceall=True, target=target).jobs
            if job.rule.name != "all"
        ]
    return _plans[key]


def execute(root: Path, config: Path, executor: str, forceall: bool, target: str = "all"):
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
            workflow.dag(DAGSettings(forceall=forceall, targets={target})).execute_workflow(executor=executor)
            return workflow._workflow.dag
    finally:
        os.chdir(before)


def command_line(shell: str) -> list[str]:
    """The words of a rule's shell line, without its log; `$(dirname x)` becomes the folder."""
    line = shell.partition(" 2>&1 | tee ")[0]
    line = re.sub(r"\$\(dirname ([^)]+)\)", lambda found: str(Path(found[1]).parent), line)
    # The rules ask for GPUs; the profile of this machine grants none.
    return shlex.split(re.sub(r"--gpus \d+", "--gpus 0", line))


def write_benchmark(path: Path, seconds: float, memory: str = "1.0") -> None:
    """A benchmark as Snakemake writes it."""
    files.write_text(path, f"s\th:m:s\tmax_pss\n{seconds}\t0:00:01\t{memory}\n")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """Rows of the tables in a report, by their first cell."""
    return {cells(line)[0]: cells(line)[1:] for line in lines if line.startswith("|")}
