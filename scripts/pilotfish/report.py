# SPDX-License-Identifier: Apache-2.0
"""Compose a run's report, as Markdown, from its manifests, its measurements and Snakemake's benchmarks."""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from pilotfish import files

# Which folder of results/RUN each rule fills, for the cost table.
STAGES = (
    ("prepare_target", "target"),
    ("collect_prompts", "prompts"),
    ("respond", "responses"),
    ("assemble_samples", "samples"),
    ("capture", "hidden_states"),
    ("map_vocabulary", "vocabulary"),
    ("train", "drafters"),
    ("export", "export"),
    ("replay", None),
    ("serve", "evaluation"),
)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table, padded to read well as plain text; columns after the first `left` are right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = [("-" * width) if column < left else ("-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]


def compose(results: Path, benchmarks: Path, run: str, drafters: dict[str, dict]) -> str:
    """The whole report; `drafters` gives each drafter's draft vocabulary size and speculative tokens."""
    found = {name: Drafter(results, name, **facts) for name, facts in drafters.items()}
    lines = [f"# Pilotfish run `{run}`", "", *_summary(results, found), ""]
    for name, drafter in found.items():
        lines += [f"## Training of `{name}`", "", *drafter.training(), ""]
        lines += [f"## Serving with `{name}`", "", *drafter.serving(), ""]
    lines += ["## Cost of each stage", "", *cost(results, benchmarks), ""]
    lines += ["## Serve it", "", *_serve_lines(results, found)]
    return "\n".join(lines) + "\n"


class Drafter:
    """What a run knows of one drafter."""

    def __init__(self, results: Path, name: str, size: int, speculative_tokens: int):
        self.name, self.k = name, speculative_tokens
        self.vocabulary = _statistics(results / "vocabulary" / str(size) / "manifest.json")
        self.training_facts = _statistics(results / "drafters" / name / "manifest.json")
        self.replay = files.read_json(results / "evaluation" / name / "replay.json")["summary"]
        self.levels = _statistics(results / "evaluation" / name / "manifest.json")
        self.log = files.read_jsonl(results / "drafters" / name / "checkpoint" / "training_log.jsonl")

    def training(self) -> list[str]:
        """Loss and accuracy by training-time test step, at the end of training and held out."""
        steps = [row for row in self.log if row["kind"] == "train"]
        tail = steps[-max(1, len(steps) // 10) :]
        rows = [
            _training_row(f"held out, epoch {row['epoch'] + 1}", [row]) for row in self.log if row["kind"] == "heldout"
        ]
        rows += [_training_row("training, last tenth", tail)]
        ttt = _ttt_steps(steps[0])
        header = ["", *(f"loss {i + 1}" for i in range(ttt)), *(f"accuracy {i + 1}" for i in range(ttt))]
        note = (
            f"{len(steps)} steps. Accuracy at step i: share of positions where this and all earlier drafted "
            "tokens are the target's first choice within the draft vocabulary, so it is a little optimistic; "
            "replay and serving are not."
        )
        return [*table(header, rows), "", note]

    def serving(self) -> list[str]:
        """One row a concurrency: speed, tau, joint rates, identity of greedy outputs, parity with replay."""
        joint = [f"joint {i + 1}" for i in range(self.k)]
        header = ["concurrency", "baseline tok/s", "drafter tok/s", "speed-up", "tau", *joint, "rounds"]
        rows = [
            [
                level, f"{x['baseline_tokens_per_second']:.1f}", f"{x['tokens_per_second']:.1f}",
                f"{x['speedup']:.2f}x", _tau(x["summary"]), *_rates(x["summary"]["joint"]),
                x["summary"]["rounds"],
            ]
            for level, x in self.levels.items()
        ]  # fmt: skip
        interval = "{:.2f} to {:.2f}".format(*self.replay["tau_micro_interval_95"])
        lines = table(header, rows)
        lines += [
            "",
            f"Replay of all {self.replay['rows']} held-out responses: tau {_tau(self.replay)} "
            f"(95% interval {interval}), joint {' '.join(_rates(self.replay['joint']))}, "
            f"{self.replay['rounds']} rounds.",
            "",
        ]
        for level, x in self.levels.items():
            lines += [f"- Concurrency {level}: {_identity(x)} {_parity(x['parity'])}"]
        lines += ["", "tau is 1 + accepted / rounds (`tau_micro_incl_bonus`), greedy."]
        return lines


def _identity(level: dict) -> str:
    text = (
        f"{level['identical_to_baseline']} of {level['prompts']} greedy outputs identical to the baseline's at "
        "the same concurrency"
    )
    floor = level["baseline_identical_to_its_first_level"]
    if floor < level["prompts"]:
        text += f" (the baseline agrees with its own first level in {floor})"
    return text + "."


def _parity(parity: dict) -> str:
    share = parity["rounds_equal"] / parity["rounds_compared"]
    return (
        f"Served and replayed rounds equal: {share:.1%} of the {parity['rounds_compared']} that lie in text both "
        f"share ({parity['rounds_served']} served); tau there {parity['tau_served']:.4f} served, "
        f"{parity['tau_replay']:.4f} replayed."
    )


def _training_row(name: str, rows: list[dict]) -> list[str]:
    def mean(key: str) -> str:
        return f"{sum(row[key] for row in rows) / len(rows):.3f}"

    ttt = _ttt_steps(rows[0])
    return [name, *(mean(f"loss_{i}") for i in range(ttt)), *(mean(f"full_acc_{i}") for i in range(ttt))]


def _ttt_steps(row: dict) -> int:
    """Training-time test steps that a row of the training log tells of."""
    return sum(key.startswith("full_acc_") for key in row)


def _statistics(path: Path) -> dict:
    return files.read_json(path)["statistics"]


def _tau(summary: dict) -> str:
    return f"{summary['tau_micro_incl_bonus']:.3f}"


def _rates(rates: list[float]) -> list[str]:
    return [f"{rate:.3f}" for rate in rates]


def _summary(results: Path, drafters: dict[str, Drafter]) -> list[str]:
    target = _statistics(results / "target" / "manifest.json")
    rows: list[list[object]] = [["target", f"{target['source']} ({target['architecture']})"]]
    for split in ("train", "heldout"):
        data = _statistics(results / "responses" / split / "manifest.json")
        name = {"train": "training", "heldout": "held-out"}[split]
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(data["finish_reasons"].items()))
        rows.append([f"{name} rows", f"{data['ok']} answered, {data['failed']} refused ({ends})"])
        rows.append([f"{name} tokens", f"{data['prompt_tokens']} prompt, {data['response_tokens']} response"])
    states = _statistics(results / "hidden_states" / "train" / "manifest.json")
    rows.append(["capture layers, h(k)", " ".join(map(str, states["capture_layers"]))])
    for name, drafter in drafters.items():
        rows += [[f"{name}: {key}", value] for key, value in _drafter_summary(drafter)]
    return table(["", "value"], rows, left=2)


def _drafter_summary(drafter: Drafter) -> list[tuple[str, str]]:
    vocabulary = drafter.vocabulary
    last = drafter.training_facts["heldout"][-1]
    accuracy = [last[f"full_acc_{step}"] for step in range(_ttt_steps(last))]
    rows = [
        (
            "draft vocabulary",
            f"{vocabulary['draft_vocab_size']} tokens, covers {vocabulary['coverage_train']:.2%} of training, "
            f"{vocabulary['coverage_heldout']:.2%} of held-out tokens",
        ),
        ("held-out loss, accuracy by step", f"{last['loss']:.3f}, {' '.join(_rates(accuracy))}"),
        ("replay tau", _tau(drafter.replay)),
    ]
    for level, x in drafter.levels.items():
        rows.append(
            (
                f"served at concurrency {level}",
                f"tau {_tau(x['summary'])} (joint {' '.join(_rates(x['summary']['joint']))}), "
                f"{x['baseline_tokens_per_second']:.1f} -> {x['tokens_per_second']:.1f} tokens/s = "
                f"{x['speedup']:.2f}x, {x['identical_to_baseline']} of {x['prompts']} outputs identical",
            )
        )
    return rows


def cost(results: Path, benchmarks: Path) -> list[str]:
    """Wall time, peak memory and disk of each stage and its gate; a file with two names counts once."""
    seen: set[int] = set()
    rows = []
    total_seconds = total_bytes = 0.0
    for rule, folder in STAGES:
        seconds, memory = _benchmark(benchmarks, rule)
        size = _disk(results / folder, seen) if folder else 0
        total_seconds, total_bytes = total_seconds + seconds, total_bytes + size
        rows.append([rule, f"{seconds:.0f}", f"{memory:.0f}", f"{size / 1e6:.1f}"])
    gates = sum(_benchmark(benchmarks, path.stem)[0] for path in benchmarks.glob("validate_*"))
    rows.append(["gates", f"{gates:.0f}", "", ""])
    rows.append(["total", f"{total_seconds + gates:.0f}", "", f"{total_bytes / 1e6:.1f}"])
    return table(["stage", "wall time, s", "peak memory, MiB", "disk, MB"], rows)


def _benchmark(benchmarks: Path, rule: str) -> tuple[float, float]:
    """Seconds (summed over a rule's jobs, as each was last run) and peak resident MiB."""
    seconds = memory = 0.0
    for path in [*benchmarks.glob(f"{rule}.tsv"), *(benchmarks / rule).glob("*.tsv")]:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle, delimiter="\t"):
                seconds += float(row["s"])
                memory = max(memory, _number(row["max_rss"]))
    return seconds, memory


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # Snakemake writes NA for a job too short to sample
        return 0.0


def _disk(folder: Path, seen: set[int]) -> int:
    size = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_ino not in seen:
            seen.add(path.stat().st_ino)
            size += path.stat().st_size
    return size


def _serve_lines(results: Path, drafters: dict[str, Drafter]) -> list[str]:
    lines = ["From the repository's folder:", "", "```sh"]
    for name, drafter in drafters.items():
        speculative = {"model": f"{results}/export/{name}", "num_speculative_tokens": drafter.k}
        lines += [f"vllm serve {results}/target/model --speculative-config '{json.dumps(speculative)}'"]
    lines += [
        "```",
        "",
        "With the CPU build of vLLM, whose `vllm` command fails on its own version look-up, write",
    ]
    lines += ["`python -m vllm.entrypoints.openai.api_server --model` for `vllm serve`."]
    return lines
