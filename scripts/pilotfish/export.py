# SPDX-License-Identifier: Apache-2.0
"""An export's files, and its config.json as made from a checkpoint's."""

from collections.abc import Mapping
from pathlib import Path

from pilotfish import files

FILES = ("config.json", "model.safetensors")
CODE_KEYS = ("auto_map",)  # points at Python beside the weights, which no server should be asked to run


def target_name(target_manifest: Path, facts: Mapping) -> str:
    """What an export calls its target: a hub id if it has a revision, else the run's own folder.

    Only a hub id has a revision; every other source is known by its files in the run's folder.
    """
    return facts["source"] if facts["revision"] else (target_manifest.parent / "model").as_posix()


def write(checkpoint: Path, folder: Path, target: str) -> None:
    """Export a checkpoint for the target of this name: config.json without code, and the weights by a link."""
    config = {key: value for key, value in files.read_json(checkpoint / "config.json").items() if key not in CODE_KEYS}
    config["speculators_config"]["verifier"]["name_or_path"] = target
    files.write_json(folder / "config.json", config)
    files.link(checkpoint / "model.safetensors", folder / "model.safetensors")
