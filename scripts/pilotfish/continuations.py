# SPDX-License-Identifier: Apache-2.0
"""The most frequent continuation of each token: what a drafter that has learnt anything must do better than."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pilotfish.rounds import Round, walk

ROWS = 5000  # responses that are counted


def most_frequent(samples: Iterable[dict]) -> dict[int, int]:
    """For each token the one that follows it most often in the responses; the lower id wins a tie."""
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for sample in samples:
        generated = sample["input_ids"][sample["prompt_length"] :]
        for token, following in pairwise(generated):
            counts[token][following] += 1
    return {token: min(found, key=lambda each: (-found[each], each)) for token, found in counts.items()}


def rounds(response: Sequence[int], following: dict[int, int], k: int) -> list[Round]:
    """The rounds of a response of which chains of k most frequent continuations are drafted."""
    table = []
    for start in range(len(response) - 1):
        token, accepted = response[start], 0
        for actual in response[start + 1 : start + 1 + k]:
            token = following.get(token, -1)
            if token != actual:
                break
            accepted += 1
        table.append(accepted)
    return walk(table, len(response))
