# SPDX-License-Identifier: Apache-2.0
"""DDTree: a tree of drafts out of one block pass, the best prefixes by their summed log-probability."""

import heapq
from collections.abc import Collection, Sequence

from torch import Tensor

from pilotfish.rounds import Round, summarise

Node = tuple[int, ...]  # the rank of each token on the way from the root


def tree(log_probs_DK: Sequence[Sequence[float]], budget: int) -> list[Node]:
    """The `budget` likeliest nodes, best first, the root not counted; in a tie the smaller tuple.

    `log_probs_DK` are those of the K likeliest tokens at each depth of the block, falling. Popping a node
    pushes its sibling (rank + 1) and its first child (depth + 1, rank 0), neither of which is likelier than
    it. So every node's parent comes before it, and K = budget leaves no node out.
    """
    heap, nodes = [(-log_probs_DK[0][0], (0,), 0.0)], []
    while heap and len(nodes) < budget:
        cost, node, before = heapq.heappop(heap)  # `before` is the cost of the parent
        nodes.append(node)
        depth, rank = len(node), node[-1] + 1
        if rank < len(log_probs_DK[depth - 1]):
            heapq.heappush(heap, (before - log_probs_DK[depth - 1][rank], (*node[:-1], rank), before))
        if depth < len(log_probs_DK):
            heapq.heappush(heap, (cost - log_probs_DK[depth][0], (*node, 0), cost))
    return nodes


def matched(nodes: Collection[Node], ranks_D: Sequence[int]) -> int:
    """How many tokens hold: the depth of the walk along the true tokens, which have these ranks (-1: no rank)."""
    depth = 0
    while depth < len(ranks_D) and tuple(ranks_D[: depth + 1]) in nodes:
        depth += 1
    return depth


class TreeTable(Sequence[int]):
    """A row's acceptance table [n_out - 1] with trees of `budget` nodes; a tree is built where a walk comes by.

    Takes what `DFlashDrafter.ranked` gives for the row: log-probabilities [n_out - 1, D, K] and ranks
    [n_out - 1, D], with K at least the budget.
    """

    def __init__(self, log_probs_SDK: Tensor, ranks_SD: Tensor, budget: int) -> None:
        self._log_probs, self._ranks, self._budget = log_probs_SDK, ranks_SD, budget

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, start: int) -> int:
        nodes = tree(self._log_probs[start].tolist(), self._budget)
        return matched(set(nodes), self._ranks[start].tolist())


def summary(rounds_per_row: Sequence[Sequence[Round]], budget: int, top_k: int, depth: int) -> dict:
    """tau and its kin of one node budget, with the four numbers without which a tree's tau means nothing."""
    return {
        "budget": budget,
        "top_k": top_k,
        "depth": depth,
        "root_counted": False,
        "summary": summarise(rounds_per_row, depth),
    }
