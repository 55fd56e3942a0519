# SPDX-License-Identifier: Apache-2.0
"""What an engine counts is read right."""

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
