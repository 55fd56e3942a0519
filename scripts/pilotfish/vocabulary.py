# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: the target tokens that a drafter can propose, and the maps between the two."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pilotfish import reasoning, rounds
from pilotfish.errors import UserError


def generated_counts(samples: Iterable[dict], vocab_size: int) -> np.ndarray:
    """How often each target token was generated (prompt tokens do not count), int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample["input_ids"][sample["prompt_length"] :], minlength=vocab_size)
    return counts


def counts_by_kind(samples: Iterable[dict], vocab_size: int, wrapper: dict[str, int] | None) -> dict[str, np.ndarray]:
    """Counts as `generated_counts`, of `reasoning` (wrapper tokens included) and of `answer` tokens apart."""
    counts = {kind: np.zeros(vocab_size, dtype=np.int64) for kind in ("reasoning", "answer")}
    for sample in samples:
        prompt, generated = np.split(np.asarray(sample["input_ids"]), [sample["prompt_length"]])
        span = reasoning.split(prompt.tolist(), generated.tolist(), wrapper)
        for kind, ids in zip(counts, np.split(generated, [span.answer]), strict=True):
            counts[kind] += np.bincount(ids, minlength=vocab_size)
    return counts


def frequency_digest(counts: np.ndarray) -> str:
    """sha256 of a frequency table: what ties a map to the data it was counted on."""
    return hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()


def tau_ceilings(samples: Iterable[dict], t2d: np.ndarray, drafted: Sequence[int]) -> dict[int, float]:
    """tau of a drafter that is right wherever the token is in the draft vocabulary: none can do better.

    One for each number k of drafted tokens; NaN without a round. Rounds are the replay's (`rounds.walk`).
    """
    sums, counts = dict.fromkeys(drafted, 0), dict.fromkeys(drafted, 0)
    for sample in samples:
        known = t2d[np.asarray(sample["input_ids"][sample["prompt_length"] :])]
        places = np.where(known, len(known), np.arange(len(known)))
        # Of each token, the next one behind it that is not in the vocabulary, or the end.
        unknown = np.append(np.minimum.accumulate(places[::-1])[::-1], len(known))[1:]
        run = unknown[:-1] - np.arange(len(known) - 1) - 1
        for k in drafted:
            found = rounds.walk(np.minimum(run, k), len(known))
            sums[k] += sum(each.accepted for each in found)
            counts[k] += len(found)
    return {k: 1 + sums[k] / counts[k] if counts[k] else float("nan") for k in drafted}


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


def forced_tokens(target: dict) -> list[int]:
    """Tokens that every map must hold: what ends a response, and special, thinking and tool tokens."""
    return sorted({*target["end_token_ids"], *target["forced_token_ids"]})


def faults(held: dict[str, np.ndarray], counted: np.ndarray, forced: Sequence[int]) -> Iterator[str]:
    """What is wrong with a map (`d2t`, `t2d`, `counts`), given the counts of the present training samples."""
    d2t, t2d = held["d2t"], held["t2d"]
    ids = np.arange(len(d2t)) + d2t
    if t2d.shape != counted.shape:
        yield f"t2d has {len(t2d)} entries where the target's vocabulary has {len(counted)}"
        return
    if not np.array_equal(ids, np.flatnonzero(t2d)):
        yield f"arange + d2t is not where t2d is true{_order(d2t, t2d)}: d2t must be offsets of rising target ids"
        return
    ours, theirs = frequency_digest(counted), frequency_digest(held["counts"])
    if ours != theirs:
        yield (
            f"its frequency table (sha256 {theirs[:12]}, {held['counts'].sum()} tokens) is not that of the present "
            f"training responses ({ours[:12]}, {counted.sum()} tokens): counted on other data, or on other tokens"
        )
    if missing := [token for token in forced if not t2d[token]]:
        yield f"end, special, thinking or tool tokens {missing[:10]} are not in the draft vocabulary"
    elif not np.array_equal(ids, choose(counted, len(ids), forced)):
        yield "its tokens are not the most frequent ones of the training responses"


def _order(d2t: np.ndarray, t2d: np.ndarray) -> str:
    """A guess at what was stored instead of offsets."""
    if np.array_equal(np.sort(d2t), np.flatnonzero(t2d)):
        return " (d2t holds absolute ids)"
    return " (ids do not rise)" if np.any(np.diff(np.arange(len(d2t)) + d2t) <= 0) else ""
