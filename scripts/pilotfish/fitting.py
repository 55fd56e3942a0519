# SPDX-License-Identifier: Apache-2.0
"""Whether what a run has still to write fits on the disk; and the plan that its report is compared with."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotfish import digest, disk, files
from pilotfish.disk import amount
from pilotfish.errors import UserError
from pilotfish.planning import FOLDERS, Plan
from pilotfish.settings import Settings

PLAN = "plan.json"
KEPT = "kept.json"  # as pilotfish.shards, which imports torch
GATE = "validate_"
WORK = "*.work"  # folders of unfinished work, see pilotfish.work

Jobs = Sequence[tuple[str, Mapping[str, str]]]  # each job's rule and wildcards


def pending(plan: Plan, settings: Settings, jobs: Jobs) -> dict[str, float]:
    """The share of each stage's bytes that its jobs among `jobs` stand for."""
    shares: dict[str, float] = {}
    for rule, wildcards in jobs:
        stage = "gates" if rule.startswith(GATE) else rule
        if stage not in FOLDERS:
            continue
        share = plan.shares.get(wildcards.get("split", ""), 1.0)
        if "part" in wildcards:
            share /= settings.responses.parts
        if "drafter" in wildcards:
            share /= len(settings.drafters)
        shares[stage] = min(1.0, shares.get(stage, 0.0) + share)
    return shares


def recaptured(plan: Plan, settings: Settings, results: Path, jobs: Jobs) -> int:
    """Bytes of states that a capture adds to answers which are there already: of layers that they were not asked for.

    Sampled answers leave no states, and their capture's bytes are the plan's.
    """
    if settings.responses.temperature > 0:
        return 0
    answered = {(each["split"], each["part"]) for rule, each in jobs if rule == "respond"}
    share = 0.0
    for rule, each in jobs:
        if rule == "capture" and (each["split"], each["part"]) not in answered:
            missing = set(plan.layers) - _held(results, each["split"], each["part"])
            share += plan.shares[each["split"]] / settings.responses.parts * len(missing) / len(plan.layers)
    return round(plan.state_bytes * share)


def _held(results: Path, split: str, part: str) -> set[int]:
    """Layers that an answer or a capture has left of a part."""
    layers: set[int] = set()
    for listing in (f"responses/{split}/{part}.captured/index.json", f"hidden_states/{split}/{part}/{KEPT}"):
        try:
            held = files.read_json(results / listing)["shards"]
        except (UserError, KeyError):
            continue
        layers.update(layer for shard in held for layer in shard["layers"])
    return layers


def begun(results: Path) -> dict[str, int]:
    """Bytes of unfinished work in each stage's folder, which the next job of the same work goes on with."""
    found = {}
    for stage, folder in FOLDERS.items():
        works = (results / folder).rglob(WORK) if folder else ()
        found[stage] = sum(path.stat().st_size for work in works for path in work.rglob("*") if path.is_file())
    return found


def check(plan: Plan, settings: Settings, results: Path, jobs: Jobs) -> None:
    """Raise UserError where `jobs` cannot be finished on the disk that `results` lies on; names the numbers."""
    todo = pending(plan, settings, jobs)
    coming = plan.still_to_write(todo, begun(results), recaptured(plan, settings, results, jobs))
    free = disk.free_bytes(results)
    if not coming or free >= coming + disk.RESERVE:
        return
    largest = sorted(plan.stages, key=lambda stage: -stage.kept * todo.get(stage.name, 0.0))[:2]
    named = " and ".join(f"{amount(each.kept * todo.get(each.name, 0.0))} of {each.name}" for each in largest)
    advice = plan.advice(free)
    raise UserError(
        f"{results}: this run has up to {amount(coming)} still to write ({named}, of which hidden states "
        f"{amount(plan.bytes_per_token)} a token) and keeps {amount(disk.RESERVE)} in reserve, but {amount(free)} are "
        f"free. {advice or 'Make room, or lower prompts.train or responses.max_tokens'}; `make plan` shows every "
        "stage. Nothing was started, and what is finished is kept"
    )


def note(plan: Plan, config: dict, logs: Path) -> None:
    """Write logs/RUN/plan.json; a run that is gone on with keeps the plan that it began with."""
    path = logs / PLAN
    key = hashlib.sha256(digest.spec_json(config).encode()).hexdigest()
    try:
        if files.read_json(path).get("settings") == key:
            return
    except UserError:
        pass  # none yet, or none that can be read
    files.write_json(path, {"settings": key, **plan.as_json()})
