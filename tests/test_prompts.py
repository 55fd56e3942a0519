# SPDX-License-Identifier: Apache-2.0
"""Prompts of the right shape, split so that no conversation is on both sides."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from helpers import read_prompts, source_of
from pilotfish import prompts, turns
from pilotfish.errors import UserError

LONGEST = 100  # tokens


def messages(*turns: str) -> list[dict]:
    """Messages out of `role` or `role=content`."""
    pairs = (turn.partition("=") for turn in turns)
    return [{"role": role, "content": content or "words"} for role, _, content in pairs]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": ""}


@pytest.mark.parametrize(
    "told",
    [
        [*messages("user"), CALL, RESULT],
        [*messages("system", "user"), CALL, RESULT, RESULT, *messages("assistant", "user")],
        [*messages("user"), CALL, RESULT, CALL, RESULT],
    ],
)
def test_tools_and_what_they_answered_go_with_a_prompt_unchanged(tmp_path: Path, told: list[dict]):
    row = {"id": "a", "messages": told, "tools": TOOLS}
    assert prompts.fault(row) is None
    assert read_prompts(write(tmp_path / "p.jsonl", row), LONGEST) == [row]
    assert turns.expanded(row) == [row]


def test_tools_count_towards_the_length(tmp_path: Path):
    long = [{"type": "function", "function": {"name": "a" * 16 * LONGEST}}]
    path = write(tmp_path / "p.jsonl", {"id": "a", "messages": messages("user"), "tools": long})
    with pytest.raises(UserError, match=r"bytes of text are too many for engine\.max_model_len"):
        read_prompts(path, LONGEST)


@pytest.mark.parametrize(
    "roles", [["user"], ["system", "user"], ["user", "assistant", "user"], ["system", "user", "assistant", "user"]]
)
@pytest.mark.parametrize("identifier", ["a", 7, 0])
def test_turns_that_alternate_and_end_with_the_user_are_right(identifier: object, roles: list[str]):
    assert prompts.fault({"id": identifier, "messages": messages(*roles)}) is None


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"messages": messages("user")}, "`id` is missing"),
        ({"id": None, "messages": messages("user")}, "`id` is missing"),
        ({"id": True, "messages": messages("user")}, "neither text nor a number"),
        ({"id": 1.5, "messages": messages("user")}, "neither text nor a number"),
        ({"id": 1}, "`messages` is missing"),
        ({"id": 1, "messages": []}, "`messages` is missing, empty"),
        ({"id": 1, "messages": "hello"}, "not a list"),
        ({"id": 1, "messages": ["hello"]}, "message 1 has no role"),
        ({"id": 1, "messages": messages("user", "robot", "user")}, "message 2 has no role among system, user"),
        ({"id": 1, "messages": messages("user", "tool", "user")}, "`tool` comes after `tool_calls` of the assistant"),
        ({"id": 1, "messages": messages("user", "assistant", "tool")}, "`tool` comes after `tool_calls`"),
        ({"id": 1, "messages": [*messages("user"), CALL, *messages("user")]}, "found user, assistant, user"),
        ({"id": 1, "messages": [*messages("user"), CALL]}, "end with user (found user, assistant)"),
        ({"id": 1, "messages": [*messages("user"), {**CALL, "tool_calls": []}]}, "message 2 has empty"),
        ({"id": 1, "messages": [*messages("user"), CALL, {"role": "tool", "content": 7}]}, "message 3 has empty"),
        ({"id": 1, "messages": messages("user"), "tools": "search"}, "`tools` is not a list of objects"),
        ({"id": 1, "messages": messages("user"), "tools": ["search"]}, "`tools` is not a list of objects"),
        ({"id": 1, "messages": [{"role": ["user"], "content": "x"}]}, "message 1 has no role"),
        ({"id": 1, "messages": messages("user= \n")}, "message 1 has empty or non-text `content`"),
        ({"id": 1, "messages": [{"role": "user"}]}, "message 1 has empty or non-text `content`"),
        ({"id": 1, "messages": [{"role": "user", "content": [{"text": "x"}]}]}, "message 1 has empty or non-text"),
        ({"id": 1, "messages": messages("user", "assistant")}, "end with user (found user, assistant)"),
        ({"id": 1, "messages": messages("assistant", "user")}, "roles must alternate"),
        ({"id": 1, "messages": messages("user", "user")}, "roles must alternate"),
        ({"id": 1, "messages": messages("user", "system", "user")}, "roles must alternate"),
        ({"id": 1, "messages": messages("system")}, "(found none)"),
    ],
)
def test_each_fault_of_shape_has_its_reason(prompt: dict, reason: str):
    assert reason in prompts.fault(prompt)


def test_ids_become_text_and_further_keys_are_left_behind(tmp_path: Path):
    path = write(
        tmp_path / "p.jsonl",
        {"id": 7, "messages": messages("user"), "license": "MIT"},
        {"id": "b", "messages": messages("user"), "conversation": 3},
    )
    assert read_prompts(path, LONGEST) == [
        {"id": "7", "messages": messages("user")},
        {"id": "b", "messages": messages("user"), "conversation": "3"},
    ]


def test_a_prompt_of_the_wrong_shape_is_an_error_with_line_and_cure(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", {"id": 1, "messages": messages("user")}, {"id": 2, "words": "x"})
    with pytest.raises(UserError) as error:
        read_prompts(path, LONGEST)
    assert str(error.value).startswith(f"{path}, line 2: `messages` is missing")
    assert 'each row needs {"id": ..., "messages":' in str(error.value)


@pytest.mark.parametrize("again", ["1", 1])
def test_a_repeated_id_names_both_lines(tmp_path: Path, again: object):
    rows = [{"id": identifier, "messages": messages("user")} for identifier in (1, 2, again)]
    path = write(tmp_path / "p.jsonl", *rows)
    with pytest.raises(UserError, match=r"line 3: id '1' was used before, by .*p\.jsonl, line 1"):
        read_prompts(path, LONGEST)


def test_a_file_without_prompts_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="no prompts in it; each row needs"):
        read_prompts(write(tmp_path / "p.jsonl"), LONGEST)


def test_a_lone_surrogate_which_no_file_can_hold_is_an_error_with_its_line(tmp_path: Path):
    good = {"id": 1, "messages": messages("user")}
    path = write(tmp_path / "p.jsonl", good, {"id": 2, "messages": messages("user=half an emoji \ud83d")})
    with pytest.raises(UserError, match="line 2"):
        read_prompts(path, LONGEST)


@pytest.mark.parametrize("more", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
def test_lines_may_end_as_on_any_system(tmp_path: Path, more: bytes):
    rows = [{"id": str(n), "messages": messages(f"user=line {n}\nand another")} for n in range(3)]
    path = write(tmp_path / "p.jsonl", *rows)
    path.write_bytes(path.read_bytes().replace(b"\n", more))
    assert read_prompts(path, LONGEST) == rows


@pytest.mark.parametrize(("text", "size"), [("a", 1601), ("é", 1602)])
def test_a_prompt_far_longer_than_the_context_is_an_error_with_its_line_and_the_cure(
    tmp_path: Path, text: str, size: int
):
    good = {"id": 1, "messages": messages("user=" + "a" * 1600)}
    content = text * (size // len(text.encode()))
    path = write(tmp_path / "p.jsonl", good, {"id": 2, "messages": messages(f"user={content}")})
    with pytest.raises(UserError) as error:
        read_prompts(path, LONGEST)
    assert str(error.value) == (
        f"{path}, line 2: {size:,} bytes of text are too many for engine.max_model_len = 100 tokens; "
        "shorten or remove the prompt, or raise the setting"
    )


def test_all_turns_count_towards_the_length(tmp_path: Path):
    turns = messages("user=" + "a" * 800, "assistant=" + "b" * 800, "user=c")
    with pytest.raises(UserError, match="line 1: 1,601 bytes"):
        read_prompts(write(tmp_path / "p.jsonl", {"id": 1, "messages": turns}), LONGEST)


def test_the_users_text_is_that_of_all_turns_of_the_user():
    turns = messages("system=rules", "user=one", "assistant=answer", "user=two")
    assert prompts.user_text({"id": "a", "messages": turns}) == "one\ntwo"


def test_a_null_conversation_is_none(tmp_path: Path):
    rows = [{"id": n, "messages": messages(f"user={n}"), "conversation": None} for n in range(2)]
    first, second = read_prompts(write(tmp_path / "p.jsonl", *rows), LONGEST)
    assert prompts.conversation_key(first) != prompts.conversation_key(second)
    assert prompts.conversation_key(rows[0]) == prompts.conversation_key(first)


def test_without_a_conversation_the_first_user_turn_stands_for_it():
    opening = {"id": "a", "messages": messages("user=hello")}
    later = {"id": "b", "messages": messages("system", "user=hello", "assistant", "user=more")}
    other = {"id": "c", "messages": messages("user=good day")}
    named = {**opening, "conversation": "x"}
    keys = [prompts.conversation_key(prompt) for prompt in (opening, later, other, named)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_rows_of_any_source_are_checked_with_their_place_and_its_own_cure():
    rows = [("row 0", {"id": 0, "messages": messages("user")}), ("row 1", {"id": 1, "messages": []})]
    assert prompts.checked(rows[:1], LONGEST, "mend the field") == [{"id": "0", "messages": messages("user")}]
    with pytest.raises(UserError, match=r"^row 1: `messages` is missing, .*; mend the field$"):
        prompts.checked(rows, LONGEST, "mend the field")


def conversations() -> list[dict]:
    """120 prompts in conversations of one, two and three rows, mixed up."""
    rows = [
        {"id": f"{number}-{turn}", "messages": messages(f"user={number}"), "conversation": str(number)}
        for number in range(60)
        for turn in range(1 + number % 3)
    ]
    random.Random(1).shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("train", "heldout"), [(70, 30), (1, 1), (60, 30)])
def test_a_split_has_the_counts_asked_for_and_no_conversation_on_both_sides(train: int, heldout: int, seed: int):
    chosen = prompts.split(conversations(), train, heldout, seed)
    assert {name: len(rows) for name, rows in chosen.items()} == {"train": train, "heldout": heldout}
    sides = {name: {row["conversation"] for row in rows} for name, rows in chosen.items()}
    assert not sides["train"] & sides["heldout"]
    ids = [row["id"] for rows in chosen.values() for row in rows]
    assert len(set(ids)) == len(ids)


def test_a_split_depends_on_the_seed_and_not_on_the_order_of_the_file():
    singles = [{"id": str(n), "messages": messages(f"user={n}")} for n in range(50)]
    chosen = prompts.split(singles, 30, 10, seed=5)
    assert prompts.split(singles[::-1], 30, 10, seed=5) == chosen
    assert prompts.split(singles, 30, 10, seed=6) != chosen


def test_training_on_more_prompts_leaves_the_heldout_ones_alone():
    few, many = (prompts.split(conversations(), train, 30, seed=0) for train in (40, 70))
    assert few["heldout"] == many["heldout"]


def test_a_split_is_the_same_on_every_machine():
    singles = [{"id": str(n), "messages": messages(f"user={n}")} for n in range(10)]
    chosen = prompts.split(singles, 3, 3, seed=0)
    assert {name: [row["id"] for row in rows] for name, rows in chosen.items()} == {
        "heldout": ["0", "3", "2"],
        "train": ["5", "4", "8"],
    }


def test_keys_are_shuffled_by_the_seed_alone():
    keys = [str(n) for n in range(30)]
    assert prompts.shuffled(keys, 5) == prompts.shuffled(keys[::-1], 5)
    assert sorted(prompts.shuffled(keys, 5)) == sorted(keys) != prompts.shuffled(keys, 5)
    assert prompts.shuffled(keys, 6) != prompts.shuffled(keys, 5)


@pytest.mark.parametrize(("train", "heldout"), [(120, 1), (1, 120), (121, 1)])
def test_too_few_prompts_are_an_error_with_the_numbers(train: int, heldout: int):
    with pytest.raises(UserError) as error:
        prompts.split(conversations(), train, heldout, seed=0)
    assert f"120 prompts are too few for prompts.train = {train} and prompts.heldout = {heldout}" in str(error.value)


@pytest.mark.parametrize("total", [0, 1, 7, 528])
@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_parts_cover_every_row_once_and_are_nearly_equal(total: int, parts: int):
    ranges = [prompts.part_rows(total, f"{number:05d}-of-{parts:05d}") for number in range(parts)]
    assert [row for rows in ranges for row in rows] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def of_sources(*sizes: int) -> list[dict]:
    """Prompts of several sources, which use the same ids."""
    return prompts.together([
        [{"id": str(n), "messages": messages(f"user={source} {n}")} for n in range(size)]
        for source, size in enumerate(sizes)
    ])  # fmt: skip


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 0.001)])
def test_several_sources_are_mixed_by_weight_and_their_ids_kept_apart(weights: tuple[float, float]):
    chosen = prompts.split(of_sources(100, 100), 60, 20, seed=0, weights=weights)
    for name, rows in (("train", 60), ("heldout", 20)):
        counted = [sum(row["id"].startswith(f"{source}/") for row in chosen[name]) for source in (0, 1)]
        assert counted == prompts.shares(rows, weights)
    ids = [row["id"] for rows in chosen.values() for row in rows]
    assert len(set(ids)) == 80
    assert all(row.keys() == {"id", "messages"} for rows in chosen.values() for row in rows)


def test_of_one_source_ids_stay_what_they_are():
    assert prompts.split(of_sources(30), 20, 5, seed=0)["train"][0]["id"].isdigit()


def test_a_conversation_of_one_source_has_nothing_to_do_with_one_of_another():
    read = [[{"id": "a", "conversation": "x", "messages": messages("user")}] for _ in range(2)]
    assert [prompt["conversation"] for prompt in prompts.together(read)] == ["0/x", "1/x"]


def test_a_source_that_is_too_small_for_its_weight_is_named():
    with pytest.raises(UserError, match=r"prompts\.sources\.1 has too few for its weight\); add prompts or lower"):
        prompts.split(of_sources(100, 10), 60, 20, seed=0, weights=(1, 1))


@pytest.mark.parametrize(
    ("total", "weights", "each"),
    [(10, (1,), [10]), (10, (1, 1), [5, 5]), (10, (2, 1), [7, 3]), (1, (1, 1, 1), [1, 0, 0]), (7, (0.5, 0.5), [4, 3])],
)
def test_shares_are_whole_and_add_up(total: int, weights: tuple, each: list[int]):
    assert prompts.shares(total, weights) == each


def test_of_a_hub_dataset_the_first_rows_are_read_and_no_more(monkeypatch: pytest.MonkeyPatch):
    fetched = []

    def load_dataset(*arguments: object, **options: object) -> Iterator[dict]:
        for number in range(1000):
            fetched.append((arguments, options))
            yield {"prompt_id": "not a number", "messages": [*messages(f"user={number}"), *messages("assistant=Hi")]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    spec = source_of(Path("hub:some/data"), split="train", revision="a" * 40, rows=30)
    found = prompts.read("prompts.sources.0", spec, LONGEST)
    (answer,) = messages("assistant=Hi")
    expected = [{"id": str(n), "messages": messages(f"user={n}"), "answer": answer} for n in range(30)]
    assert found == expected
    assert len(fetched) == 30
    assert fetched[0] == (("some/data", None), {"split": "train", "revision": "a" * 40, "streaming": True})


BAD = [{"id": 1, "messages": messages("user")}, {"id": 2}, {"id": 1, "messages": messages("user")}]
BAD += [{"id": 3, "messages": messages(f"user={'x' * 20 * LONGEST}")}, {"id": 4, "messages": messages("user=Hi")}]


def test_bad_rows_are_left_out_as_far_as_they_may_and_each_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "p.jsonl", *BAD)
    found = prompts.read("prompts.sources.0", source_of(path, max_bad=3), LONGEST)
    assert [prompt["id"] for prompt in found] == ["1", "4"]
    for line, reason in ((2, "`messages` is missing"), (3, "id '1' was used before"), (4, "2,000 bytes of text")):
        assert f"{path}, line {line}: left out: {reason}" in caplog.text


def test_one_bad_row_too_many_is_an_error_that_says_how_many_were_left_out(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", *BAD)
    with pytest.raises(UserError, match=r"line 4: 2,000 bytes .* \(after 2 rows that were left out\)"):
        prompts.read("prompts.sources.0", source_of(path, max_bad=2), LONGEST)
