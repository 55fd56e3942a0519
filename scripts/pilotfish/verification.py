# SPDX-License-Identifier: Apache-2.0
"""Checking a finished run byte for byte against its manifests, and having the next run rebuild what is damaged."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish import files, shards
from pilotfish.errors import UserError

MANIFEST = "manifest.json"
DAMAGED = "damaged.json"  # manifests that the next run must make anew; `rule all` asks for them
NOT_DATA = ("report.md", DAMAGED, shards.KEPT)


@dataclass(frozen=True)
class Damage:
    """A file that is not what its manifest vouches for."""

    file: Path
    manifest: Path
    fault: str


@dataclass
class Findings:
    """What an inspection found; `unvouched` are files that no manifest names, relative to the run's folder."""

    sound: int = 0
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)
    unvouched: list[str] = field(default_factory=list)


def inspect(results: Path) -> Findings:
    """Read every file that a manifest of the run vouches for, and compare size and sha256.

    By-products that only an index lists (shards beside the responses) are compared with that index.
    """
    found, vouched = Findings(), set[Path]()
    manifests = sorted(results.rglob(MANIFEST))
    if not manifests:
        raise UserError(f"{results}: no manifest in it, so there is nothing to verify; run the workflow first")
    for manifest in manifests:
        try:
            entries = files.read_json(manifest)["files"]
        except (UserError, KeyError):
            found.damage.append(Damage(manifest, manifest, "not a readable manifest"))
            continue
        for name, entry in entries.items():
            vouched.add(_plain(manifest.parent / name))
            _compare(found, manifest.parent / name, manifest, entry)
    for index in sorted(results.rglob(f"*.captured/{shards.INDEX}")):
        vouched.add(_plain(index))
        for entry in files.read_json(index)["shards"]:
            vouched.add(_plain(index.parent / entry["file"]))
            _compare(found, index.parent / entry["file"], index, entry)
    known = vouched | set(map(_plain, manifests))
    others = (path for path in sorted(results.rglob("*")) if path.is_file() and _plain(path) not in known)
    found.unvouched = [path.relative_to(results).as_posix() for path in others if path.name not in NOT_DATA]
    return found


def _plain(path: Path) -> Path:
    """The path without `..`; links stay links."""
    return Path(os.path.normpath(path.absolute()))


def _compare(found: Findings, file: Path, manifest: Path, entry: dict) -> None:
    if not file.is_file():
        found.damage.append(Damage(file, manifest, "missing"))
        return
    size = file.stat().st_size
    if size != entry["size"]:
        found.damage.append(Damage(file, manifest, f"{size} bytes where {manifest.name} says {entry['size']}"))
        return
    found.bytes_read += size
    if files.sha256_file(file) != entry["sha256"]:
        found.damage.append(Damage(file, manifest, f"other bytes than {manifest.name} vouches for (sha256 differs)"))
        return
    found.sound += 1


def take_away(results: Path, damage: list[Damage]) -> None:
    """Remove damaged files, what declares them to Snakemake and their manifests; note the latter in DAMAGED.

    Snakemake remakes a lost intermediate only if something needs it, so `rule all` asks for these manifests.
    """
    wanted = set(read_damaged(results))
    for each in damage:
        each.file.unlink(missing_ok=True)
        each.manifest.unlink(missing_ok=True)
        # A part's shards are declared by their index.
        (each.file.parent / shards.INDEX).unlink(missing_ok=True)
        if each.manifest.name == MANIFEST:
            wanted.add(each.manifest.relative_to(results).as_posix())
    files.write_json(results / DAMAGED, {"manifests": sorted(wanted)})


def read_damaged(results: Path) -> list[str]:
    """Manifests, relative to the run's folder, that verification has taken away."""
    path = results / DAMAGED
    return files.read_json(path)["manifests"] if path.is_file() else []
