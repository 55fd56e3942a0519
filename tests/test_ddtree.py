# SPDX-License-Identifier: Apache-2.0
"""A DDTree holds the likeliest prefixes, starts as the chain, and only gains by a larger budget."""

import itertools

import pytest
import torch

from pilotfish import ddtree
from pilotfish.rounds import Round, walk

DEPTH, WIDTH = 4, 6


def random_log_probs(seed: int, starts: int = 1) -> torch.Tensor:
    """Log-probabilities [starts, DEPTH, WIDTH] of the likeliest tokens, falling."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(starts, DEPTH, 3 * WIDTH, generator=draw)
    return logits.log_softmax(-1).topk(WIDTH).values


def random_ranks(seed: int, starts: int) -> torch.Tensor:
    """Ranks [starts, DEPTH] of the true tokens; low ones are frequent, some are absent."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.tensor([20.0, 6.0, 4.0, 3.0, 2.0, 1.0, 1.0])
    ranks = torch.multinomial(weights, starts * DEPTH, replacement=True, generator=draw)
    return torch.where(ranks == WIDTH, -1, ranks).view(starts, DEPTH)


def brute_force(log_probs_DK: list[list[float]], budget: int) -> list[tuple[int, ...]]:
    """All prefixes, sorted."""
    every = []
    for depth in range(1, len(log_probs_DK) + 1):
        for path in itertools.product(range(len(log_probs_DK[0])), repeat=depth):
            cost = 0.0
            for log_probs_K, rank in zip(log_probs_DK, path, strict=False):
                cost -= log_probs_K[rank]
            every.append((cost, path))
    return [path for _, path in sorted(every)[:budget]]


@pytest.mark.parametrize("seed", range(20))
def test_the_heap_equals_brute_force(seed: int):
    log_probs = random_log_probs(seed)[0].tolist()
    assert ddtree.tree(log_probs, budget=25) == brute_force(log_probs, 25)


def test_equal_prefixes_come_in_the_order_of_their_ranks():
    log_probs = [[-1.0, -1.0, -1.0], [0.0, -1.0, -1.0]]
    assert ddtree.tree(log_probs, budget=9) == brute_force(log_probs, 9)
    assert ddtree.tree(log_probs, budget=4) == [(0,), (0, 0), (1,), (1, 0)]


def test_every_parent_comes_before_its_children():
    nodes = ddtree.tree(random_log_probs(3)[0].tolist(), budget=40)
    assert len(set(nodes)) == 40
    assert all(node[:-1] in nodes[:place] for place, node in enumerate(nodes) if len(node) > 1)


def test_no_more_tokens_than_the_budget_enter_a_tree():
    log_probs = random_log_probs(4, starts=30)
    for each in log_probs:
        narrow, wide = (ddtree.tree(each[:, :width].tolist(), budget=3) for width in (3, WIDTH))
        assert narrow == wide


@pytest.mark.parametrize(
    ("ranks", "length"),
    [([0, 0, 1, 0], 3), ([0, 1, 0, 0], 1), ([1, 0, 0, 0], 2), ([2, 0, 0, 0], 0), ([-1, 0, 0, 0], 0)],
)
def test_a_walk_goes_on_as_long_as_the_tree_holds_the_true_token(ranks: list[int], length: int):
    nodes = {(0,), (0, 0), (0, 0, 0), (0, 0, 1), (1,), (1, 0)}
    assert ddtree.matched(nodes, ranks) == length


def test_a_tree_of_one_token_a_depth_is_the_chain():
    log_probs, ranks = random_log_probs(5, starts=60), random_ranks(5, 60)
    chain = (ranks == 0).long().cumprod(1).sum(1)
    table = ddtree.TreeTable(log_probs[..., :1], ranks, budget=DEPTH)
    assert list(table) == chain.tolist()
    assert set(chain.tolist()) == set(range(DEPTH + 1)), "starts that lack a length prove less"
    assert walk(table, n_stored=61) == walk(chain, n_stored=61)


def test_tau_never_falls_as_the_budget_grows():
    log_probs, ranks = random_log_probs(6, starts=40), random_ranks(6, 40)
    tables = [list(ddtree.TreeTable(log_probs, ranks, budget)) for budget in (1, 2, 4, 8, 16, 32)]
    for smaller, larger in itertools.pairwise(tables):
        assert all(less <= more for less, more in zip(smaller, larger, strict=True))
    assert tables[-1] != tables[0]


def test_a_walk_builds_trees_only_where_rounds_start(monkeypatch):
    built, build = [], ddtree.tree
    monkeypatch.setattr(ddtree, "tree", lambda *arguments: built.append(1) or build(*arguments))
    table = ddtree.TreeTable(random_log_probs(7, starts=30), random_ranks(7, 30), budget=8)
    rounds = walk(table, n_stored=60)
    assert len(built) == len(rounds) < 30


def test_a_summary_says_what_the_tree_was():
    found = ddtree.summary([[Round(0, 3), Round(4, 1)]], budget=8, top_k=8, depth=DEPTH)
    assert found["summary"]["tau_micro_incl_bonus"] == 3
    assert {key: value for key, value in found.items() if key != "summary"} == {
        "budget": 8,
        "top_k": 8,
        "depth": DEPTH,
        "root_counted": False,
    }
