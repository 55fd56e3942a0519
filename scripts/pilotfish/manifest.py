# SPDX-License-Identifier: Apache-2.0
"""Manifests: what a gate has verified, and the only thing that the next rule trusts."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pilotfish import files, seals
from pilotfish.errors import UserError

PACKAGES = ("datasets", "pandera", "pyarrow", "safetensors", "speculators", "torch", "transformers", "vllm")


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of the packages whose code shapes the artifacts; vllm may be the CPU build."""
    found = {}
    for name in names:
        for candidate in (name, f"{name}-cpu"):
            try:
                found[candidate] = version(candidate)
            except PackageNotFoundError:
                continue
    return found


def write(
    path: Path,
    *,
    schema: str,
    paths: Iterable[Path],
    spec: str,
    code: str,
    statistics: dict,
    rows: dict[Path, int] | None = None,
    checksums: dict[Path, str] | None = None,
) -> None:
    """Write a gate's manifest: files with sha256, size in bytes and rows, then spec, code and statistics.

    File names are relative to the manifest's folder. There are no times, host names or absolute paths,
    so identical data give identical bytes and nothing downstream runs again. `checksums` are those that
    the gate has computed already. The manifest's own seal shows whether it was edited since.
    """
    entries = {}
    for file in sorted(paths):
        entry: dict = {"sha256": (checksums or {}).get(file) or files.sha256_file(file), "size": file.stat().st_size}
        if rows and file in rows:
            entry["rows"] = rows[file]
        entries[Path(os.path.relpath(file, path.parent)).as_posix()] = entry
    seals.write_json(
        path,
        {
            "schema": schema,
            "version": 1,
            "files": entries,
            "spec": spec,
            "code": code,
            "packages": package_versions(),
            "statistics": statistics,
        },
    )


def read(path: Path, schema: str) -> dict:
    """Read a manifest and compare the size of every file that it vouches for.

    Sizes are cheap enough for every start; checksums were verified when the gate wrote them.
    Raises UserError when a file is missing or has another size than the gate saw, or when the manifest was edited.
    One without a seal, of an older version, is read; its gate runs again anyway, as its code is another.
    """
    manifest = files.read_json(path)
    if seals.SEAL in manifest and (fault := seals.fault(path)):
        raise UserError(f"{path}: {fault}; delete it, and the next run has its gate make it anew")
    if manifest.get("schema") != schema:
        raise UserError(f"{path}: a {manifest.get('schema')!r} manifest where {schema!r} is needed")
    if not _is_whole(manifest):
        raise UserError(f"{path}: not as a gate writes it; delete it, and the next run has its gate make it anew")
    for name, entry in manifest["files"].items():
        file = path.parent / name
        if not os.path.isfile(file):  # False for a name that no file can have, too
            raise UserError(f"{file}: missing, though {path} vouches for it; delete {path} to have it remade")
        if file.stat().st_size != entry["size"]:
            raise UserError(
                f"{file}: {file.stat().st_size} bytes where {path} vouches for {entry['size']}; "
                "the file changed after its gate. Delete it and run again"
            )
    return manifest


def _is_whole(manifest: dict) -> bool:
    """Whether a manifest has all that `write` gives it, each of its type."""
    entries = manifest.get("files")
    return (
        all(isinstance(manifest.get(key), str) for key in ("spec", "code"))
        and isinstance(manifest.get("statistics"), dict)
        and isinstance(entries, dict)
        and all(isinstance(each, dict) and isinstance(each.get("sha256"), str) for each in entries.values())
        and all(isinstance(each.get("size"), int) for each in entries.values())
    )
