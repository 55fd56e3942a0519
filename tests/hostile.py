# SPDX-License-Identifier: Apache-2.0
"""What a fuzzer needs: values and bytes that have broken readers, put where right ones belong."""

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pilotfish.errors import UserError

LONGEST_ERROR = 20_000  # characters


def fuzzed(examples: int) -> Callable:
    """The same examples on every machine; a folder may serve several, since each is written anew."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def settled(read: Callable[[], Any], *named: object) -> Any:
    """What is read; None where it is refused by an error that has these names in it and is not endless."""
    try:
        return read()
    except UserError as error:
        assert all(str(name) in str(error) for name in named), error
        assert len(str(error)) < LONGEST_ERROR
        return None


# Texts and values that have broken readers, and any others.
TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=8) | st.sampled_from(
    ["../../x", "/", "\0", "\ud800", "a" * 300, "$(touch x)", "'; rm -rf x; '", "~nobody-of-this-name/x", "hub:a/b"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(10**11, 10**30) | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Where in a JSON value something can be put instead of what is there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def with_value(value: object, path: tuple, new: object) -> Any:
    """A copy of a JSON value with another value at a place."""
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return value


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few of them cut out, and others put in their place."""
    piece = st.tuples(
        st.integers(0, len(content)),
        st.integers(0, 12),
        st.binary(max_size=6)
        | st.sampled_from([b"\n", b'"', b"\\ud800", b"NaN", b"[" * 400, b"\xef\xbb\xbf", b"9" * 20]),
    )

    def apply(pieces: list[tuple[int, int, bytes]]) -> bytes:
        made = content
        for start, cut, new in pieces:
            made = made[:start] + new + made[start + cut :]
        return made

    return st.lists(piece, min_size=1, max_size=3).map(apply)


def at(value: Any, path: tuple) -> Any:
    """What lies at a place of a JSON value."""
    for key in path:
        value = value[key]
    return value
