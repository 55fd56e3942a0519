# SPDX-License-Identifier: Apache-2.0
"""The files of a target's weights: whole, inside their folder, and of the model that config.json describes."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pilotfish.errors import UserError

INDEX = "model.safetensors.index.json"
AGAIN = "fetch the model again"
EMBEDDING = re.compile(r"(^|.*\.)embed_tokens\.weight$")
LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
FLOATS = ("F64", "F32", "F16", "BF16")


def json_object(path: Path) -> dict:
    """The JSON object of a model's file; NaN and infinity are numbers here, as in some configurations."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"target.source: {path}: {error.strerror}; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"target.source: {path}: not valid JSON ({error}); {AGAIN}") from None
    if not isinstance(value, dict):
        raise UserError(f"target.source: {path}: a JSON {type(value).__name__}, not an object; {AGAIN}")
    return value


def check(folder: Path) -> None:
    """UserError where config.json is no JSON object, a weight file is damaged, or the index names what is not there."""
    json_object(folder / "config.json")
    held = {path.name: set(tensors(path)) for path in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
    if not index.is_file():
        return
    listed = json_object(index).get("weight_map")
    if not isinstance(listed, dict):
        raise UserError(f"target.source: {index}: no `weight_map` of tensors to files; {AGAIN}")
    for tensor, name in listed.items():
        # A name with a folder in it, `../x`, is not among those held either.
        if not isinstance(name, str) or name not in held:
            raise UserError(
                f"target.source: {index}: {tensor[:200]!r} lies in {str(name)[:200]!r}, which is no .safetensors file "
                f"of {folder}; {AGAIN}"
            )
        if tensor not in held[name]:
            raise UserError(
                f"target.source: {folder / name}: lacks {tensor[:200]!r}, which {index.name} lists; {AGAIN}"
            )


def tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each tensor by its name; reading them compares the header with the file's size."""
    try:
        with safe_open(path, framework="np") as held:
            slices: dict[str, Any] = {name: held.get_slice(name) for name in held.keys()}
            return {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    except Exception as error:  # safetensors' own class derives from no narrower one
        raise UserError(f"target.source: {path}: no whole safetensors file ({error}); {AGAIN}") from None


def compare(folder: Path, layers: int, hidden: int, vocabulary: int) -> None:
    """UserError where the weights are plainly not those of a model of these sizes: another's config.json lies there.

    Only what is named as usual and not packed by a quantisation is looked at.
    """
    found = {name: kind for path in sorted(folder.glob("*.safetensors")) for name, kind in tensors(path).items()}
    numbers = [int(match[1]) for name in found if (match := LAYER.search(name))]
    if numbers and max(numbers) + 1 < layers:
        raise UserError(
            f"target.source: {folder}: weights of {max(numbers) + 1} layers where config.json says {layers}; "
            f"weights are missing, or of another model: {AGAIN}"
        )
    embeddings = [kind for name, kind in found.items() if EMBEDDING.match(name)]
    if len(embeddings) == 1 and embeddings[0][0] in FLOATS and embeddings[0][1] != [vocabulary, hidden]:
        raise UserError(
            f"target.source: {folder}: an embedding of shape {embeddings[0][1]} where config.json says "
            f"[{vocabulary}, {hidden}]; one of the two is another model's: {AGAIN}"
        )
