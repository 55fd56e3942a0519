# SPDX-License-Identifier: Apache-2.0
"""An export is held against the checkpoint, the vocabulary map and the constants of training."""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import test_replay_dflash
import test_replay_eagle3
from helpers import HIDDEN, random_target
from pilotfish import constants, export, export_checks, tensors

SPEC = {"speculative_tokens": 3, "max_model_len": 128}
TARGET = "run/target/model"


class Exported(NamedTuple):
    checkpoint: Path
    folder: Path
    trained: constants.Constants
    config: dict
    weights: dict[str, torch.Tensor]
    target: Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(params=["eagle3", "dflash", "dflash-whole"])
def exported(request: pytest.FixtureRequest, tmp_path: Path, target: Path) -> Exported:
    """A random drafter's checkpoint and its export; of DFlash also one of the whole vocabulary."""
    if request.param == "eagle3":
        model = test_replay_eagle3.reference_model(*test_replay_eagle3.FORWARDS[0])
    else:
        size = test_replay_dflash.VOCABULARY if "whole" in request.param else test_replay_dflash.DRAFT_VOCABULARY
        model = test_replay_dflash.reference_model(target, size)
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path / "checkpoint", state_dict=state)
    export.write(tmp_path / "checkpoint", tmp_path / "export", TARGET)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    weights = load_file(tmp_path / "export" / "model.safetensors")
    return Exported(tmp_path / "checkpoint", tmp_path / "export", constants.of_model(model), config, weights, target)


ONLY = {
    name: pytest.mark.parametrize("exported", [name], indirect=True) for name in ("eagle3", "dflash", "dflash-whole")
}
MAPPED = pytest.mark.parametrize("exported", ["eagle3", "dflash"], indirect=True)


def test_an_export_holds_two_files_and_asks_for_no_code(exported: Exported):
    assert {path.name for path in exported.folder.iterdir()} == set(export.FILES)
    assert "auto_map" in json.loads((exported.checkpoint / "config.json").read_text())
    assert "auto_map" not in exported.config
    assert exported.config["speculators_config"]["verifier"]["name_or_path"] == TARGET


@pytest.mark.parametrize(("revision", "name"), [("abc", "org/name"), (None, "results/x/target/model")])
def test_only_a_target_with_a_revision_is_called_by_its_source(revision: str | None, name: str):
    facts = {"source": "org/name", "revision": revision}
    assert export.target_name(Path("results/x/target/manifest.json"), facts) == name


def test_what_speculators_writes_fits_the_schema(exported: Exported):
    assert tensors.faults(exported.weights, export_checks.schema(exported.trained)) == []
    inputs = {"eagle3": 2 * HIDDEN, "dflash": HIDDEN}[exported.trained.algorithm]
    assert exported.weights["layers.0.self_attn.q_proj.weight"].shape == (64, inputs)


@MAPPED
def test_a_drafter_of_the_whole_vocabulary_has_no_map(exported: Exported):
    assert {"d2t", "t2d"} <= export_checks.schema(exported.trained).keys()
    whole = exported.trained.model_copy(update={"target_vocab_size": exported.trained.draft_vocab_size})
    assert not {"d2t", "t2d"} & export_checks.schema(whole).keys()


@ONLY["dflash"]
def test_what_a_dflash_drafter_has_from_its_target_is_not_expected(exported: Exported):
    held = {**exported.weights, "embed_tokens.weight": torch.zeros(200, HIDDEN, dtype=torch.bfloat16)}
    schema = export_checks.schema(exported.trained)
    assert tensors.faults(held, schema) == ["embed_tokens.weight: not expected here"]
    del held["embed_tokens.weight"], held["lm_head.weight"], held["layers.1.self_attn.k_norm.weight"]
    assert sorted(tensors.faults(held, schema)) == [
        "layers.1.self_attn.k_norm.weight: missing",
        "lm_head.weight: missing",
    ]


def test_a_whole_export_has_no_fault(exported: Exported):
    held, checkpoint = exported.weights, load_file(exported.checkpoint / "model.safetensors")
    assert list(export_checks.tensor_faults(held, checkpoint, held)) == []
    assert config_faults(exported, exported.config) == []


@MAPPED
def test_tensors_of_another_checkpoint_or_map_are_named(exported: Exported):
    vocabulary = {name: exported.weights[name].clone() for name in ("d2t", "t2d")}
    held = {name: tensor.clone() for name, tensor in exported.weights.items()}
    held["fc.weight"][0, 0] += 1
    vocabulary["d2t"][0] += 1
    assert list(export_checks.tensor_faults(held, exported.weights, vocabulary)) == [
        "fc.weight: not bit for bit the verified checkpoint's",
        "d2t: not the vocabulary map's",
    ]


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(2), torch.ones(2).half(), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(2, 3).T, torch.ones(3, 2), True),
        (torch.tensor([True]), torch.tensor([True]), True),
    ],
    ids=["NaN", "signed zero", "type", "shape", "strides", "bool"],
)
def test_tensors_are_compared_bit_for_bit(left: torch.Tensor, right: torch.Tensor, equal: bool):
    assert export_checks.bit_equal(left, right) is equal


def config_faults(exported: Exported, config: dict, **spec) -> list[str]:
    stated = constants.of_config(config)
    return list(export_checks.config_faults(config, stated, exported.trained, SPEC | spec, TARGET))


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("auto_map", {"": "config.X"}, "auto_map asks a server to run Python"),
        ("speculators_config.verifier.name_or_path", "elsewhere", f"the target is 'elsewhere', not '{TARGET}'"),
        ("speculators_config.proposal_methods.0.speculative_tokens", 5, "speculative_tokens 5, not 3 as configured"),
        ("transformer_layer_config.sliding_window", 2048, "sliding_window 2048, not None as trained"),
    ],
)
def test_what_config_json_asks_for_is_held_against_the_training(exported: Exported, path: str, value, fault: str):
    config = copy.deepcopy(exported.config)
    *parts, last = path.split(".")
    place = config
    for part in parts:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    (found,) = config_faults(exported, config)
    assert fault in found


@ONLY["eagle3"]
def test_another_norm_than_was_trained_is_told(exported: Exported):
    (found,) = config_faults(exported, {**exported.config, "norm_before_residual": False})
    assert "norm_before_residual False, not True as trained" in found


@pytest.mark.parametrize("exported", ["dflash", "dflash-whole"], indirect=True)
def test_an_export_that_makes_the_engine_hide_a_blocks_later_tokens_is_told(exported: Exported):
    assert exported.config["sliding_window_non_causal"] is True
    (found,) = config_faults(exported, {**exported.config, "sliding_window_non_causal": False})
    assert "causal True, not False as trained" in found


def test_positions_must_be_enough_for_the_engine(exported: Exported):
    enough = exported.trained.max_position_embeddings
    assert config_faults(exported, exported.config, max_model_len=enough) == []
    (found,) = config_faults(exported, exported.config, max_model_len=enough + 1)
    assert f"max_position_embeddings {enough} is below engine.max_model_len {enough + 1}; lower the latter" in found


ROW = torch.arange(9), torch.randn(9, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_read_back_an_export_drafts_as_its_checkpoint(exported: Exported):
    assert drafting_faults(exported) == []


def drafting_faults(exported: Exported, **changed: torch.Tensor) -> list[str]:
    """What is found when the export's file has other tensors than were written; `fc__weight` is `fc.weight`."""
    path = exported.folder / "model.safetensors"
    path.unlink()
    save_file(exported.weights | {name.replace("__", "."): tensor for name, tensor in changed.items()}, path)
    return list(export_checks.drafting_faults(exported.folder, exported.checkpoint, exported.target, *ROW))


@ONLY["eagle3"]
def test_an_export_that_drafts_otherwise_is_told_by_the_first_slot(exported: Exported):
    embedding = exported.weights["embed_tokens.weight"].clone()
    embedding[3] += 1  # the input of slot 2
    (found,) = drafting_faults(exported, embed_tokens__weight=embedding)
    assert "its logits differ from the checkpoint's, first at slot 2" in found


def test_an_export_with_another_projection_drafts_otherwise(exported: Exported):
    (found,) = drafting_faults(exported, fc__weight=exported.weights["fc.weight"].flip(0))
    assert "its logits differ from the checkpoint's, first at slot 0" in found


@MAPPED
def test_a_map_that_does_not_hold_what_is_drafted_is_at_fault(exported: Exported):
    (found,) = drafting_faults(exported, t2d=torch.zeros_like(exported.weights["t2d"]))
    assert "t2d does not hold" in found
