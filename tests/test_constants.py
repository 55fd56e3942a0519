# SPDX-License-Identifier: Apache-2.0
"""A drafter's constants are asked of the model, of its config.json and of the engine, and compared field by field."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pilotfish import constants, files
from pilotfish.errors import UserError
from test_replay import DRAFT_VOCABULARY, FORWARDS, HIDDEN, VOCABULARY, reference_model


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    """config.json as speculators writes it."""
    reference_model(*FORWARDS[0]).save_pretrained(folder := tmp_path_factory.mktemp("drafter"))
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("flags", FORWARDS, ids=lambda flags: f"norms-{flags[0]:d}{flags[1]:d}")
def test_a_model_and_the_config_that_it_saves_have_the_same_constants(flags, tmp_path):
    model = reference_model(*flags)
    model.save_pretrained(tmp_path)
    trained, stated = constants.of_model(model), constants.of_config(files.read_json(tmp_path / "config.json"))
    assert constants.differences(trained, stated) == []
    assert (trained.norm_before_residual, trained.norm_output) == flags
    assert trained.capture_layers == (1, 2, 3)
    assert (trained.hidden_size, trained.heads, trained.kv_heads, trained.head_dim) == (HIDDEN, 4, 2, 16)
    assert (trained.draft_vocab_size, trained.target_vocab_size) == (DRAFT_VOCABULARY, VOCABULARY)
    assert (trained.rope_theta, trained.rope_type, trained.causal, trained.tied_head) == (500.0, "default", True, False)


def test_the_modules_are_asked_and_not_the_config_that_built_them():
    model = reference_model(*FORWARDS[0])
    before = constants.of_model(model)
    model.layers[0].norm_before_residual = False
    model.norm.variance_epsilon = 1e-3
    model.lm_head.weight = model.embed_tokens.weight
    assert constants.differences(before, constants.of_model(model)) == [
        "rms_norm_eps 1e-05, not 0.001",
        "norm_before_residual True, not False",
        "tied_head False, not True",
    ]


@pytest.mark.parametrize(
    "key",
    [
        "speculators_model_type",
        "eagle_aux_hidden_state_layer_ids",
        "draft_vocab_size",
        "norm_before_residual",
        "transformer_layer_config.num_key_value_heads",
        "transformer_layer_config.max_position_embeddings",
        "transformer_layer_config.rope_parameters.rope_theta",
    ],
)
def test_a_missing_key_is_refused_where_servers_have_their_own_default(config: dict, key: str):
    changed = copy.deepcopy(config)
    *path, last = key.split(".")
    place = changed
    for part in path:
        place = place[part]
    del place[last]
    with pytest.raises(UserError, match=rf"some/config\.json: .*{last} missing.*export the drafter again"):
        constants.of_config(changed, Path("some/config.json"))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"sliding_window": 2048}, "sliding_window None, not 2048"),
        ({"is_causal": False}, "causal True, not False"),
        ({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, "rope_theta 500.0, not 9.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1.0, not 0.5"),
        ({"tie_word_embeddings": True}, "tied_head False, not True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_config_asks_of_a_server_is_seen(config: dict, change: dict, difference: str):
    changed = copy.deepcopy(config)
    changed["transformer_layer_config"] |= change
    assert constants.differences(constants.of_config(config), constants.of_config(changed)) == [difference]


def engine_of(config: dict, **changes) -> SimpleNamespace:
    """A VllmConfig's parts that matter: vLLM makes hf_config from the layer's part and what it adds to it."""
    added = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    held = {**config["transformer_layer_config"], **{key: config[key] for key in added}}
    held["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    held = {key: value for key, value in (held | changes).items() if value != "absent"}
    drafter = SimpleNamespace(hf_config=SimpleNamespace(**held), get_total_num_kv_heads=lambda: 2)
    target = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    speculative = SimpleNamespace(method="eagle3", draft_model_config=drafter)
    return SimpleNamespace(speculative_config=speculative, model_config=target)


def test_an_engine_that_was_told_everything_sees_the_configs_constants(config: dict):
    assert constants.differences(constants.of_config(config), constants.of_engine(engine_of(config))) == []


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"eagle_aux_hidden_state_layer_ids": "absent"}, "capture_layers (1, 2, 3), not ()"),
        ({"rope_parameters": "absent"}, "rope_theta 500.0, not 10000.0"),
        ({"norm_before_residual": "absent"}, "norm_before_residual True, not False"),
        ({"is_causal": False}, "causal True, not False"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding_window None, not 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_engines_own_defaults_are_seen(config: dict, change: dict, difference: str):
    seen = constants.of_engine(engine_of(config, **change))
    assert constants.differences(constants.of_config(config), seen) == [difference]


def test_a_record_survives_its_file_and_another_file_is_none(config: dict, tmp_path: Path):
    made = constants.of_config(config)
    constants.write(tmp_path, made)
    written = files.read_json(tmp_path / constants.FILE)
    assert constants.read(written, "x") == made
    with pytest.raises(UserError, match=r"x: not the constants of a drafter \(rope_theta\); delete"):
        constants.read({key: value for key, value in written.items() if key != "rope_theta"}, "x")
