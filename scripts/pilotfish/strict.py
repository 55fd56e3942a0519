# SPDX-License-Identifier: Apache-2.0
"""What all settings have in common: unknown keys forbidden, numbers are numbers, names that can be folders."""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field

from pilotfish.files import is_text

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"  # becomes a folder name and a wildcard
Name = Annotated[str, Field(pattern=NAME, max_length=100)]

# Far more than any configuration holds: what is beyond was not meant, and planning should not choke on it.
MOST_VALUES = 10_000  # YAML's anchors spell billions in ten lines
DEEPEST = 20  # mappings and lists inside one another
LONGEST_TEXT = 10_000  # characters: settings travel on command lines
LARGEST = 10**12  # of whole numbers: rows, tokens, seconds


class Strict(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def repeated_keys(root: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Keys that their mapping has had already, with their line from 1."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))  # an anchor's node is met again at each of its names
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        keys = Counter()
        for key, value in node.value:
            keys[key.value if isinstance(key, yaml.ScalarNode) else id(key)] += 1
            if isinstance(key, yaml.ScalarNode) and keys[key.value] == 2:
                yield key.value, key.start_mark.line + 1
            waiting.append(value)


def absurdities(config: object) -> Iterator[str]:
    """What no configuration holds, one text each that starts with the key: absurd sizes, control characters."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), config)]
    for path, value in waiting:  # grows as it is walked, so that no nesting is too deep
        where = ".".join(path) or "(whole file)"
        if wrong := _absurdity(value):
            yield f"{where}: {wrong}"
        inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
        if len(waiting) + len(inner) > MOST_VALUES:
            yield f"{where}: more than {MOST_VALUES:,} values up to here; look for anchors (& and *) of YAML"
            return
        if inner and len(path) == DEEPEST:
            yield f"{where}: mappings or lists more than {DEEPEST} deep; write it flatter"
            continue
        for key, each in inner:
            if not isinstance(key, str | int | float | None):
                yield f"{where}: the key {str(key)[:100]!r} is no text; put it in quotes"
            elif wrong := _absurdity(key):
                yield f"{where}: a key is {wrong}"
            waiting.append(((*path, str(key)[:100]), each))


def _absurdity(value: object) -> str | None:
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"beyond {LARGEST:,}; no number here is as large"
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"of {len(value):,} characters; no text here needs more than {LONGEST_TEXT:,}"
    if isinstance(value, str) and not is_text(value):
        return "with half of a surrogate pair (\\ud...), which is no text; remove it"
    if isinstance(value, str) and any(unicodedata.category(each) == "Cc" and each not in "\t\n\r" for each in value):
        return f"with a control character ({value[:100]!r}); remove it"
    return None
