# SPDX-License-Identifier: Apache-2.0
"""The draft vocabulary: frequent tokens, special ones always, and maps that agree."""

import numpy as np
import pytest

from pilotfish import vocabulary
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
