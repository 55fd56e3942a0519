# SPDX-License-Identifier: Apache-2.0
"""A drafter's constants are asked of the model, of its config.json and of the engine, and compared field by field."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import test_replay_dflash
from helpers import LAYERS, random_target
from pilotfish import constants, files, training
from pilotfish.errors import UserError
from test_replay_eagle3 import DRAFT_VOCABULARY, FORWARDS, HIDDEN, VOCABULARY, reference_model


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", VOCABULARY)


@pytest.fixture(scope="module")
def configs(tmp_path_factory, target: Path) -> dict[str, dict]:
    """config.json as speculators writes it, by algorithm."""
    found = {}
    models = {"eagle3": reference_model(*FORWARDS[0]), "dflash": test_replay_dflash.reference_model(target)}
    for name, model in models.items():
        model.save_pretrained(folder := tmp_path_factory.mktemp(name))
        found[name] = json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture
def config(configs: dict[str, dict]) -> dict:
    return configs["eagle3"]


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


@pytest.mark.parametrize("vocabulary", [DRAFT_VOCABULARY, VOCABULARY], ids=["reduced", "whole"])
def test_a_dflash_model_and_the_config_that_it_saves_have_the_same_constants(
    vocabulary: int, target: Path, tmp_path: Path
):
    model = test_replay_dflash.reference_model(target, vocabulary)
    model.save_pretrained(tmp_path)
    trained, stated = constants.of_model(model), constants.of_config(files.read_json(tmp_path / "config.json"))
    assert constants.differences(trained, stated) == []
    assert (trained.algorithm, trained.capture_layers, trained.draft_layers) == ("dflash", (1, 2, 3), 2)
    assert (trained.draft_vocab_size, trained.target_vocab_size) == (vocabulary, VOCABULARY)
    assert (trained.block_size, trained.mask_token_id) == (4, 199)
    assert (trained.causal, trained.sliding_window, trained.norm_before_residual) == (False, None, None)


def test_what_is_built_for_training_is_bidirectional_to_the_model_to_its_config_and_to_the_engine(
    target: Path, tmp_path: Path
):
    """Without sliding_window_non_causal: true in the export, vLLM makes every layer causal, whatever was trained."""
    spec = {"algorithm": "dflash", "trust_remote_code": False, "seed": 0, "draft_layers": 2, "block_size": 8}
    ids = torch.arange(DRAFT_VOCABULARY)
    maps = {"d2t": ids * 0, "t2d": torch.isin(torch.arange(VOCABULARY), ids)}
    model = training.build_drafter({**spec, "mask_token": 7}, target, LAYERS[:3], maps)
    training.export(model, tmp_path)
    config = files.read_json(tmp_path / "config.json")
    written = constants.read(files.read_json(tmp_path / constants.FILE), tmp_path)
    seen = [constants.of_model(model), written, constants.of_config(config), constants.of_engine(engine_of(config))]
    assert [each.causal for each in seen] == [False] * 4
    assert [constants.differences(seen[0], each) for each in seen[1:]] == [[], [], []]
    dropped = {**config, "sliding_window_non_causal": False}
    for view in (constants.of_config(dropped), constants.of_engine(engine_of(dropped))):
        assert constants.differences(seen[0], view) == ["causal False, not True"]


def test_a_dflash_model_of_causal_windows_is_seen_as_such(target: Path):
    model = test_replay_dflash.reference_model(target)
    model.sliding_window, model.uses_sliding_window_attn = 8, True
    model.sliding_window_non_causal = False
    made = constants.of_model(model)
    assert (made.sliding_window, made.causal) == (8, True)


def test_the_modules_are_asked_and_not_the_config_that_built_them():
    model = reference_model(*FORWARDS[0])
    before = constants.of_model(model)
    model.layers[0].norm_before_residual = False
    model.norm.variance_epsilon = 1e-3
    model.lm_head.weight = model.embed_tokens.weight
    assert constants.differences(before, constants.of_model(model)) == [
        "rms_norm_eps 1e-05, not 0.001",
        "tied_head False, not True",
        "norm_before_residual True, not False",
    ]


OF_EITHER = (
    "speculators_model_type",
    "draft_vocab_size",
    "transformer_layer_config.num_key_value_heads",
    "transformer_layer_config.max_position_embeddings",
    "transformer_layer_config.rope_parameters.rope_theta",
)
OF_ONE = {
    "eagle3": ("eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
    "dflash": (
        *("aux_hidden_state_layer_ids", "block_size", "mask_token_id"),
        *("sliding_window_non_causal", "sample_from_anchor"),
    ),
}


@pytest.mark.parametrize(("algorithm", "key"), [(name, key) for name in OF_ONE for key in (*OF_EITHER, *OF_ONE[name])])
def test_a_missing_key_is_refused_where_servers_have_their_own_default(configs: dict, algorithm: str, key: str):
    changed = copy.deepcopy(configs[algorithm])
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
    """A VllmConfig's parts that matter; vLLM itself makes hf_config of config.json."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    held = SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config))
    held = {key: value for key, value in (held | changes).items() if value != "absent"}
    asked = SpeculatorsConfig.extract_vllm_speculative_config(config)
    drafter = SimpleNamespace(
        hf_config=SpeculatorsConfig(**held), get_total_num_kv_heads=lambda: held["num_key_value_heads"]
    )
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**asked, draft_model_config=drafter),
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
    )


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_an_engine_that_was_told_everything_sees_the_configs_constants(configs: dict, algorithm: str):
    config = configs[algorithm]
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


def test_an_engine_that_drafts_another_number_of_tokens_is_seen_by_its_block(configs: dict):
    config = copy.deepcopy(configs["dflash"])
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2
    seen = constants.of_engine(engine_of(config))
    assert constants.differences(constants.of_config(config), seen) == ["block_size 4, not 3"]


def test_a_record_survives_its_file_and_another_file_is_none(config: dict, tmp_path: Path):
    made = constants.of_config(config)
    constants.write(tmp_path, made)
    written = files.read_json(tmp_path / constants.FILE)
    assert constants.read(written, "x") == made
    with pytest.raises(UserError, match=r"x: not the constants of a drafter \(rope_theta\); delete"):
        constants.read({key: value for key, value in written.items() if key != "rope_theta"}, "x")
