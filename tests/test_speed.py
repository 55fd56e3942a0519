# SPDX-License-Identifier: Apache-2.0
"""Servers take turns, and their speeds are compared chunk by chunk."""

from collections import Counter

import numpy as np
import pytest

from pilotfish import speed


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [(3, 1, [[0], [1], [2]]), (5, 2, [[0, 1], [2, 3], [4]]), (4, 2, [[0, 1], [2, 3]]), (3, 8, [[0, 1, 2]])],
)
def test_chunks_hold_every_row_once_in_order(rows: int, size: int, expected: list):
    assert [list(chunk) for chunk in speed.chunks(rows, size)] == expected


def test_each_server_is_in_each_place_equally_often():
    names = ["baseline", "eagle3", "dflash"]
    orders = [speed.turns(names, chunk) for chunk in range(6)]
    assert orders[0] == names
    assert orders[1] == ["eagle3", "dflash", "baseline"]
    assert all(sorted(order) == sorted(names) for order in orders)
    for place in range(3):
        assert Counter(order[place] for order in orders) == dict.fromkeys(names, 2)


def timed(*times: float | None) -> list[dict]:
    return [{"time_per_output_token_ms": each} for each in times]


def test_times_per_token_are_taken_over_answers_and_one_token_has_none():
    assert speed.per_token(timed(None, 10.0, 20.0, 30.0)) == {"p50": 20.0, "p99": 29.8}
    assert speed.per_token(timed(None)) == {"p50": None, "p99": None}


def test_a_speedup_is_the_quotient_of_whole_speeds_not_the_mean_of_quotients():
    """100 tokens in 4 s against 100 in 10 s; the quotients of the chunks are 4 and 1."""
    found = speed.speedup([[2.0, 80], [2.0, 20]], [[8.0, 80], [2.0, 20]])
    assert found["speedup"] == 2.5


def test_a_drift_that_both_share_leaves_the_interval_narrow():
    """Chunks get ten times slower on the way: drawn in pairs, the quotient is 2 in every resample."""
    drift = np.linspace(1, 10, 24)
    found = speed.speedup([[t / 2, 100] for t in drift], [[t, 100] for t in drift])
    assert found == {"speedup": 2.0, "speedup_interval_95": [2.0, 2.0]}


def test_chunks_that_scatter_give_an_interval_around_the_speedup_and_the_same_one_every_time():
    draw = np.random.default_rng(1)
    ours, plain = ([[t, 100] for t in draw.uniform(low, 2 * low, 24)] for low in (1, 2))
    found = speed.speedup(ours, plain)
    low, high = found["speedup_interval_95"]
    assert low < found["speedup"] < high
    assert speed.speedup(ours, plain) == found


def test_one_chunk_has_a_speedup_and_no_interval():
    assert speed.speedup([[1.0, 100]], [[2.0, 100]]) == {"speedup": 2.0, "speedup_interval_95": None}


def test_servers_with_other_chunks_cannot_be_compared():
    with pytest.raises(ValueError, match="shape"):
        speed.speedup([[1.0, 10]], [[1.0, 10], [1.0, 10]])
