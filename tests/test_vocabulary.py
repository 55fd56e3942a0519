# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: frequent tokens, special ones always, and maps that agree."""

import numpy as np
import pytest

from pilotfish import rounds, vocabulary
from pilotfish.errors import UserError

SIZE = 200
SPECIAL = [0, 150, 199]


@pytest.fixture
def counts() -> np.ndarray:
    """Counts with ties, in which the special tokens never occur."""
    made = np.random.default_rng(0).integers(0, 20, SIZE)
    made[SPECIAL] = 0
    return made


def test_only_generated_tokens_are_counted():
    samples = [
        {"input_ids": [4, 4, 4, 1, 2, 2], "prompt_length": 3},
        {"input_ids": [3, 2], "prompt_length": 1},
    ]
    assert vocabulary.generated_counts(samples, 5).tolist() == [0, 1, 3, 0, 0]


@pytest.mark.parametrize("size", [len(SPECIAL), 64, SIZE])
def test_the_two_maps_say_the_same(counts: np.ndarray, size: int):
    d2t, t2d = vocabulary.maps(vocabulary.choose(counts, size, SPECIAL), SIZE)
    assert (d2t.shape, t2d.shape) == ((size,), (SIZE,))
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    assert np.array_equal(np.arange(size) + d2t, np.nonzero(t2d)[0])


@pytest.mark.parametrize("size", [len(SPECIAL), 64, SIZE])
def test_special_tokens_are_always_in(counts: np.ndarray, size: int):
    chosen = vocabulary.choose(counts, size, SPECIAL)
    assert set(SPECIAL) <= set(chosen.tolist())
    assert len(set(chosen.tolist())) == size


def test_no_token_left_out_is_more_frequent_than_one_that_is_in(counts: np.ndarray):
    chosen = vocabulary.choose(counts, 64, SPECIAL)
    by_frequency = np.setdiff1d(chosen, SPECIAL)
    left_out = np.setdiff1d(np.arange(SIZE), chosen)
    assert counts[by_frequency].min() >= counts[left_out].max()


def test_a_special_token_that_is_also_frequent_takes_one_place():
    assert vocabulary.choose(np.array([9, 8, 7, 0]), 3, [0, 3, 3]).tolist() == [0, 1, 3]


def test_the_lower_id_wins_a_tie():
    assert vocabulary.choose(np.array([1, 5, 5, 5, 2]), 2, []).tolist() == [1, 2]
    assert vocabulary.choose(np.zeros(5, dtype=np.int64), 3, [4]).tolist() == [0, 1, 4]


@pytest.mark.parametrize("size", [0, len(SPECIAL) - 1, SIZE + 1])
def test_a_size_that_does_not_fit_is_an_error_with_the_bounds(counts: np.ndarray, size: int):
    with pytest.raises(UserError, match=f"draft_vocab_size {size} must lie between the 3 special .* of {SIZE}"):
        vocabulary.choose(counts, size, SPECIAL)


def test_coverage_is_the_share_of_generated_tokens():
    counts = np.array([6, 3, 1, 0])
    assert vocabulary.coverage(counts, np.array([True, False, True, True])) == pytest.approx(0.7)
    assert vocabulary.coverage(np.zeros(4), np.ones(4, dtype=bool)) == 0.0


SAMPLES = [
    {"input_ids": [9, 1, 2, 3, 4, 5, 6], "prompt_length": 1},
    {"input_ids": [9, 1], "prompt_length": 1},
]


@pytest.mark.parametrize(
    ("out", "k", "ceiling"),
    [
        ([], 2, 3.0),  # rounds from 1 and from 4; the second runs past the end and has no known length
        ([], 1, 2.0),
        ([3], 2, 1 + 3 / 2),  # 1 -> 2, stops before 3; from 3 -> 4, 5 and 6 as the bonus
        ([2, 3, 4, 5, 6], 3, 1.0),
    ],
)
def test_the_ceiling_is_the_tau_of_a_drafter_that_is_right_wherever_it_can_be(out: list[int], k: int, ceiling: float):
    t2d = np.ones(10, dtype=bool)
    t2d[out] = False
    assert vocabulary.tau_ceilings(SAMPLES, t2d, [k, 7])[k] == pytest.approx(ceiling)


def test_the_ceiling_agrees_with_the_walk_of_the_replay():
    draw = np.random.default_rng(3)
    t2d = draw.random(50) < 0.7
    ids = draw.integers(0, 50, 200)
    table = []
    for start in range(len(ids) - 1):
        following = t2d[ids[start + 1 : start + 4]]
        table.append(int(np.cumprod(following).sum()))
    walked = rounds.walk(table, len(ids))
    sample = {"input_ids": [0, *ids.tolist()], "prompt_length": 1}
    expected = rounds.summarise([walked], 3)["tau_micro_incl_bonus"]
    assert vocabulary.tau_ceilings([sample], t2d, [3])[3] == pytest.approx(expected)


def test_reasoning_and_answer_are_counted_apart():
    samples = [{"input_ids": [9, 7, 1, 1, 8, 2, 3], "prompt_length": 1}]
    counts = vocabulary.counts_by_kind(samples, 10, {"open": 7, "close": 8})
    assert np.flatnonzero(counts["reasoning"]).tolist() == [1, 7, 8]
    assert np.flatnonzero(counts["answer"]).tolist() == [2, 3]
    assert np.array_equal(sum(counts.values()), vocabulary.generated_counts(samples, 10))


def good_map(counts: np.ndarray) -> dict[str, np.ndarray]:
    d2t, t2d = vocabulary.maps(vocabulary.choose(counts, 64, SPECIAL), SIZE)
    return {"d2t": d2t, "t2d": t2d, "counts": counts}


def test_a_good_map_has_no_fault(counts: np.ndarray):
    assert list(vocabulary.faults(good_map(counts), counts, SPECIAL)) == []


def test_a_map_of_another_vocabulary_is_told(counts: np.ndarray):
    (fault,) = vocabulary.faults(good_map(counts), np.append(counts, 1), SPECIAL)
    assert "t2d has 200 entries where the target's vocabulary has 201" in fault
