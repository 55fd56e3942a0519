# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: the target tokens that a drafter can propose, and the maps between the two."""

from collections.abc import Iterable, Sequence

import numpy as np

from pilotfish.errors import UserError


def generated_counts(samples: Iterable[dict], vocab_size: int) -> np.ndarray:
    """How often each target token was generated (prompt tokens do not count), int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample["input_ids"][sample["prompt_length"] :], minlength=vocab_size)
    return counts


def choose(counts: np.ndarray, size: int, always: Sequence[int]) -> np.ndarray:
    """Sorted target ids of the draft vocabulary: `always` (end and special tokens), then by frequency.

    Equal counts are settled by the lower id, so the choice depends on the counts alone.
    Raises UserError when `size` does not fit between the tokens that must be in and the vocabulary.
    """
    if outside := [token for token in always if not 0 <= token < len(counts)]:
        raise UserError(f"special tokens {outside} lie outside the target's vocabulary of {len(counts)}")
    if not len(set(always)) <= size <= len(counts):
        raise UserError(
            f"draft_vocab_size {size} must lie between the {len(set(always))} special tokens and the "
            f"target's vocabulary of {len(counts)}"
        )
    ranked = np.lexsort((np.arange(len(counts)), -counts))
    kept = list(dict.fromkeys([*always, *ranked.tolist()]))[:size]
    return np.sort(np.array(kept, dtype=np.int64))


def maps(chosen: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`d2t` int64 [size], an offset: target id = draft id + d2t[draft id]; `t2d` bool [vocab_size]."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[chosen] = True
    return chosen - np.arange(len(chosen)), t2d


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of generated tokens that the draft vocabulary holds."""
    return float(counts[t2d].sum() / max(counts.sum(), 1))
