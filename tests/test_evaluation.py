# SPDX-License-Identifier: Apache-2.0
"""What an engine counts is read right, and servers take turns on the same prompts."""

import asyncio
import itertools
import types
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from pilotfish import evaluation, generation
from pilotfish.errors import UserError
from pilotfish.progress import Heartbeat


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


SESSION = evaluation.Session(sampling={"max_tokens": 4}, stall_timeout=60, rest=0)


class Server:
    """An engine that answers row n with n + 1 tokens in one round of one accepted token, and counts as it does."""

    def __init__(self, name: str, seen: list[tuple[str, int]]):
        self.url, self.seen, self.name = f"http://{name}", seen, name
        self.answered = self.under_way = self.most_under_way = 0

    def check_alive(self) -> None:
        """It always is."""

    async def answer(self, row: int) -> dict:
        self.seen.append((self.name, row))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)  # the others of the chunk are asked meanwhile
        self.under_way -= 1
        self.answered += 1
        return {
            "choices": [{"token_ids": [7] * (row + 1), "finish_reason": "stop"}],
            "prompt_token_ids": [1],
            "metrics": {
                "mean_itl_ms": 10.00001 * row if row else None,
                "speculative_decoding": {"per_step_accepted": [1]},
            },
        }


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Server]:
    """Three servers that share one list of what they were asked, in the order in which they were."""
    seen: list[tuple[str, int]] = []
    made = {name: Server(name, seen) for name in ("baseline", "eagle3", "dflash")}

    def metrics(url: str) -> types.SimpleNamespace:
        count = next(each for each in made.values() if url == f"{each.url}/metrics").answered
        page = types.SimpleNamespace(text=metrics_text(count, count, count, [count]))
        return types.SimpleNamespace(raise_for_status=lambda: page)

    async def chat(server: Server, messages: list, sampling: dict, transfer: dict | None, tools: list | None) -> dict:
        assert (sampling, transfer, tools) == (SESSION.sampling, None, None)
        return await server.answer(messages[0])

    # A fast machine answers a chunk in less than what times are rounded to.
    ticks = itertools.count()
    monkeypatch.setattr(evaluation, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(evaluation.httpx, "get", metrics)
    monkeypatch.setattr(generation, "client", lambda server: server)
    monkeypatch.setattr(generation, "chat", chat)
    return made


def prompts(count: int) -> list[dict]:
    return [{"messages": [row]} for row in range(count)]


def measured(servers: dict[str, Server], count: int, concurrency: int) -> dict[str, dict]:
    return asyncio.run(evaluation.measure(servers, prompts(count), concurrency, SESSION))


def test_servers_take_turns_at_each_prompt_and_another_is_first_each_time(servers: dict[str, Server]):
    measured(servers, count=3, concurrency=1)
    assert servers["baseline"].seen == [
        *[("baseline", 0), ("eagle3", 0), ("dflash", 0)],
        *[("eagle3", 1), ("dflash", 1), ("baseline", 1)],
        *[("dflash", 2), ("baseline", 2), ("eagle3", 2)],
    ]


def test_a_chunk_is_asked_at_once_and_no_server_works_in_anothers_turn(servers: dict[str, Server]):
    found = measured(servers, count=5, concurrency=2)
    names = [name for name, _ in servers["baseline"].seen]
    assert names[:6] == ["baseline"] * 2 + ["eagle3"] * 2 + ["dflash"] * 2
    assert {each.most_under_way for each in servers.values()} == {2}
    assert [tokens for _, tokens in found["eagle3"]["chunks"]] == [1 + 2, 3 + 4, 5]


def test_a_measurement_adds_up_the_servers_own_chunks(servers: dict[str, Server]):
    servers["eagle3"].answered = 40  # before it was measured
    found = measured(servers, count=4, concurrency=2)["eagle3"]
    assert found["tokens"] == 1 + 2 + 3 + 4
    assert found["seconds"] == pytest.approx(sum(seconds for seconds, _ in found["chunks"]))
    assert found["tokens_per_second"] == pytest.approx(10 / found["seconds"], rel=0.2)
    assert found["counters"] == counted(4, 4, 4, [4])
    assert [answer["row"] for answer in found["answers"]] == [0, 1, 2, 3]


def test_times_per_token_are_the_engines_own_and_one_token_has_none(servers: dict[str, Server]):
    found = measured(servers, count=3, concurrency=3)["dflash"]
    assert [answer["time_per_output_token_ms"] for answer in found["answers"]] == [None, 10.0, 20.0]
    assert found["time_per_output_token_ms"] == {"p50": 15.0, "p99": 19.9}
    assert {tuple(answer["per_step_accepted"]) for answer in found["answers"]} == {(1,)}


SETS = {"heldout": prompts(3), "humaneval": prompts(2)}


def measurements(folder: Path) -> evaluation.Measurements:
    return evaluation.Measurements(folder / "measured.jsonl", Heartbeat(None, "serve", 0, "answers"))


def test_every_set_is_measured_at_every_level_and_the_request_before_is_not_counted(
    servers: dict[str, Server], tmp_path: Path
):
    kept = measurements(tmp_path)
    evaluation.measure_all(servers, SETS, [1, 8], SESSION, kept)
    assert servers["eagle3"].answered == 1 + 2 * 3 + 2 * 2
    found = {(each, level): kept.of(servers, each, level) for each in SETS for level in (1, 8)}
    assert all(set(measured) == set(servers) for measured in found.values())
    assert found["humaneval", 8]["eagle3"]["counters"]["rounds"] == 2


def test_what_was_measured_is_on_disk_and_is_not_measured_again(servers: dict[str, Server], tmp_path: Path):
    evaluation.measure_all(servers, SETS, [1], SESSION, measurements(tmp_path))
    before = servers["dflash"].answered
    kept = measurements(tmp_path)
    evaluation.measure_all(servers, SETS, [1, 8], SESSION, kept)
    assert servers["dflash"].answered - before == 1 + 3 + 2
    assert kept.of(servers, "heldout", 1)["dflash"]["tokens"] == 1 + 2 + 3
    assert kept.of(["dflash"], "heldout", 1) is None, "alone, it is another measurement"


def test_a_request_whose_connection_was_closed_meanwhile_is_sent_again(servers: dict[str, Server], monkeypatch):
    chat, faults = generation.chat, [openai.APIConnectionError(request=httpx.Request("POST", "http://eagle3"))]

    async def closed_once(server: Server, *rest) -> dict:
        if server.name == "eagle3" and faults:
            raise faults.pop()
        return await chat(server, *rest)

    monkeypatch.setattr(generation, "chat", closed_once)
    assert measured(servers, count=2, concurrency=1)["eagle3"]["counters"]["rounds"] == 2


def test_a_refused_prompt_is_named(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_) -> dict:
        raise generation.RowRefused("too long")

    monkeypatch.setattr(generation, "chat", refuse)
    with pytest.raises(UserError, match="row 0 was refused while serving: too long"):
        measured(servers, count=1, concurrency=1)
