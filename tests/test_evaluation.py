# SPDX-License-Identifier: Apache-2.0
"""What was served is counted right, and compared only where two responses share their tokens."""

import copy
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from pilotfish import evaluation


def metrics_text(
    rounds: int, drafted: int, accepted: int, positions: list[int], engines: tuple[str, ...] = ("0",)
) -> str:
    """The part of /metrics that vLLM's SpecDecodingProm writes, in prometheus_client's own format."""
    registry, labels = CollectorRegistry(), ["model_name", "engine"]
    values = {"num_drafts": rounds, "num_draft_tokens": drafted, "num_accepted_tokens": accepted}
    values = {f"vllm:spec_decode_{name}": value for name, value in values.items()}
    for name, value in {**values, "vllm:generation_tokens": 12345}.items():
        counter = Counter(name, "text", labels, registry=registry)
        for engine in engines:
            counter.labels("target", engine).inc(value)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    counter = Counter(name, "text", [*labels, "position"], registry=registry)
    for engine in engines:
        for position, value in enumerate(positions):
            counter.labels("target", engine, str(position)).inc(value)
    return generate_latest(registry).decode()


def counted(rounds: int, drafted: int, accepted: int, positions: list[int]) -> dict:
    keys = ("rounds", "drafted", "accepted", "accepted_per_position")
    return dict(zip(keys, (rounds, drafted, accepted, positions), strict=True))


def test_counters_are_read_from_what_vllm_writes():
    text = metrics_text(40, 120, 55, [30, 20, 5])
    assert "vllm:spec_decode_num_drafts_created" in text
    assert evaluation.counters(text) == counted(40, 120, 55, [30, 20, 5])


def test_positions_are_in_the_order_of_numbers_not_of_words():
    positions = list(range(12, 0, -1))
    assert evaluation.counters(metrics_text(12, 144, 78, positions))["accepted_per_position"] == positions


def test_engines_that_share_a_page_are_added_up():
    text = metrics_text(40, 120, 55, [30, 20, 5], engines=("0", "1"))
    assert evaluation.counters(text) == counted(80, 240, 110, [60, 40, 10])


def test_without_a_drafter_the_counters_are_zero():
    assert evaluation.counters("# nothing\n") == counted(0, 0, 0, [])


def test_a_measurement_is_the_difference_of_two_readings():
    after, before = counted(40, 120, 55, [30, 20, 5]), counted(10, 30, 15, [8, 5, 2])
    assert evaluation.difference(after, before) == counted(30, 90, 40, [22, 15, 3])


def test_a_reading_before_the_first_draft_counts_as_zeros():
    after = counted(40, 120, 55, [30, 20, 5])
    assert evaluation.difference(after, counted(0, 0, 0, [])) == after


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
    assert evaluation.common_prefix(left, right) == evaluation.common_prefix(right, left) == shared


def served(row: int, token_ids: list[int], accepted: list[int]) -> dict:
    return {"row": row, "token_ids": token_ids, "per_step_accepted": accepted}


def test_identical_responses_are_counted_by_row():
    left, right = [served(0, [1, 2], []), served(1, [3], [])], [served(0, [1, 2], []), served(1, [4], [])]
    assert evaluation.identical(left, right) == 1


TEN = list(range(100, 110))


def test_identical_texts_with_equal_rounds_are_in_parity():
    """Starts 0, 3, 4, 6; the last round's bonus would be the eleventh token, so it counts on neither side."""
    found = evaluation.parity([served(5, TEN, [2, 0, 1, 3])], {5: TEN}, {5: [(0, 2), (3, 0), (4, 1)]}, k=3)
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
    found = evaluation.parity(answers, {0: TEN}, {0: [(0, 2), (3, 1), (5, 0), (6, 1)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (2, 3)
    assert found["tau_difference"] == pytest.approx(5 / 3 - 4 / 4)


@pytest.mark.parametrize(("shared", "compared"), [(10, 4), (9, 3), (7, 3), (6, 2), (4, 1), (3, 0)])
def test_texts_that_part_midway_are_compared_where_the_bonus_token_is_shared(shared: int, compared: int):
    """Rounds start at 0, 3, 4, 6; their bonus tokens are those at 3, 4, 6 and 9."""
    stored = TEN[:shared] + [1] * (10 - shared)
    rounds = [(0, 2), (3, 0), (4, 1), (6, 2)]
    found = evaluation.parity([served(0, TEN, [2, 0, 1, 2])], {0: stored}, {0: rounds}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (compared, compared)
    assert found["tau_difference"] == (0 if compared else None)
    assert found["rounds_served"] == 4


def test_rows_without_a_stored_response_are_left_out():
    answers = [served(0, TEN, [2, 0]), served(1, TEN, [3, 3])]
    found = evaluation.parity(answers, {0: TEN}, {0: [(0, 2), (3, 0)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (2, 2)


@pytest.mark.parametrize("stored", [{}, {0: [1, *TEN]}], ids=["nothing stored", "nothing shared"])
def test_without_a_comparable_round_there_is_no_difference(stored: dict):
    found = evaluation.parity([served(0, TEN, [2, 0])], stored, {0: [(0, 2), (3, 0)]}, k=3)
    assert found == {
        "rounds_compared": 0,
        "rounds_equal": 0,
        "rounds_served": 2,
        "tau_difference": None,
    }


def test_a_replay_whose_only_round_runs_past_the_shared_tokens_has_no_round_in_common():
    found = evaluation.parity([served(0, TEN, [1])], {0: [*TEN[:3], 1, 1, 1]}, {0: [(0, 3)]}, k=3)
    assert (found["rounds_equal"], found["rounds_compared"]) == (0, 1)


SOUND = {
    "counters": counted(4, 12, 5, [3, 2, 0]),
    "answers": [served(0, TEN, [2, 0, 1]), served(1, TEN, [2])],
}


def test_counters_that_agree_with_the_requests_have_no_fault():
    assert evaluation.counter_faults(SOUND, "here") == []


@pytest.mark.parametrize(
    ("counters", "accepted", "fault"),
    [
        ({"drafted": 4}, [2], "5 tokens accepted, only 4 drafted"),
        ({"accepted_per_position": [2, 3, 0]}, [2], r"accepted per position \[2, 3, 0\] does not fall"),
        ({"rounds": 5}, [2], "counters and its requests disagree"),
        ({"accepted": 6}, [2], "counters and its requests disagree"),
        ({}, [1], "counters and its requests disagree"),
        ({}, [2, 0], "counters and its requests disagree"),
    ],
)
def test_each_inconsistency_is_found_alone(counters: dict, accepted: list[int], fault: str):
    measured = copy.deepcopy(SOUND)
    measured["counters"] |= counters
    measured["answers"][1]["per_step_accepted"] = accepted
    (found,) = evaluation.counter_faults(measured, "here")
    assert re.match(f"here: .*{fault}", found)


def test_an_engine_that_drafted_nothing_is_at_fault():
    idle = {"counters": counted(0, 0, 0, [0, 0, 0]), "answers": [served(0, TEN, [])]}
    (found,) = evaluation.counter_faults(idle, "here")
    assert found == "here: the engine drafted nothing; was the drafter loaded?"
