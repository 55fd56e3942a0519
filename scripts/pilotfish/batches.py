# SPDX-License-Identifier: Apache-2.0
"""Batches by a budget of tokens: how samples of unequal lengths are packed with little padding, and what that gives."""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from datasets import Dataset
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

WINDOW = 64  # batches packed together: more would leave less room, and put the same samples together in every epoch
BUCKETS = 6  # of lengths, in the description


def lengths(every: Dataset) -> np.ndarray:
    """Tokens with states of each sample, int64 [N], from the memory-mapped column: 8 bytes a sample."""
    return every.data.column("seq_len").to_numpy()


class PackedBatches(MultipackDistributedBatchSamplerV2):
    """Batches of at most `tokens_per_batch` tokens, in an order that `seed` and the epoch give.

    speculators' own sampler, whose interface its Trainer needs to resume within an epoch, fills one batch after the
    other in random order, which leaves half a sample's length empty in each: a quarter of packs of 512 tokens.
    """

    def __init__(self, lengths: np.ndarray, tokens_per_batch: int, seed: int):
        super().__init__(tokens_per_batch, lengths, num_replicas=1, rank=0, seed=seed)

    def _generate_batches(self, epoch: int) -> list[np.ndarray]:
        if self._cached_generated_batches[0] != epoch:
            draw = np.random.default_rng([self.seed, epoch])
            order = draw.permutation(len(self.lengths))
            batches = list(_pack(order, self.lengths, self.batch_max_length))
            draw.shuffle(batches)
            self._cached_generated_batches = (epoch, batches)
        return self._cached_generated_batches[1]


def _pack(order: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Batches of the sample numbers in `order`, packed a window at a time: the longest first, each where it fits best.

    No length may exceed `budget`.
    """
    window = max(1, WINDOW * budget * len(order) // max(1, int(lengths.sum())))
    for start in range(0, len(order), window):
        chosen = order[start : start + window]
        chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
        filled: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # tokens that a batch still takes, and its number; sorted
        for number, length in zip(chosen.tolist(), lengths[chosen].tolist(), strict=True):
            place = bisect_left(rooms, (length,))
            if place == len(rooms):
                room, batch = budget, len(filled)
                filled.append([])
            else:
                room, batch = rooms.pop(place)
            filled[batch].append(number)
            insort(rooms, (room - length, batch))
        yield from map(np.array, filled)


def describe(packed: PackedBatches) -> str:
    """Samples, batches an epoch, their mean size and padding, and how the lengths are distributed; one line."""
    rows, tokens, count = len(packed.lengths), int(packed.lengths.sum()), len(packed)
    padding = 1 - tokens / (count * packed.batch_max_length)
    return (
        f"{rows:,} samples, {count:,} batches an epoch ({rows / count:.1f} samples, {tokens / count:,.0f} tokens each, "
        f"{padding:.0%} padding), lengths {distribution(packed.lengths)}"
    )


def distribution(lengths: np.ndarray) -> str:
    """Shares of the samples in BUCKETS equal ranges of length up to the longest: `0-550: 12%, 550-1,100: 30%, ...`."""
    width = max(1, -(-int(lengths.max()) // BUCKETS))
    step = 10 ** max(0, len(str(width)) - 2)
    width = -(-width // step) * step  # two digits
    shares = np.bincount((lengths - 1) // width, minlength=BUCKETS) / len(lengths)
    return ", ".join(
        f"{number * width:,}-{(number + 1) * width:,}: {share:.0%}" for number, share in enumerate(shares[:BUCKETS])
    )
