# SPDX-License-Identifier: Apache-2.0
"""The simplest guess: what mostly follows a token."""

from pilotfish import continuations
from pilotfish.rounds import Round


def sample(generated: list[int]) -> dict:
    return {"input_ids": [9, 9, *generated], "prompt_length": 2}


def test_what_follows_most_often_is_found_in_the_responses_alone():
    assert continuations.most_frequent([sample([1, 2, 1, 3, 1, 3]), sample([9, 4])]) == {1: 3, 2: 1, 3: 1, 9: 4}


def test_the_lower_id_wins_a_tie():
    assert continuations.most_frequent([sample([1, 7, 1, 5])])[1] == 5


def test_a_chain_holds_up_to_its_first_wrong_token():
    following = {1: 2, 2: 3, 3: 4}
    assert continuations.rounds([1, 2, 3, 8, 8, 8, 8], following, 3) == [
        Round(0, 2),
        Round(3, 0),
        Round(4, 0),
        Round(5, 0),
    ]


def test_a_chain_is_no_longer_than_k():
    assert continuations.rounds([1, 1, 1, 1, 1, 1, 1], {1: 1}, 2) == [Round(0, 2), Round(3, 2)]


def test_a_token_that_was_never_followed_drafts_nothing():
    assert continuations.rounds([5, 6, 7], {}, 3) == [Round(0, 0), Round(1, 0)]
