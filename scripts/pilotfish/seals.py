# SPDX-License-Identifier: Apache-2.0
"""Seals: a file that vouches for others, and that nothing vouches for, carries the sha256 of its own bytes."""

import hashlib
import json
import re
from pathlib import Path

from pilotfish import files

SEAL = "seal"  # a JSON object's key, or the name in a Markdown comment
WITHOUT = "without a seal: an older version wrote it, or it was edited"
# A line of its own: what a JSON string holds has its quotes escaped, and a report's text has no such comment.
_PLACE = re.compile(rb'^(  "seal": "|<!-- seal: )([0-9a-f]{0,64})', re.MULTILINE)


def write_json(path: Path, value: dict) -> None:
    """Write sorted, indented JSON as `files.write_json` does, with its seal; equal values give equal bytes."""
    text = json.dumps({**value, SEAL: ""}, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    files.write_text(path, _filled(text + "\n"))


def write_markdown(path: Path, text: str) -> None:
    """Write text with its seal in a comment at the end, which no reader shows."""
    files.write_text(path, _filled(f"{text}\n<!-- {SEAL}:  -->\n"))


def fault(path: Path) -> str | None:
    """What is wrong with the seal of a file; None where every byte is as it was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else error.strerror
    places = _PLACE.findall(content)
    if not places:
        return WITHOUT
    if len(places) > 1 or places[0][1].decode() != _digest(content):
        return "other bytes than were written (its seal differs)"
    return None


def _digest(content: bytes) -> str:
    """sha256 of the bytes with an empty seal."""
    return hashlib.sha256(_PLACE.sub(rb"\1", content)).hexdigest()


def _filled(text: str) -> str:
    content = text.encode("utf-8")
    return _PLACE.sub(rb"\g<1>" + _digest(content).encode(), content).decode("utf-8")
