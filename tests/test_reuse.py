# SPDX-License-Identifier: Apache-2.0
"""What has been asked with the same settings and code is not asked again, wherever its row lies now."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers import flip_bit, random_ids, random_states, response
from pilotfish import files, reuse, shards
from pilotfish.journal import Journal

LAYERS = [1, 3]
GREEDY = {"temperature": 0.0, "seed": 0}
ORIGIN = "target, settings and code"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 4)


def prompts(*texts: str) -> list[dict]:
    return [{"id": f"p-{text}", "messages": [{"role": "user", "content": text}]} for text in texts]


def answer_to(text: str, row: int, sampling: dict) -> dict:
    """An answer that only its question decides."""
    number = int.from_bytes(text.encode())
    made = response(row, random_ids(3, number), random_ids(2 + number % 4, 50 + number))
    return {**made, "id": f"p-{text}", "text": f"answer to {text}", "sampling": sampling}


def states_of(row: dict) -> shards.RowStates:
    return random_states((row["prompt_token_ids"] + row["token_ids"])[:-1], len(LAYERS), hidden=8)


class Part:
    """One part of a split: what it asks, and a journal that `do` finishes rows of as a job does."""

    def __init__(self, folder: Path, asked: list[dict], layers: list[int] = LAYERS, sampling: dict = GREEDY):
        self.asked, self.captured = asked, folder / "captured"
        self.stamps = {
            row: {"id": prompt["id"], "sampling": {**sampling, "seed": sampling["seed"] + row}}
            for row, prompt in enumerate(asked)
        }
        self.questions = {row: reuse.question(asked[row], stamp["sampling"]) for row, stamp in self.stamps.items()}
        self.journal = Journal(folder / "work", range(len(asked)), layers)

    def do(self, rows) -> None:
        for row in rows:
            made = answer_to(self.asked[row]["messages"][0]["content"], row, self.stamps[row]["sampling"])
            if self.journal.layers:
                states = states_of(made)
                tensors = {"token_ids": states.token_ids, "hidden_states": states.hidden_states}
                save_file(tensors, self.journal.incoming / f"r{row}")
            self.journal.finish(made, f"r{row}" if self.journal.layers else "")

    def adopt(self, *others: "Part", origin: str = ORIGIN) -> set[int]:
        """The rows that need not be asked."""
        indexes = [other.captured / shards.INDEX for other in others]
        known = reuse.adopt(self.journal, indexes, self.questions, self.stamp, origin)
        assert known == len(self.journal.done)
        return set(self.journal.done)

    def stamp(self, row: int, kept: dict) -> dict:
        return {**kept, "row": row, **self.stamps[row]}

    def publish(self) -> "Part":
        self.journal.pack_all()
        kept = reuse.write(self.journal.captured, self.journal.rows(), self.questions, ORIGIN)
        self.journal.write_index(**{reuse.KEY: kept})
        files.publish_folder(self.journal.captured, self.captured)
        return self


@pytest.fixture
def earlier(tmp_path: Path) -> Part:
    """An earlier run's answers to a to j."""
    made = Part(tmp_path / "earlier", prompts(*"abcdefghij"))
    made.do(range(10))
    return made.publish()


def published_rows(part: Part) -> list[dict]:
    """The answers of a part that is whole, after a look at the states of each."""
    part.publish()
    rows = part.journal.rows()
    reader = shards.ShardReader([part.captured / shards.INDEX])
    for row in rows:
        assert torch.equal(reader.read(row["row"]).hidden_states, states_of(row).hidden_states)
    return rows


def test_the_same_prompts_need_no_engine_and_their_shards_are_linked(tmp_path: Path, earlier: Part):
    now = Part(tmp_path / "now", earlier.asked)
    assert now.adopt(earlier) == set(range(10))
    assert published_rows(now) == earlier.journal.rows()
    for path in earlier.captured.glob("*.safetensors"):
        assert path.samefile(now.captured / path.name)


@pytest.mark.parametrize(
    ("asked", "new"),
    [("abcdefghijk", {10}), ("abXdefghij", {2}), ("Xabcdefghij", {0}), ("acdefghij", set()), ("jihgfedcba", set())],
    ids=["one more", "one changed", "one in front", "one less", "another order"],
)
def test_of_changed_prompts_only_the_new_are_asked(tmp_path: Path, earlier: Part, asked: str, new: set[int]):
    now = Part(tmp_path / "now", prompts(*asked))
    assert set(range(len(asked))) - now.adopt(earlier) == new
    now.do(sorted(new))
    fresh = Part(tmp_path / "fresh", prompts(*asked))
    fresh.do(range(len(asked)))
    assert published_rows(now) == published_rows(fresh)


def test_a_prompt_that_comes_twice_is_answered_once(tmp_path: Path, earlier: Part):
    now = Part(tmp_path / "now", prompts("a", "a", "b"))
    assert now.adopt(earlier) == {0, 1, 2}
    assert [row["text"] for row in published_rows(now)] == ["answer to a", "answer to a", "answer to b"]


def test_answers_are_found_in_other_parts(tmp_path: Path, earlier: Part):
    other = Part(tmp_path / "other", prompts("k", "l"))
    other.do(range(2))
    now = Part(tmp_path / "now", prompts("l", "x", "c"))
    assert now.adopt(earlier, other.publish()) == {0, 2}


def test_another_target_other_settings_or_code_have_answered_nothing(tmp_path: Path, earlier: Part):
    assert Part(tmp_path / "now", earlier.asked).adopt(earlier, origin="another") == set()


def test_the_origin_is_of_target_settings_and_code_and_of_no_seed(tmp_path: Path):
    target = tmp_path / "manifest.json"
    target.write_text("a target", encoding="utf-8")
    spec = {"engine": {"dtype": "float32"}, "seed": 0, "sampling": GREEDY}
    plain = reuse.origin(target, spec, "code")
    assert reuse.origin(target, {**spec, "seed": 1, "sampling": {}}, "code") == plain
    assert reuse.origin(target, spec, "other") != plain
    assert reuse.origin(target, {**spec, "engine": {"dtype": "bfloat16"}}, "code") != plain
    target.write_text("another", encoding="utf-8")
    assert reuse.origin(target, spec, "code") != plain


def test_sampled_answers_are_taken_for_their_own_seed_alone(tmp_path: Path):
    sampling = {"temperature": 0.7, "seed": 5}
    earlier = Part(tmp_path / "earlier", prompts(*"abc"), layers=[], sampling=sampling)
    earlier.do(range(3))
    earlier.publish()
    now = Part(tmp_path / "now", prompts("a", "c", "b"), layers=[], sampling=sampling)
    assert now.adopt(earlier) == {0}


def test_layers_that_were_not_captured_have_to_be(tmp_path: Path, earlier: Part):
    assert Part(tmp_path / "now", earlier.asked, layers=[1, 2]).adopt(earlier) == set()


def test_states_of_fewer_layers_are_picked_out(tmp_path: Path, earlier: Part):
    now = Part(tmp_path / "now", earlier.asked, layers=[3])
    assert now.adopt(earlier) == set(range(10))
    now.publish()
    reader = shards.ShardReader([now.captured / shards.INDEX])
    row = earlier.journal.rows()[4]
    assert torch.equal(reader.read(4).hidden_states, states_of(row).hidden_states[:, 1:])


def test_refused_rows_are_asked_again(tmp_path: Path):
    earlier = Part(tmp_path / "earlier", prompts(*"abc"))
    earlier.do([0, 2])
    earlier.journal.finish({**answer_to("b", 1, GREEDY), "error": "too long"}, "")
    assert Part(tmp_path / "now", earlier.asked).adopt(earlier.publish()) == {0, 2}


def test_a_damaged_shard_costs_its_rows_and_damaged_answers_all(tmp_path: Path, earlier: Part):
    flip_bit(earlier.captured / shards.shard_name(4, 8))
    assert Part(tmp_path / "now", earlier.asked).adopt(earlier) == {0, 1, 2, 3, 8, 9}
    flip_bit(earlier.captured / reuse.ANSWERS)
    assert Part(tmp_path / "later", earlier.asked).adopt(earlier) == set()


def test_an_older_version_s_folder_or_a_broken_one_is_passed_over(tmp_path: Path, earlier: Part):
    index = earlier.captured / shards.INDEX
    content = files.read_json(index)
    shards.write_index(earlier.captured, content["capture_layers"], content["shards"])
    assert Part(tmp_path / "now", earlier.asked).adopt(earlier) == set()
    index.write_text("{", encoding="utf-8")
    assert Part(tmp_path / "later", earlier.asked).adopt(earlier) == set()


def test_a_job_that_died_between_a_shard_and_its_rows_takes_them_again(tmp_path: Path, earlier: Part, monkeypatch):
    now = Part(tmp_path / "now", earlier.asked)
    finish = Journal.finish

    def die(journal: Journal, row: dict, name: str) -> None:
        if row["row"] == 6:
            raise KeyboardInterrupt
        finish(journal, row, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "finish", die)
        now.adopt(earlier)
    now.journal = Journal(tmp_path / "now" / "work", range(10), LAYERS)
    assert set(now.journal.done) == {0, 1, 2, 3}
    reuse.adopt(now.journal, [earlier.captured / shards.INDEX], now.questions, now.stamp, ORIGIN)
    assert published_rows(now) == earlier.journal.rows()
