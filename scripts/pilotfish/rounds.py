# SPDX-License-Identifier: Apache-2.0
"""Rounds of drafting and verifying: how a response falls into them, which of them count, and tau out of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BOOTSTRAP_RESAMPLES = 1000


class Round(NamedTuple):
    """One draft-and-verify step: the response token it starts from, and how many drafted tokens held."""

    start: int
    accepted: int


def rounds_of(per_step_accepted: Sequence[int]) -> list[Round]:
    """All rounds of a response: each starts at the bonus token of the one before it."""
    rounds, start = [], 0
    for accepted in per_step_accepted:
        rounds.append(Round(start, accepted))
        start += accepted + 1
    return rounds


def within(rounds: Sequence[Round], n_tokens: int) -> list[Round]:
    """The rounds whose bonus token is among a response's first `n_tokens`."""
    return [each for each in rounds if each.start + each.accepted + 1 < n_tokens]


def count_rounds(per_step_accepted: Sequence[int], n_stored: int) -> list[Round]:
    """The rounds that count, of all rounds of a response in order: a replay's, or vLLM's `per_step_accepted`.

    A round counts if its bonus token (the target's own, after the accepted ones) is among the `n_stored`
    response tokens: start + accepted + 1 < n_stored. With k tokens stored beyond n_out that holds for the
    last round too, uncut as vLLM counts it. Otherwise a round that runs past the stored tokens, or reaches an
    EOS, after which nothing is stored, has no known length and is left out.

    vLLM lists no step without a draft (after a preemption, near the context limit): the starts after one are
    too small, and `compare_rounds` takes those rounds for different.
    """
    rounds = rounds_of(per_step_accepted)
    if any(each.start + 1 >= n_stored for each in rounds):
        raise ValueError(f"rounds go on after all {n_stored} tokens: they are of another response")
    return within(rounds, n_stored)


def walk(accepted: Sequence[int], n_stored: int) -> list[Round]:
    """The rounds that a row's acceptance table [n_out - 1] leads to, as `count_rounds` leaves them.

    The table may be a list, an array or a tensor of whole numbers.
    """
    steps, start = [], 0
    while start < len(accepted):
        steps.append(int(accepted[start]))
        start += steps[-1] + 1
    return count_rounds(steps, n_stored)


def compare_rounds(replay: Sequence[Sequence[Round]], served: Sequence[Sequence[Round]]) -> tuple[int, int]:
    """How many served rounds the replay has too (same response, start, accepted), and how many were served.

    Give it the rounds that count, by `count_rounds` with one n_stored: the cut last one is on neither side.
    """
    equal = sum(len(set(ours) & set(theirs)) for ours, theirs in zip(replay, served, strict=True))
    return equal, sum(len(rounds) for rounds in served)


def summarise(rounds_per_row: Sequence[Sequence[Round] | Sequence[int]], k: int) -> dict:
    """tau and its kin, from each row's rounds or from the bare accepted counts of an engine.

    `tau_micro_incl_bonus` is 1 + accepted / rounds, with a bootstrap interval over rows; the macro one is the
    mean of the rows' own; rows without a round enter neither. `joint[i]` is the share of rounds with more
    than i accepted, `conditional[i]` is joint[i] / joint[i - 1], or None where no round got so far.
    """
    rows = [[c.accepted if isinstance(c, Round) else c for c in row] for row in rounds_per_row if len(row)]
    counts = np.array([count for row in rows for count in row], dtype=int)
    if not rows or counts.max() > k:
        raise ValueError(f"no round to summarise, or one with more than k = {k} accepted; check rows and k")
    sums, lengths = np.array([sum(row) for row in rows]), np.array([len(row) for row in rows])
    picks = np.random.default_rng(0).integers(len(rows), size=(BOOTSTRAP_RESAMPLES, len(rows)))
    resampled = 1 + sums[picks].sum(1) / lengths[picks].sum(1)
    joint = [float((counts > i).mean()) for i in range(k)]
    return {
        "tau_micro_incl_bonus": float(1 + counts.mean()),
        "tau_micro_interval_95": np.quantile(resampled, [0.025, 0.975]).tolist(),
        "tau_macro_incl_bonus": float(1 + (sums / lengths).mean()),
        "joint": joint,
        "conditional": [a / b if b else None for a, b in zip(joint, [1.0, *joint[:-1]], strict=True)],
        "histogram": np.bincount(counts, minlength=k + 1).tolist(),
        "rounds": len(counts),
        "rows": len(rounds_per_row),
        "rows_without_rounds": len(rounds_per_row) - len(rows),
    }
