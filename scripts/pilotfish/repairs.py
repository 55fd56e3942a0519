# SPDX-License-Identifier: Apache-2.0
"""Which manifests the next run makes anew, since verification took them away. Imported while planning."""

from collections.abc import Iterable
from pathlib import Path

from pilotfish import files

DAMAGED = "damaged.json"  # manifests that the next run must make anew; `rule all` asks for them


def read(results: Path) -> list[str]:
    """Manifests, relative to the run's folder, that verification has taken away and no run has rebuilt."""
    path = results / DAMAGED
    return files.read_json(path)["manifests"] if path.is_file() else []


def write(results: Path, manifests: Iterable[str]) -> None:
    """Note which manifests are to be rebuilt; without any, the note goes."""
    if wanted := sorted(set(manifests)):
        files.write_json(results / DAMAGED, {"manifests": wanted})
    else:
        (results / DAMAGED).unlink(missing_ok=True)


def due(results: Path, stages: Iterable[Iterable[str]]) -> list[str]:
    """Damage of the earliest stage: rebuilt along with a later one's, all between them would run again.

    `stages` are the paths of a finished run's manifests in the order of the flow.
    """
    noted = {str(results / manifest) for manifest in read(results)}
    for stage in stages:
        if found := [manifest for manifest in stage if manifest in noted]:
            return found
    return []


def finish(results: Path, repaired: Iterable[str]) -> str:
    """Forget the damage that a run was to repair, if it did; returns what to say of it, nothing if it did not."""
    if not all(Path(manifest).is_file() for manifest in repaired):
        return ""
    left = [manifest for manifest in read(results) if str(results / manifest) not in repaired]
    write(results, left)
    then = f"rebuild {len(left)} more" if left else "what follows runs only where their bytes differ"
    return f"Rebuilt: {', '.join(repaired)}. Run again: {then}."
