# SPDX-License-Identifier: Apache-2.0
"""How fast servers are when they take turns: chunks of prompts, whose turn it is, and what follows from their times."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pilotfish.rounds import BOOTSTRAP_RESAMPLES

Chunk = Sequence[float]  # seconds, and the tokens generated in them


def chunks(rows: int, size: int) -> list[range]:
    """Rows 0 .. rows - 1 in chunks of `size`; the last may be smaller."""
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def turns(names: Sequence[str], chunk: int) -> list[str]:
    """The servers in their order for the chunk of this number: each comes first, second, ... equally often.

    So a machine that gets slower, or warmer, does so for all of them alike.
    """
    first = chunk % len(names)
    return [*names[first:], *names[:first]]


def per_token(answers: Sequence[dict]) -> dict[str, float | None]:
    """Median and 99th percentile over answers of the time per output token, ms; None if none has two tokens."""
    times = [each["time_per_output_token_ms"] for each in answers if each["time_per_output_token_ms"] is not None]
    if not times:
        return {"p50": None, "p99": None}
    return {f"p{percent}": round(float(np.percentile(times, percent)), 4) for percent in (50, 99)}


def speedup(ours: Sequence[Chunk], plain: Sequence[Chunk]) -> dict:
    """Tokens/s of one server over those of another on the same chunks, with a 95% bootstrap interval.

    Chunks are drawn in pairs, since both servers were as slow or fast as the machine then was and as the
    chunk is long. One chunk has no interval.
    """
    # [chunk, server, (seconds, tokens)]
    pairs = np.stack([np.array(ours, dtype=float), np.array(plain, dtype=float)], axis=1)
    picks = np.random.default_rng(0).integers(len(pairs), size=(BOOTSTRAP_RESAMPLES, len(pairs)))
    resampled = _ratio(pairs[picks].sum(1))
    interval = np.quantile(resampled, [0.025, 0.975]).round(4).tolist() if len(pairs) > 1 else None
    return {"speedup": round(float(_ratio(pairs.sum(0))), 4), "speedup_interval_95": interval}


def _ratio(sums: np.ndarray) -> np.ndarray:
    """Quotient of two servers' tokens/s, from sums [..., server, (seconds, tokens)]."""
    speeds = sums[..., 1] / sums[..., 0]
    return speeds[..., 0] / speeds[..., 1]


def levels(sets: dict[str, dict[str, dict]]) -> pd.DataFrame:
    """The measurements of one server, set -> level -> measured, as a table for `tables.LEVELS`."""
    rows = {
        f"{name} at concurrency {level}": _level_row(int(level), measured)
        for name, levels_of_set in sets.items()
        for level, measured in levels_of_set.items()
    }
    return pd.DataFrame(list(rows.values()), index=list(rows))


def _level_row(level: int, measured: dict) -> dict:
    answers, timed = measured["answers"], measured["chunks"]
    return {
        "level": level,
        **{name: measured[name] for name in ("seconds", "tokens", "tokens_per_second")},
        "chunks": len(timed),
        "chunks_due": len(chunks(len(answers), level)),
        "seconds_of_chunks": float(sum(seconds for seconds, _ in timed)),
        "shortest_chunk": float(min((seconds for seconds, _ in timed), default=0)),
        "tokens_of_chunks": sum(tokens for _, tokens in timed),
        "tokens_of_answers": sum(len(answer["token_ids"]) for answer in answers),
        "times_per_token": measured["time_per_output_token_ms"],
        "times_of_answers": per_token(answers),
    }
