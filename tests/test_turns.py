# SPDX-License-Identifier: Apache-2.0
"""A conversation is trained on turn by turn, on answers that the target gives anew."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from conftest import CONFIG, REPOSITORY
from helpers import source_of
from pilotfish import evaluation_sets, files, formats, prompts, turns


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def anew(text: str = "") -> dict:
    return {**said(text), turns.ANEW: True}


SYSTEM = {"role": "system", "content": "Be kind."}
LONG = {"id": "a", "conversation": "c", "messages": [SYSTEM, user("1"), said("one"), user("2"), said("two"), user("3")]}
SPEC_BENCH = formats.prompt_of({"question_id": "q", "turns": ["1", "2"]}, 1)


def test_each_turn_of_the_user_is_a_row_of_the_conversation():
    found = turns.expanded(LONG)
    assert [row["id"] for row in found] == ["a/1", "a/2", "a/3"]
    assert {row["conversation"] for row in found} == {"c"}
    assert [row["messages"] for row in found] == [
        [SYSTEM, user("1")],
        [SYSTEM, user("1"), anew("one"), user("2")],
        [SYSTEM, user("1"), anew("one"), user("2"), anew("two"), user("3")],
    ]
    assert [prompts.fault(row) for row in found] == [None] * 3


def test_one_turn_stays_what_it_is():
    prompt = {"id": "a", "messages": [SYSTEM, user("1")]}
    assert turns.expanded(prompt) == [prompt]


def test_without_the_datas_answers_conversations_that_ask_the_same_are_the_same():
    last = turns.unanswered(turns.expanded(LONG)[-1])["messages"]
    assert last == [SYSTEM, user("1"), anew(), user("2"), anew(), user("3")]
    assert turns.given(turns.expanded(LONG)[-1])["messages"] == LONG["messages"]


def test_an_answer_that_the_data_lack_is_no_fault_where_the_target_gives_it():
    assert SPEC_BENCH["messages"] == [user("1"), anew(), user("2")]
    assert prompts.fault(SPEC_BENCH) is None
    assert turns.lacks_answers(SPEC_BENCH) and not turns.lacks_answers(LONG)
    assert "message 2 has empty" in prompts.fault({"id": "q", "messages": [user("1"), said(""), user("2")]})


def asked_of(rows: list[dict], part: range, refused: int | None = None, done: dict | None = None) -> tuple[dict, list]:
    """What is sent for each row, all rows at once, and what is asked beside them; each last turn gets an answer."""
    beside = []

    async def ask(messages: list[dict], row: int, back: int) -> str:
        beside.append((row, back, messages[-1]["content"]))
        return f"answer to {messages[-1]['content']}"

    async def run() -> dict:
        earlier = turns.Answers({row: rows[row] for row in part}, ask, done or {})
        sent = {}

        async def do(row: int) -> None:
            sent[row] = await earlier.messages(row)
            earlier.finished(row, None if row == refused else f"answer to {sent[row][-1]['content']}")

        await asyncio.wait_for(asyncio.gather(*map(do, part), return_exceptions=refused is not None), 60)
        return sent

    return asyncio.run(run()), beside


ROWS = [turns.unanswered(row) for row in (*turns.expanded(LONG), *turns.expanded(SPEC_BENCH))]
WHOLE = [SYSTEM, user("1"), said("answer to 1"), user("2"), said("answer to 2"), user("3")]


def test_a_turn_is_asked_with_what_the_target_said_before():
    sent, beside = asked_of(ROWS, range(5))
    assert sent[2] == WHOLE
    assert sent[1] == WHOLE[:4]
    assert sent[4] == WHOLE[1:4]
    assert beside == []


def test_turns_that_another_job_has_are_asked_beside_it():
    sent, beside = asked_of(ROWS, range(2, 5))
    assert sent[2] == WHOLE
    assert beside == [(2, 2, "1"), (2, 1, "2")]


def test_what_an_earlier_job_has_answered_is_gone_on_with():
    sent, beside = asked_of(ROWS, range(5), done={0: "as before"})
    assert sent[1] == [SYSTEM, user("1"), said("as before"), user("2")]
    assert beside == []


def test_after_a_refused_turn_the_later_ones_are_refused_too():
    sent, _ = asked_of(ROWS, range(5), refused=0)
    assert sent.keys() == {0, 3, 4}


def test_a_row_that_comes_before_its_earlier_turn_does_not_wait_for_it():
    rows = [ROWS[1], ROWS[0]]
    sent, beside = asked_of(rows, range(2))
    assert sent[0] == WHOLE[:4]
    assert beside == [(0, 1, "1")]


def collected(tmp_path: Path, rows: list[dict], train: int, heldout: int, how: str) -> tuple[list, list] | str:
    """Rows of both splits, or what the script says."""
    files.write_jsonl(tmp_path / "p.jsonl", rows)
    spec = {"train": train, "heldout": heldout, "seed": 0, "max_model_len": 640, "answers": how}
    spec["sources"] = [source_of(tmp_path / "p.jsonl", weight=1.0)]
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("train", "heldout")}
    line = [sys.executable, str(REPOSITORY / "scripts" / "collect_prompts.py"), "--spec", json.dumps(spec)]
    line += [f"--{name}={path}" for name, path in paths.items()]
    done = subprocess.run(line, capture_output=True, text=True)
    return done.stderr if done.returncode else tuple(files.read_jsonl(path) for path in paths.values())


CONVERSATIONS = [
    {"id": str(n), "messages": [user(f"{n} one"), said("first"), user(f"{n} two"), said("second")]} for n in range(9)
]


def test_training_rows_have_their_turns_and_heldout_ones_the_datas_answers(tmp_path: Path):
    train, heldout = collected(tmp_path, CONVERSATIONS, 12, 4, "anew")
    assert [row["id"].split("/")[1] for row in train] == ["1", "2"] * 6
    assert all(row["messages"][1] == anew() for row in train[1::2])
    assert [row["messages"][1:2] for row in heldout] == [[], [said("first")]] * 2


def test_with_the_datas_answers_a_conversation_is_one_row(tmp_path: Path):
    train, heldout = collected(tmp_path, CONVERSATIONS, 5, 4, "last")
    assert [len(row["messages"]) for row in (*train, *heldout)] == [3] * 9
    assert not any("answer" in row for row in (*train, *heldout))


def test_each_answer_that_the_data_give_is_a_row_and_of_heldout_ones_none_is(tmp_path: Path):
    train, heldout = collected(tmp_path, CONVERSATIONS, 10, 4, "given")
    assert [row["id"].split("/")[1] for row in train] == ["1", "2"] * 5
    assert [row["answer"] for row in train] == [said("first"), said("second")] * 5
    assert [len(row["messages"]) for row in (*train, *heldout)] == [1, 3] * 7
    assert not any("answer" in row for row in heldout)


def test_a_row_without_an_answer_to_keep_is_bad(tmp_path: Path):
    rows = [{"id": "a", "messages": [user("1"), said("one")]}, {"id": "b", "messages": [user("1")]}]
    told = collected(tmp_path, rows, 1, 1, "given")
    assert "p.jsonl, line 2: its data have no answer to keep; set prompts.answers to `anew`" in told


def test_a_call_of_a_tool_and_what_follows_its_answer_are_rows():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    told = {"role": "tool", "content": "4"}
    row = {"id": "a", "messages": [user("2 + 2?"), call, told], "answer": said("Four.")}
    assert [(len(each["messages"]), each["answer"]) for each in turns.each_answer(row)] == [
        (1, call),
        (3, said("Four.")),
    ]


def test_turns_without_answers_are_trained_on_and_their_first_is_held_out(tmp_path: Path):
    rows = [{"question_id": n, "turns": [f"{n} one", f"{n} two"]} for n in range(9)]
    train, heldout = collected(tmp_path, rows, 10, 4, "anew")
    assert [len(row["messages"]) for row in train] == [1, 3] * 5
    assert [len(row["messages"]) for row in heldout] == [1] * 4
    assert "line 1: its data have no answers between its turns" in collected(tmp_path, rows, 5, 4, "last")


def test_of_an_evaluation_set_without_answers_the_first_turn_is_asked(tmp_path: Path):
    files.write_jsonl(tmp_path / "p.jsonl", [{"question_id": 1, "turns": ["one", "two"]}])
    spec = {**source_of(tmp_path / "p.jsonl"), "prompts": 1, "seed": 0, "max_model_len": 640}
    assert evaluation_sets.collect("mt", spec) == [{"id": "1", "messages": [user("one")]}]


def test_the_default_has_the_target_answer_anew():
    assert "answers" not in CONFIG["prompts"]
