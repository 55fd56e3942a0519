# SPDX-License-Identifier: Apache-2.0
"""Whether a run that was disturbed made what it would have made anyway, and left nothing over."""

import glob
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

RUN = Path("results") / "tiny"
END = 120  # seconds until all that was killed must be gone
STEP = 0.1  # seconds between two looks
# Made of texts alone; all other products are made of states.
FROM_TEXTS = ("target", "prompts", "responses", "samples", "vocabulary")
FROM_STATES = (
    *("train", "validate_drafter", "rehearse", "validate_rehearsal", "export", "validate_export"),
    *("replay", "serve", "validate_evaluation", "report"),
)
ROUNDING = 1e-3  # of a layer's states, relative to their norm; a bf16 that is one rounding off differs by 4e-3 at most
# What a measurement of speed leaves in manifests: no two runs have the same.
MEASURED = re.compile(r"tokens_per_second|time_per_output_token|speedup|files\..*served\.json|seal")


def left_over(root: Path) -> list[str]:
    """Temporary files, unfinished work, locks and processes that are still there."""
    patterns = ("results/**/.*.tmp", "results/**/.*.old", "results/**/*.work", "results/**/*.work/**/*")
    patterns += ("logs/**/.*.tmp", ".snakemake/locks/*", ".snakemake/incomplete/*")
    found = [str(path) for pattern in patterns for path in found_in(root, pattern)]
    until = time.monotonic() + END
    while (alive := _processes_in(root)) and time.monotonic() < until:
        time.sleep(STEP)
    return found + [f"process {each}" for each in alive]


def _processes_in(root: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(root.resolve()) and process.pid != os.getpid():
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue
    return found


def differences(killed: Path, undisturbed: Path, again: Path) -> list[str]:
    """Manifests that are not byte for byte those of their reference, but for roundings and what is measured of speed.

    `undisturbed` is that of texts and states, `again` (made of the killed run's states) that of all behind.
    """
    names = {path.relative_to(root) for root in (killed, undisturbed) for path in (root / RUN).rglob("manifest.json")}
    found = []
    for name in sorted(names):
        part = name.relative_to(RUN).parts[0]
        theirs = (undisturbed if part in (*FROM_TEXTS, "hidden_states") else again) / name
        if not ((killed / name).is_file() and theirs.is_file()):
            found.append(f"{name}: only in one of the runs")
            continue
        leaves, due = (dict(_leaves(read_json(path))) for path in (killed / name, theirs))
        keys = sorted(key for key in leaves.keys() | due.keys() if leaves.get(key) != due.get(key))
        if part == "hidden_states" and keys:
            found += beyond_rounding((killed / name).parent, theirs.parent)
            keys = [key for key in keys if key != "seal" and not re.fullmatch(r"files\..*sha256", key)]
        elif part not in FROM_TEXTS:
            keys = [key for key in keys if not MEASURED.search(key)]
        found += [f"{name}: {key}: {leaves.get(key)} where {due.get(key)} was" for key in keys]
    return found


def beyond_rounding(killed: Path, undisturbed: Path) -> list[str]:
    """Shards of a split that hold other rows or ids, or states further off than engines' batches explain."""
    found = []
    for ours in sorted(killed.rglob("rows_*.safetensors")):
        held, due = load_file(ours), load_file(undisturbed / ours.relative_to(killed))
        if held.keys() != due.keys():
            found.append(f"{ours}: other tensors")
            continue
        for name, states in held.items():
            if not states.is_floating_point():
                worst = 0.0 if torch.equal(states, due[name]) else math.inf
            elif states.shape != due[name].shape or states.dtype != due[name].dtype:
                worst = math.inf
            else:  # [tokens, layers, hidden]
                off = (states.double() - due[name].double()).norm(dim=(0, 2)) / due[name].double().norm(dim=(0, 2))
                worst = off.max().item()
            if not worst <= ROUNDING:
                found.append(f"{ours}: {name} is off by {worst:.1e}")
            elif worst:
                print(f"{ours.relative_to(killed.parents[3])}: {name} is off by a rounding, {worst:.1e}")
    return found


def _leaves(value: object, place: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{place}.{key}" if place else key)
    else:
        yield place, value


def found_in(root: Path, pattern: str) -> list[Path]:
    """As Path.glob, which does not bear a folder that goes while it looks."""
    return [root / name for name in glob.glob(pattern, root_dir=root, recursive=True, include_hidden=True)]


def read_json(path: Path) -> dict | None:
    """A JSON file, or None while there is no whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
