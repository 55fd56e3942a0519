# SPDX-License-Identifier: Apache-2.0
"""Finished rows survive whatever ends a job, and bulk requests end at once when they cannot go on."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from helpers import flip_bit, random_ids, random_states, response
from pilotfish import files, generation, shards
from pilotfish.errors import UserError
from pilotfish.generation import Journal

LAYERS = [1, 3]
ROWS = range(8, 18)  # shards 8-11, 12-15 and 16-17


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 4)


def answer(row: int) -> dict:
    return response(row, random_ids(3, row), random_ids(2 + row % 4, 50 + row))


def write_states(path: Path, ids: list[int], layers: int = len(LAYERS)) -> None:
    states = random_states(ids, layers, hidden=8)
    save_file({"token_ids": states.token_ids, "hidden_states": states.hidden_states}, path)


def finish(journal: Journal, rows, text: str | None = None) -> None:
    """Do rows as a job does them: the engine writes a states file, then the row is journaled."""
    for row in rows:
        made = answer(row)
        made["text"] = text or made["text"]
        write_states(journal.incoming / f"r{row}", (made["prompt_token_ids"] + made["token_ids"])[:-1])
        journal.finish(made, f"r{row}")


def opened(folder: Path, layers: list[int] = LAYERS) -> Journal:
    return Journal(folder, ROWS, layers)


def indexed_rows(journal: Journal) -> list[int]:
    journal.write_index()
    entries = files.read_json(journal.captured / shards.INDEX)["shards"]
    return [row for entry in entries for row in entry["rows"]]


def test_the_next_job_finds_the_finished_rows(tmp_path: Path):
    finish(opened(tmp_path), [14, 8, 10, 9, 11])
    journal = opened(tmp_path)
    assert journal.rows() == [answer(row) for row in (8, 9, 10, 11, 14)]


def test_when_all_rows_are_finished_only_shards_are_left(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, reversed(ROWS))
    assert list(journal.incoming.iterdir()) == []
    assert journal.rows() == [answer(row) for row in ROWS]
    assert indexed_rows(journal) == list(ROWS)
    assert sorted(path.name for path in journal.captured.iterdir()) == [
        "index.json",
        *(shards.shard_name(*span) for span in [(8, 12), (12, 16), (16, 18)]),
    ]


def test_shards_hold_the_states_of_their_rows(tmp_path: Path):
    finish(opened(tmp_path), range(8, 11))
    journal = opened(tmp_path)
    finish(journal, range(11, 18))
    journal.write_index()
    reader = shards.ShardReader([journal.captured / shards.INDEX])
    for row in ROWS:
        ids = (answer(row)["prompt_token_ids"] + answer(row)["token_ids"])[:-1]
        states = reader.read(row)
        assert states.token_ids.tolist() == ids
        assert torch.equal(states.hidden_states, random_states(ids, 2, 8).hidden_states)


def cut_within_a_character(line: bytes) -> int:
    return line.index("é".encode()) + 1


@pytest.mark.parametrize("cut", [lambda line: 1, lambda line: len(line) - 2, cut_within_a_character])
def test_a_last_line_cut_short_costs_its_row_alone(tmp_path: Path, cut: Callable[[bytes], int]):
    finish(opened(tmp_path), [8, 9, 10], text="é")
    path = tmp_path / "rows.jsonl"
    *before, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + last[: cut(last)])
    assert sorted(opened(tmp_path).done) == [8, 9]


@pytest.mark.parametrize("lost", [1, 20], ids=["the line's end", "half a line"])
def test_what_is_finished_after_a_line_cut_short_is_kept(tmp_path: Path, lost: int):
    finish(opened(tmp_path), [8, 9, 10])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    journal = opened(tmp_path)
    finish(journal, [row for row in (8, 9, 10, 12) if row not in journal.done])
    assert sorted(opened(tmp_path).done) == [8, 9, 10, 12]


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b", "a\x1cb", "a\r\nb"], ids=ascii)
def test_any_text_survives_the_journal(tmp_path: Path, text: str):
    finish(opened(tmp_path), [8], text=text)
    assert [row["text"] for row in opened(tmp_path).rows()] == [text]


def other_ids(path: Path) -> None:
    write_states(path, [1, 2, 3])


def one_layer_less(path: Path) -> None:
    ids = (answer(9)["prompt_token_ids"] + answer(9)["token_ids"])[:-1]
    write_states(path, ids, layers=1)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), other_ids, one_layer_less]
)
def test_a_row_without_whole_states_is_done_again_alone(tmp_path: Path, damage: Callable[[Path], object]):
    finish(opened(tmp_path), [8, 9, 10])
    damage(tmp_path / "incoming" / "r9")
    journal = opened(tmp_path)
    assert sorted(journal.done) == [8, 10]
    finish(journal, [9, 11])
    assert indexed_rows(journal) == [8, 9, 10, 11]


def test_one_flipped_bit_in_a_shard_makes_exactly_its_rows_be_done_again(tmp_path: Path):
    finish(opened(tmp_path), ROWS)
    flip_bit(tmp_path / "captured" / shards.shard_name(12, 16))
    journal = opened(tmp_path)
    assert [row for row in ROWS if row not in journal.done] == [12, 13, 14, 15]
    finish(journal, [12, 13, 14, 15])
    assert indexed_rows(journal) == list(ROWS)
    assert sorted(opened(tmp_path).done) == list(ROWS)


@pytest.mark.parametrize("finished", [range(8, 12), range(8, 11)], ids=["a whole shard", "unfinished shard"])
@pytest.mark.parametrize("layers", [[1, 2], [1, 2, 3]], ids=str)
def test_states_of_other_layers_are_not_believed(tmp_path: Path, finished: range, layers: list[int]):
    finish(opened(tmp_path), finished)
    assert opened(tmp_path, layers).done == {}


def refuse(journal: Journal, row: int) -> None:
    journal.finish(generation.failed_row(row, {"id": f"p{row}"}, "too long"), "")


def test_a_refused_row_is_kept_and_its_shard_is_written_without_it(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, [8, 9, 11])
    refuse(journal, 10)
    assert [(row["row"], row["error"]) for row in journal.rows()] == [
        *[(8, None), (9, None), (10, "too long"), (11, None)]
    ]
    assert indexed_rows(journal) == [8, 9, 11]
    assert list(journal.incoming.iterdir()) == []


def test_the_next_job_tries_refused_rows_again_and_only_them(tmp_path: Path):
    first = opened(tmp_path)
    finish(first, [8, 9, 11])
    refuse(first, 10)
    assert sorted(opened(tmp_path).done) == [8, 9, 11]


def test_a_refused_row_that_is_answered_later_gets_into_a_shard(tmp_path: Path):
    first = opened(tmp_path)
    finish(first, [8, 9, 11])
    refuse(first, 10)
    journal = opened(tmp_path)
    finish(journal, [10])
    journal.pack_all()
    assert sorted(indexed_rows(journal)) == [8, 9, 10, 11]
    assert list(journal.incoming.iterdir()) == []


def test_a_job_that_died_between_a_shard_and_its_journal_loses_no_row(tmp_path: Path, monkeypatch):
    journal = opened(tmp_path)
    finish(journal, [8, 9, 10])
    append = journal._append

    def die(name: str, value: dict) -> None:
        if name == "shards.jsonl":
            raise KeyboardInterrupt
        append(name, value)

    monkeypatch.setattr(journal, "_append", die)
    with pytest.raises(KeyboardInterrupt):
        finish(journal, [11])
    journal = opened(tmp_path)
    assert sorted(journal.done) == [8, 9, 10, 11]
    journal.pack_all()
    assert indexed_rows(journal) == [8, 9, 10, 11]


def test_files_that_belong_to_no_finished_row_are_removed(tmp_path: Path):
    journal = opened(tmp_path)
    finish(journal, [8])
    write_states(journal.incoming / "of-a-request-cut-short", [1, 2])
    assert [path.name for path in opened(tmp_path).incoming.iterdir()] == ["r8"]


def test_states_that_fit_the_request_are_taken(tmp_path: Path):
    write_states(tmp_path / "s", [4, 5, 6])
    states = asyncio.run(generation.take_states(tmp_path / "s", [4, 5, 6]))
    assert torch.equal(states.hidden_states, random_states([4, 5, 6], 2, 8).hidden_states)


@pytest.mark.parametrize(
    ("held", "rows", "message"),
    [
        ([4, 5, 7], 3, "not this request's"),
        ([4, 5], 2, "not this request's"),
        ([4, 5, 6], 2, "2 states for 3 tokens; is prefix caching on"),
    ],
)
def test_states_that_do_not_fit_the_request_are_an_error(tmp_path: Path, held, rows: int, message: str):
    save_file({"token_ids": torch.tensor(held), "hidden_states": torch.zeros(rows, 2, 8)}, tmp_path / "s")
    with pytest.raises(UserError, match=f"{tmp_path}/s: .*{message}"):
        asyncio.run(generation.take_states(tmp_path / "s", [4, 5, 6]))


def test_states_that_never_come_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "FILE_TIMEOUT", 0)
    with pytest.raises(UserError, match=f"{tmp_path}/s: the engine wrote no hidden states"):
        asyncio.run(generation.take_states(tmp_path / "s", [4]))


class StandIn:
    """What bulk requests need of an engine; `dies` is its error from the first look at it on."""

    log = Path("engine.log")

    def __init__(self, dies: str | None = None):
        self.dies = dies

    def check_alive(self) -> None:
        if self.dies:
            raise UserError(self.dies)

    def tail(self) -> str:
        return "  | the last line"


def run_rows(engine: StandIn, rows, do_row, at_once: int = 4, stall_timeout: int = 60) -> None:
    asyncio.run(generation.run_rows(engine, rows, do_row, at_once=at_once, stall_timeout=stall_timeout))


def clock(*readings: float) -> SimpleNamespace:
    """A time module whose monotonic clock shows the readings, then stays at the last."""
    left = list(readings)
    return SimpleNamespace(monotonic=lambda: left.pop(0) if len(left) > 1 else left[0])


def test_rows_and_tokens_of_concurrent_rows_are_all_counted(caplog, monkeypatch):
    async def do_row(row: int) -> int:
        for _ in range(row % 5):
            await asyncio.sleep(0)
        return row

    monkeypatch.setattr(generation, "time", clock(0.0, 1.0))
    caplog.set_level("INFO", "pilotfish.generation")
    run_rows(StandIn(), range(50), do_row, at_once=7)
    assert caplog.messages[-1] == f"50 of 50 rows, {sum(range(50))} tokens/s, about 0 s left"


def test_as_many_rows_run_together_as_asked_and_in_order():
    under_way, most, begun = set(), [], []

    async def do_row(row: int) -> int:
        begun.append(row)
        under_way.add(row)
        most.append(len(under_way))
        await asyncio.sleep(0)
        under_way.remove(row)
        return 1

    run_rows(StandIn(), range(20), do_row, at_once=3)
    assert begun == list(range(20))
    assert max(most) == 3


class Stuck:
    """Rows that never finish, and that note how they ended."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    async def __call__(self, row: int) -> int:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise


def test_the_death_of_the_engine_ends_rows_under_way():
    stuck = Stuck()
    with pytest.raises(UserError, match="it died"):
        run_rows(StandIn(dies="it died"), range(3), stuck)
    assert sorted(stuck.cancelled) == [0, 1, 2]


def test_the_fault_of_one_row_cancels_the_rest():
    stuck = Stuck()

    async def do_row(row: int) -> int:
        if row == 1:
            raise UserError("row 1 is bad")
        return await stuck(row)

    with pytest.raises(UserError, match="row 1 is bad"):
        run_rows(StandIn(), range(9), do_row, at_once=3)
    assert {0, 2} <= set(stuck.cancelled)


def test_a_stall_ends_with_the_count_and_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "time", clock(0.0, 8.0))
    with pytest.raises(UserError, match=r"stall_timeout = 7 s \(0 of 2 done\).*\n  \| the last line"):
        run_rows(StandIn(), range(2), Stuck(), stall_timeout=7)


REQUEST = httpx.Request("POST", "http://127.0.0.1")
UNREACHABLE = openai.APIConnectionError(request=REQUEST)
SERVER_ERROR = openai.InternalServerError("oops", response=httpx.Response(500, request=REQUEST), body=None)


def with_retries(faults: list[Exception], engine: StandIn) -> int:
    """Attempts that were needed when each of `faults` is raised once."""
    attempts = iter([*faults, None])
    made = 0

    async def attempt() -> int:
        nonlocal made
        made += 1
        if fault := next(attempts):
            raise fault
        return made

    return asyncio.run(generation.with_retries(5, attempt, engine))


@pytest.mark.parametrize("faults", [[], [UNREACHABLE], [SERVER_ERROR, UNREACHABLE]], ids=len)
def test_a_passing_fault_is_tried_again(faults: list[Exception]):
    assert with_retries(faults, StandIn()) == len(faults) + 1


def test_a_lasting_fault_names_the_row():
    with pytest.raises(UserError, match="row 5: 3 attempts failed, the last with: oops"):
        with_retries([UNREACHABLE, SERVER_ERROR, SERVER_ERROR], StandIn())


def test_no_second_attempt_is_made_on_a_dead_engine():
    with pytest.raises(UserError, match="it died"):
        with_retries([UNREACHABLE], StandIn(dies="it died"))


def test_a_refusal_is_not_tried_again():
    with pytest.raises(generation.RowRefused):
        with_retries([generation.RowRefused("too long")], StandIn())


SAMPLING = {
    "max_tokens": 9,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 3,
    "chat_template_kwargs": {"enable_thinking": False},
}


def chat(reply: httpx.Response, transfer: dict | None = None) -> tuple[dict, dict]:
    """The request that is sent, and the answer that comes back for `reply`."""
    sent = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return reply

    async def ask() -> dict:
        http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        api = openai.AsyncOpenAI(base_url="http://x/v1", api_key="none", max_retries=0, http_client=http)
        return await generation.chat(api, [{"role": "user", "content": "hi"}], SAMPLING, transfer)

    answered = asyncio.run(ask())
    return sent[0], answered


def test_a_request_spells_out_every_sampling_parameter_and_asks_for_token_ids():
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [3], "message": {"role": "assistant"}}
    reply = {"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    request, answered = chat(httpx.Response(200, json=reply), {"include_output_tokens": True})
    assert request == {
        "model": generation.SERVED_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        **SAMPLING,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    assert answered["choices"][0]["token_ids"] == [3]


@pytest.mark.parametrize("status", [400, 422])
def test_a_request_that_the_engine_will_not_do_is_a_refusal(status: int):
    with pytest.raises(generation.RowRefused, match="too long"):
        chat(httpx.Response(status, json={"message": "too long"}))
