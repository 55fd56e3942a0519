# SPDX-License-Identifier: Apache-2.0
"""Checking a finished run byte for byte against its manifests, and having the next run rebuild what is damaged."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pilotfish import files, repairs, reuse, seals, shards
from pilotfish.errors import UserError

MANIFEST = "manifest.json"
REPORT = "report.md"
WORK = ".work"  # end of a folder's name: see pilotfish.work
CAPTURED = ".captured"  # end of a folder's name: shards captured on the way, which only their index lists


@dataclass(frozen=True)
class Damage:
    """A file that is not what its manifest, or index, vouches for; what vouches has a seal of its own."""

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


def inspect(results: Path, expected: Iterable[Path] = ()) -> Findings:
    """Read every file that a manifest of the run vouches for, and compare size and sha256; read the seals.

    By-products that only an index lists (shards beside the responses) are compared with that index. `expected` are
    the manifests of a finished run, which one with a report is. A folder that is gone as a whole is no damage:
    someone made room.
    """
    found, known = Findings(), set[Path]()
    for manifest in sorted(results.rglob(MANIFEST)):
        known |= _compare_all(found, manifest, _sealed(found, manifest).get("files", {}))
    if not known:
        raise UserError(f"{results}: no manifest in it, so there is nothing to verify; run the workflow first")
    for folder in sorted(results.rglob(f"*{CAPTURED}")):
        if any(folder.iterdir()):
            listed = _sealed(found, folder / shards.INDEX)
            entries = [*listed.get("shards", []), *filter(None, [listed.get(reuse.KEY)])]
            known |= _compare_all(found, folder / shards.INDEX, {entry["file"]: entry for entry in entries})
    for alone in (results / REPORT, *sorted(results.rglob(shards.KEPT))):
        if alone.is_file():
            _sealed(found, alone, read=False)
            known.add(_plain(alone))
    if (results / REPORT).is_file():
        lost = (path for path in expected if path.parent.is_dir() and not path.is_file())
        found.damage += [Damage(path, path, "missing") for path in lost]
    of_damaged = {each.file.parent for each in found.damage if each.file.name in (MANIFEST, shards.INDEX)}
    for path in sorted(results.rglob("*")):
        unfinished = any(part.endswith(WORK) for part in path.parts)
        ours = _plain(path) in known or path.name == repairs.DAMAGED
        if path.is_file() and not (ours or unfinished or of_damaged.intersection(path.parents)):
            found.unvouched.append(path.relative_to(results).as_posix())
    return found


def _sealed(found: Findings, path: Path, read: bool = True) -> dict:
    """The content of a file that has a seal; nothing, and a damage noted, where one byte of it is another.

    What an older version wrote without a seal is used: its data need not be made anew with it.
    """
    if fault := seals.fault(path):
        found.damage.append(Damage(path, path, fault))
        if fault != seals.WITHOUT:
            return {}
    try:
        return files.read_json(path) if read else {}
    except UserError:
        return {}


def _plain(path: Path) -> Path:
    """The path without `..`; links stay links."""
    return Path(os.path.normpath(path.absolute()))


def _compare_all(found: Findings, voucher: Path, entries: dict[str, dict]) -> set[Path]:
    """Compare what a manifest, or an index, vouches for; returns these files, and itself."""
    vouched = {Path(os.path.normpath(voucher.parent / name)): entry for name, entry in entries.items()}
    for file, entry in vouched.items():
        _compare(found, file, voucher, entry)
    return {_plain(voucher), *map(_plain, vouched)}


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
    """Remove damaged files, what declares them to Snakemake and their manifests; note the latter for the next run.

    Snakemake remakes a lost intermediate only if something needs it, so `rule all` asks for these manifests.
    """
    wanted = set(repairs.read(results))
    for each in damage:
        each.file.unlink(missing_ok=True)
        if each.manifest.name == MANIFEST:
            each.manifest.unlink(missing_ok=True)
            wanted.add(each.manifest.relative_to(results).as_posix())
            if each.file != each.manifest:
                # A part's shards are declared by their index.
                (each.file.parent / shards.INDEX).unlink(missing_ok=True)
        elif each.manifest.name == shards.INDEX:
            _forget(each)
    repairs.write(results, wanted)


def _forget(damage: Damage) -> None:
    """Take a damaged file out of the index of by-products that lists it; a damaged index takes all along."""
    if damage.file != damage.manifest and damage.manifest.is_file():
        index = files.read_json(damage.manifest)
        left = [entry for entry in index["shards"] if entry["file"] != damage.file.name]
        kept = {} if damage.file.name == reuse.ANSWERS else {key: index[key] for key in (reuse.KEY,) if key in index}
        if left or kept:
            shards.write_index(damage.manifest.parent, index["capture_layers"], left, **kept)
            return
    for path in damage.manifest.parent.iterdir():
        path.unlink()
