# SPDX-License-Identifier: Apache-2.0
"""What was served is compared with the replay, the baseline and the data, only where two texts share their tokens."""

import copy
import re
from pathlib import Path

import pytest

from pilotfish import agreement
from pilotfish.agreement import Departure


def counted(rounds: int, drafted: int, accepted: int, positions: list[int]) -> dict:
    keys = ("rounds", "drafted", "accepted", "accepted_per_position")
    return dict(zip(keys, (rounds, drafted, accepted, positions), strict=True))


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1),
        ([9, 2], [1, 2], 0),
    ],
)
def test_the_common_prefix_ends_at_the_first_difference(left: list, right: list, shared: int):
    assert agreement.common_prefix(left, right) == agreement.common_prefix(right, left) == shared


def served(row: int, token_ids: list[int], accepted: list[int]) -> dict:
    return {"row": row, "token_ids": token_ids, "per_step_accepted": accepted}


def test_identical_responses_are_counted_by_row():
    left, right = [served(0, [1, 2], []), served(1, [3], [])], [served(0, [1, 2], []), served(1, [4], [])]
    assert agreement.identical(left, right) == 1


TEN = list(range(100, 110))


def test_identical_texts_with_equal_rounds_are_in_parity():
    """Starts 0, 3, 4, 6; the last round's bonus would be the eleventh token, so it counts on neither side."""
    found = agreement.parity([served(5, TEN, [2, 0, 1, 3])], {5: TEN}, {5: [(0, 2), (3, 0), (4, 1)]}, k=3)
    assert found == {
        "rounds_compared": 3,
        "rounds_equal": 3,
        "rounds_served": 4,
        "tau_served": 2.0,
        "tau_replay": 2.0,
        "tau_difference": 0.0,
    }


def test_a_round_that_differs_is_not_equal_and_moves_the_starts_behind_it():
    """The replay accepts one token less in the round at 3, and is at the same starts again from 6."""
    answers = [served(0, TEN, [2, 2, 1])]
    found = agreement.parity(answers, {0: TEN}, {0: [(0, 2), (3, 1), (5, 0), (6, 1)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (2, 3)
    assert found["tau_difference"] == pytest.approx(5 / 3 - 4 / 4)


@pytest.mark.parametrize(("shared", "compared"), [(10, 4), (9, 3), (7, 3), (6, 2), (4, 1), (3, 0)])
def test_texts_that_part_midway_are_compared_where_the_bonus_token_is_shared(shared: int, compared: int):
    """Rounds start at 0, 3, 4, 6; their bonus tokens are those at 3, 4, 6 and 9."""
    stored = TEN[:shared] + [1] * (10 - shared)
    rounds = [(0, 2), (3, 0), (4, 1), (6, 2)]
    found = agreement.parity([served(0, TEN, [2, 0, 1, 2])], {0: stored}, {0: rounds}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (compared, compared)
    assert found["tau_difference"] == (0 if compared else None)
    assert found["rounds_served"] == 4


def test_rows_without_a_stored_response_are_left_out():
    answers = [served(0, TEN, [2, 0]), served(1, TEN, [3, 3])]
    found = agreement.parity(answers, {0: TEN}, {0: [(0, 2), (3, 0)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (2, 2)


@pytest.mark.parametrize("stored", [{}, {0: [1, *TEN]}], ids=["nothing stored", "nothing shared"])
def test_without_a_comparable_round_there_is_no_difference(stored: dict):
    found = agreement.parity([served(0, TEN, [2, 0])], stored, {0: [(0, 2), (3, 0)]}, k=3)
    assert found == {
        "rounds_compared": 0,
        "rounds_equal": 0,
        "rounds_served": 2,
        "tau_difference": None,
    }


def test_a_replay_whose_only_round_runs_past_the_shared_tokens_has_no_round_in_common():
    found = agreement.parity([served(0, TEN, [1])], {0: [*TEN[:3], 1, 1, 1]}, {0: [(0, 3)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (0, 1)


SOUND = {
    "counters": counted(4, 12, 5, [3, 2, 0]),
    "answers": [served(0, TEN, [2, 0, 1]), served(1, TEN, [2])],
}


def test_counters_that_agree_with_the_requests_have_no_fault():
    assert agreement.counter_faults(SOUND, k=3) == []


@pytest.mark.parametrize(
    ("counters", "accepted", "fault"),
    [
        ({"drafted": 4}, [2], "5 tokens accepted, only 4 drafted"),
        ({"accepted_per_position": [2, 3, 0]}, [2], r"accepted per position \[2, 3, 0\] does not fall"),
        ({"accepted_per_position": [4, 2, 0]}, [2], r"\[4, 2, 0\] is not 5 tokens at 3 positions"),
        ({"accepted_per_position": [3, 2]}, [2], r"\[3, 2\] is not 5 tokens at 3 positions"),
        ({"drafted": 13}, [2], "13 tokens drafted in 4 rounds of at most 3"),
        ({"rounds": 5}, [2], "counters and its requests disagree"),
        ({"accepted": 6, "accepted_per_position": [3, 3, 0]}, [2], "counters and its requests disagree"),
        ({}, [1], "counters and its requests disagree"),
        ({}, [2, 0], "counters and its requests disagree"),
    ],
)
def test_each_inconsistency_is_found_alone(counters: dict, accepted: list[int], fault: str):
    measured = copy.deepcopy(SOUND)
    measured["counters"] |= counters
    measured["answers"][1]["per_step_accepted"] = accepted
    (found,) = agreement.counter_faults(measured, k=3)
    assert re.search(fault, found)


def test_an_engine_that_drafted_nothing_is_at_fault():
    idle = {"counters": counted(0, 0, 0, [0, 0, 0]), "answers": [served(0, TEN, [])]}
    (found,) = agreement.counter_faults(idle, k=3)
    assert found == "the engine drafted nothing; was the drafter loaded?"


def parity_of(equal: int, compared: int, apart: float | None) -> dict:
    return {"rounds_equal": equal, "rounds_compared": compared, "tau_difference": apart}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (parity_of(2880, 3000, 0.01), None),
        (parity_of(3000, 3000, -0.01), None),
        (parity_of(2850, 3000, 0.0), "95.0% of 3000 rounds equal the replay's (at least 96.0%"),
        (parity_of(3000, 3000, 0.011), "tau differs by 0.0110 (at most 0.0100)"),
        # A clean run's; a wrong replay shares 79.6% of its rounds.
        (parity_of(91, 95, -0.0618), None),
        (parity_of(88, 95, 0.0), "92.6% of 95 rounds equal the replay's (at least 93.2%"),
        (parity_of(690, 700, 0.0223), None),
        (parity_of(690, 700, 0.0225), "tau differs by 0.0225 (at most 0.0223)"),
        (parity_of(0, 100, None), "tau differs by an unknown amount"),
        (parity_of(0, 0, None), "raise evaluation.sets.NAME.prompts"),
    ],
)
def test_rounds_and_tau_must_both_be_the_replays(found: dict, fault: str | None):
    said = agreement.parity_fault(found)
    assert said is None if fault is None else fault in said


@pytest.mark.parametrize(
    ("left", "right", "stored", "expected"),
    [
        (TEN, TEN, TEN, []),
        ([*TEN[:4], 7], TEN, TEN, [Departure(0, 4, (7, 104), True)]),
        ([*TEN[:4], 7], TEN, [*TEN[:4], 8, 8], [Departure(0, 4, (7, 104), True)]),
        ([*TEN[:4], 7], TEN, [*TEN[:3], 8, 8], [Departure(0, 4, (7, 104), False)]),
        ([*TEN[:4], 7], TEN, TEN[:4], [Departure(0, 4, (7, 104), False)]),
        (TEN[:4], TEN, TEN, [Departure(0, 4, (-1, 104), False)]),
        ([7], TEN, TEN, [Departure(0, 0, (7, 100), True)]),
    ],
    ids=[
        "equal", "stored as one", "stored as neither", "parted from the stored before", "no state there",
        "one ends first", "at the first token",
    ],
)  # fmt: skip
def test_texts_part_at_a_place_whose_state_is_known_or_not(left: list, right: list, stored: list, expected: list):
    assert agreement.departures([served(0, left, [])], [served(0, right, [])], {0: stored}) == expected


def test_a_departure_of_a_row_that_is_not_stored_cannot_be_judged():
    (found,) = agreement.departures([served(3, [1], [])], [served(3, [2], [])], {})
    assert not found.comparable


def test_a_departure_is_a_fault_only_where_the_logits_are_apart():
    each = Departure(5, 30, (7, 8), True)
    assert agreement.gap_fault([]) is None
    assert agreement.gap_fault([(each, agreement.GAP_MAX)]) is None
    said = agreement.gap_fault([(each, 0.1), (each, 3.0)])
    assert "(1 rows" in said
    assert "row 5, response token 30: 7 where the baseline has 8, 3.00 apart" in said


FACTS = {"layers": 4, "hidden_size": 64, "vocab_size": 200, "wrapper": {"open": 90, "close": 91}}
FACTS["thinking_token_ids"] = [90, 91]
VIEW = {"target": {"model": "run/target/model", "layers": 4, "hidden_size": 64, "vocab_size": 200}}


def test_the_target_that_an_engine_saw_is_the_runs_own():
    assert list(agreement.target_faults(VIEW, Path("run/target/model"), FACTS)) == []
    (other,) = agreement.target_faults(VIEW, Path("other/target/model"), FACTS)
    assert "served run/target/model, not other/target/model" in other
    (deeper,) = agreement.target_faults(VIEW, Path("run/target/model"), {**FACTS, "layers": 6})
    assert "layers 4, not the target's 6" in deeper


def answered(row: int, prompt: list[int], ids: list[int]) -> dict:
    return {"row": row, "prompt_token_ids": prompt, "token_ids": ids}


def test_prompts_and_thinking_mode_of_the_data_have_no_fault():
    answers = [answered(0, [1, 2], [90, 5, 91, 6]), answered(1, [3], [90, 5, 91, 6])]
    assert list(agreement.data_faults(answers, {0: [1, 2], 1: [3]}, "thinking", FACTS)) == []


def test_answers_of_another_mode_are_at_fault_and_so_are_other_prompts():
    answers = [answered(0, [1, 90, 91], [5, 6]), answered(1, [3], [5])]
    mode, prompts = agreement.data_faults(answers, {0: [1, 2], 1: [3]}, "thinking", FACTS)
    assert "the answers are 'plain', those trained on 'thinking'" in mode
    assert "{'closed by the template': 1, 'plain': 1}" in mode
    assert "rows [0]: the served prompt's tokens differ" in prompts


def test_a_row_that_was_left_out_of_the_samples_has_no_prompt_to_differ_from():
    assert list(agreement.data_faults([answered(7, [1], [5])], {}, "plain", FACTS)) == []


def test_an_engine_without_the_drafter_is_at_fault():
    (found,) = agreement.engine_faults({"drafter": None, "speculative": None}, None, 3, Path("served.json"))
    assert "without a drafter" in found
