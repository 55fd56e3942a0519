# SPDX-License-Identifier: Apache-2.0
"""Samples of unequal lengths fill batches nearly to the brim, in an order that seed and epoch give."""

from pathlib import Path

import numpy as np
import pytest

from helpers import arrow_of, random_ids, response
from pilotfish import batches, samples

SHORT = np.random.default_rng(0).integers(60, 360, 2000)
LONG = np.random.default_rng(1).integers(20, 3296, 3000)


def packed(lengths: np.ndarray, budget: int, seed: int = 0, epoch: int = 0) -> batches.PackedBatches:
    made = batches.PackedBatches(lengths, budget, seed)
    made.set_epoch(epoch)
    return made


def as_sets(made: batches.PackedBatches) -> list[frozenset[int]]:
    return [frozenset(batch.tolist()) for batch in made]


@pytest.mark.parametrize(("lengths", "budget"), [(SHORT, 512), (SHORT, 360), (LONG, 49_152), (SHORT[:1], 400)])
def test_every_sample_is_in_one_batch_and_no_batch_exceeds_its_budget(lengths: np.ndarray, budget: int):
    made = list(packed(lengths, budget))
    assert sorted(np.concatenate(made).tolist()) == list(range(len(lengths)))
    assert max(int(lengths[batch].sum()) for batch in made) <= budget


@pytest.mark.parametrize(("lengths", "budget", "most"), [(SHORT, 512, 0.04), (SHORT, 1024, 0.03), (LONG, 49_152, 0.02)])
def test_little_is_padded(lengths: np.ndarray, budget: int, most: float):
    made = packed(lengths, budget)
    assert 1 - lengths.sum() / (len(made) * budget) <= most


def test_samples_that_fill_a_batch_together_do():
    assert sorted(map(len, packed(np.array([300, 212, 400, 112, 512]), 512))) == [1, 2, 2]


def test_the_same_seed_and_epoch_give_the_same_batches_and_others_give_others():
    first = as_sets(packed(SHORT, 512, seed=3, epoch=1))
    assert first == as_sets(packed(SHORT, 512, seed=3, epoch=1))
    for other in (packed(SHORT, 512, seed=3, epoch=2), packed(SHORT, 512, seed=4, epoch=1)):
        assert len(set(first) & set(as_sets(other))) < len(first) / 10


def test_an_epoch_can_be_taken_up_in_its_middle_as_the_trainer_does():
    whole = packed(SHORT, 512, epoch=1)
    batches_of_epoch = list(whole)
    resumed = packed(SHORT, 512, epoch=1)
    resumed._cached_generated_batches = (1, resumed._generate_batches(1)[5:])
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in batches_of_epoch[5:]]


def test_long_batches_do_not_all_come_first():
    sizes = [len(batch) for batch in packed(LONG, 3296)]
    assert sizes != sorted(sizes)


def test_the_description_tells_samples_batches_sizes_padding_and_lengths():
    lengths = np.array([1234] * 30 + [400] * 10 + [3296] * 60)
    said = batches.describe(packed(lengths, 4096))
    assert said == (
        "100 samples, 70 batches an epoch (1.4 samples, 3,411 tokens each, 17% padding), lengths 0-550: 10%, "
        "550-1,100: 0%, 1,100-1,650: 30%, 1,650-2,200: 0%, 2,200-2,750: 0%, 2,750-3,300: 60%"
    )


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([1], "0-1: 100%, 1-2: 0%, 2-3: 0%, 3-4: 0%, 4-5: 0%, 5-6: 0%"),
        ([60, 61, 120, 360], "0-60: 25%, 60-120: 50%, 120-180: 0%, 180-240: 0%, 240-300: 0%, 300-360: 25%"),
    ],
)
def test_ranges_hold_their_upper_end(lengths: list[int], said: str):
    assert batches.distribution(np.array(lengths)) == said


def test_lengths_are_the_tokens_with_states_of_each_sample(tmp_path: Path):
    rows = [response(row, random_ids(3, row), random_ids(row + 2, row)) for row in range(4)]
    found = batches.lengths(samples.load(arrow_of(tmp_path, rows)))
    assert (found.dtype, found.tolist()) == (np.int64, [4, 5, 6, 7])
