# SPDX-License-Identifier: Apache-2.0
"""Rounds are walked, counted, compared and summed up as done by hand."""

import json

import numpy as np
import pytest

from pilotfish import rounds
from pilotfish.rounds import Round


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_walk_jumps_over_the_accepted_tokens_and_the_bonus(kind):
    table = kind([2, 9, 9, 0, 1, 9, 0])
    assert rounds.walk(table, n_stored=8) == [(0, 2), (3, 0), (4, 1), (6, 0)]


def test_a_last_round_that_ends_on_the_last_token_counts():
    assert rounds.walk([1, 9, 1, 9], n_stored=5) == [(0, 1), (2, 1)]


def test_a_last_round_that_runs_past_the_stored_tokens_is_left_out():
    assert rounds.walk([1, 9, 2, 9], n_stored=5) == [(0, 1)]


def test_a_last_round_counts_uncut_where_enough_tokens_are_stored():
    assert rounds.walk([1, 9, 2, 9], n_stored=5 + 3) == [(0, 1), (2, 2)]


def test_a_response_of_one_token_has_no_round():
    assert rounds.walk([], n_stored=1) == []


def test_a_round_that_accepts_the_end_token_is_left_out_on_both_sides():
    """Tokens 0 to 4, the last is EOS; the engine drafts past it, the store holds nothing there."""
    replayed = rounds.walk([1, 9, 2, 9], n_stored=5)
    served = rounds.count_rounds([1, 3], n_stored=5)
    assert replayed == served == [(0, 1)]


def test_served_rounds_that_go_on_after_the_response_are_refused():
    with pytest.raises(ValueError, match="another response"):
        rounds.count_rounds([1, 3, 0], n_stored=5)


def test_equal_rounds_have_the_same_response_start_and_length():
    replayed = [[Round(0, 1), Round(2, 0), Round(3, 2)], [Round(0, 0)]]
    served = [[Round(0, 0), Round(1, 0), Round(2, 0), Round(3, 2)], [Round(0, 1), Round(2, 2)]]
    assert rounds.compare_rounds(replayed, served) == (2, 6)
    assert rounds.compare_rounds(served, served) == (6, 6)


def test_another_number_of_responses_is_not_compared():
    with pytest.raises(ValueError):
        rounds.compare_rounds([[Round(0, 1)]], [])


def test_the_summary_of_rounds_has_the_numbers_done_by_hand():
    rows = [[Round(0, 3), Round(4, 0)], [Round(0, 1), Round(2, 0)], [], [Round(0, 1)]]
    summary = rounds.summarise(rows, k=3)
    low, high = summary.pop("tau_micro_interval_95")
    assert 1.5 <= low < summary["tau_micro_incl_bonus"] < high <= 2.5
    assert summary == {
        "tau_micro_incl_bonus": 2.0,
        "tau_macro_incl_bonus": pytest.approx(1 + (1.5 + 0.5 + 1) / 3),
        "joint": [3 / 5, 1 / 5, 1 / 5],
        "conditional": [3 / 5, pytest.approx(1 / 3), 1.0],
        "histogram": [2, 2, 0, 1],
        "rounds": 5,
        "rows": 4,
        "rows_without_rounds": 1,
    }


def test_served_counts_and_replayed_rounds_have_one_summary_that_is_plain_json():
    counts = [[3, 0], [1, 0], [1]]
    replayed = [[Round(0, 3), Round(4, 0)], [Round(0, 1), Round(2, 0)], [Round(0, 1)]]
    assert json.dumps(rounds.summarise(counts, k=3)) == json.dumps(rounds.summarise(replayed, k=3))


def test_a_position_that_no_round_reached_has_no_conditional_rate():
    assert rounds.summarise([[0, 0]], k=2)["conditional"] == [0.0, None]


@pytest.mark.parametrize("rows", [[], [[]], [[4]]])
def test_no_round_or_more_than_k_accepted_is_refused(rows):
    with pytest.raises(ValueError, match="k = 3"):
        rounds.summarise(rows, k=3)
