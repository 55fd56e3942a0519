# SPDX-License-Identifier: Apache-2.0
"""What a run has cost: time, memory and disk of each stage, and the share of its gates."""

import csv
import time
from pathlib import Path

from pilotfish import files
from pilotfish.errors import UserError
from pilotfish.markdown import table

# Which folder of results/RUN each rule fills, for the cost table.
STAGES = (
    ("prepare_target", "target"),
    ("collect_prompts", "prompts"),
    ("collect_evaluation_set", None),
    ("respond", "responses"),
    ("assemble_samples", "samples"),
    ("capture", "hidden_states"),
    ("map_vocabulary", "vocabulary"),
    ("rehearse", None),
    ("train", "drafters"),
    ("export", "export"),
    ("adopt_reference", "references"),
    ("replay", None),
    ("serve", "evaluation"),
)
GATES = "validate_*"
PLANNED = ["planned, s", "planned, MB"]
REHEARSAL = "rehearse"  # trains and serves one row for its gate alone: counted among the gates


def stages(results: Path, benchmarks: Path, plan: Path) -> list[str]:
    """Wall time, peak memory and disk of each stage and its gate; a file with two names counts once.

    Where `plan` (logs/RUN/plan.json) exists, what was planned when the run began stands beside them.
    """
    seen: set[int] = set()
    rows = []
    total_seconds = total_bytes = 0.0
    planned = _planned(plan)
    for rule, folder in STAGES:
        seconds, memory = benchmark(benchmarks, rule)
        size = disk(results / folder, seen) if folder else 0
        total_seconds, total_bytes = total_seconds + seconds, total_bytes + size
        rows.append([rule, f"{seconds:.0f}", f"{memory:.0f}", f"{size / 1e6:.1f}", *planned.get(rule, [])])
    gates = sum(seconds for _, seconds in gates_alone(benchmarks))
    rows.append(["gates", f"{gates:.0f}", "", "", *planned.get("gates", [])])
    rows.append(["total", f"{total_seconds + gates:.0f}", "", f"{total_bytes / 1e6:.1f}", *planned.get("total", [])])
    header = ["stage", "wall time, s", "peak memory, MiB", "disk, MB"]
    return table([*header, *PLANNED] if planned else header, rows)


def _planned(plan: Path) -> dict[str, list[str]]:
    """Planned seconds and MB of every stage and of all; empty where no plan can be read."""
    try:
        found = files.read_json(plan)
    except UserError:
        return {}
    lines = {name: _cells(stage["seconds"], stage["kept"]) for name, stage in found["stages"].items()}
    empty = {rule: ["", ""] for rule, _ in STAGES}
    return {**empty, "gates": ["", ""], **lines, "total": _cells(found["seconds"], found["kept"])}


def _cells(seconds: float, size: int) -> list[str]:
    return [f"{seconds:.0f}", f"{size / 1e6:.1f}"]


def benchmark(benchmarks: Path, rule: str) -> tuple[float, float]:
    """Seconds (summed over a rule's jobs, as each was last run) and peak MiB; what processes share counts once."""
    seconds = memory = 0.0
    for path in [*benchmarks.glob(f"{rule}.tsv"), *(benchmarks / rule).glob("*.tsv")]:
        with open(path, newline="", encoding="utf-8") as handle:
            for row in csv.DictReader(handle, delimiter="\t"):
                seconds += float(row["s"])
                memory = max(memory, _number(row["max_pss"]))
    return seconds, memory


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # Snakemake writes NA for a job too short to sample
        return 0.0


def disk(folder: Path, seen: set[int]) -> int:
    """Bytes of a folder's files; a file that is in `seen` by another name counts no more."""
    size = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_ino not in seen:
            seen.add(path.stat().st_ino)
            size += path.stat().st_size
    return size


def gates_alone(benchmarks: Path) -> list[tuple[str, float]]:
    """Each gate with its seconds, summed over its jobs."""
    names = sorted({path.stem for path in benchmarks.glob(GATES)})
    return [(name, benchmark(benchmarks, name)[0]) for name in names]


def gates(results: Path, benchmarks: Path) -> list[str]:
    """Seconds of each gate, their share of the run with and without the rehearsal, and the speed of checksums."""
    found = gates_alone(benchmarks)
    rehearsal = benchmark(benchmarks, REHEARSAL)[0]
    alone = sum(seconds for _, seconds in found)
    total = alone + sum(benchmark(benchmarks, rule)[0] for rule, _ in STAGES)
    return [
        *table(["gate", "wall time, s"], [[name, f"{seconds:.1f}"] for name, seconds in found]),
        "",
        f"All gates take {alone / total:.1%} of the time of all jobs; with the rehearsal, which trains, exports and "
        f"serves one row before the training starts, {(alone + rehearsal) / total:.1%}.",
        "",
        f"Checksums are computed at {_checksum_speed(results):.1f} GB/s on one core.",
    ]


def _checksum_speed(results: Path) -> float:
    """GB/s of the manifests' sha256 over the largest tensor file of the run, once it is in memory."""
    largest = max(results.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    files.sha256_file(largest)
    begun = time.perf_counter()
    files.sha256_file(largest)
    return largest.stat().st_size / (time.perf_counter() - begun) / 1e9
