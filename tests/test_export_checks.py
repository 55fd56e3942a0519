# SPDX-License-Identifier: Apache-2.0
"""An export is held against the checkpoint, the vocabulary map and the constants of training."""

import copy
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish import constants, export, export_checks, tensors
from test_replay import DRAFT_VOCABULARY, FORWARDS, HIDDEN, reference_model

SPEC = {"speculative_tokens": 3, "max_model_len": 128}
TARGET = "run/target/model"


class Exported(NamedTuple):
    checkpoint: Path
    folder: Path
    trained: constants.Constants
    config: dict
    weights: dict[str, torch.Tensor]


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    """A random drafter's checkpoint and its export."""
    model = reference_model(*FORWARDS[0])
    state = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path / "checkpoint", state_dict=state)
    export.write(tmp_path / "checkpoint", tmp_path / "export", TARGET)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    weights = load_file(tmp_path / "export" / "model.safetensors")
    return Exported(tmp_path / "checkpoint", tmp_path / "export", constants.of_model(model), config, weights)


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
    assert exported.weights["layers.0.self_attn.q_proj.weight"].shape == (64, 2 * HIDDEN)


def test_a_drafter_of_the_whole_vocabulary_has_no_map(exported: Exported):
    whole = exported.trained.model_copy(update={"target_vocab_size": DRAFT_VOCABULARY})
    assert not {"d2t", "t2d"} & export_checks.schema(whole).keys()


def test_a_whole_export_has_no_fault(exported: Exported):
    held, vocabulary = exported.weights, {name: exported.weights[name] for name in ("d2t", "t2d")}
    assert (
        list(export_checks.tensor_faults(held, load_file(exported.checkpoint / "model.safetensors"), vocabulary)) == []
    )
    assert config_faults(exported, exported.config) == []


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
        ("norm_before_residual", False, "norm_before_residual False, not True as trained"),
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


def test_positions_must_be_enough_for_the_engine(exported: Exported):
    enough = exported.trained.max_position_embeddings
    assert config_faults(exported, exported.config, max_model_len=enough) == []
    (found,) = config_faults(exported, exported.config, max_model_len=enough + 1)
    assert f"max_position_embeddings {enough} is below engine.max_model_len {enough + 1}; lower the latter" in found


ROW = torch.arange(9), torch.randn(9, 3, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_read_back_an_export_drafts_as_its_checkpoint(exported: Exported):
    assert list(export_checks.drafting_faults(exported.folder, exported.checkpoint, *ROW)) == []


def test_an_export_that_drafts_otherwise_is_told_by_the_first_slot(exported: Exported):
    weights = {name: tensor.clone() for name, tensor in exported.weights.items()}
    weights["embed_tokens.weight"][3] += 1  # the input of slot 2
    (exported.folder / "model.safetensors").unlink()
    save_file(weights, exported.folder / "model.safetensors")
    (found,) = export_checks.drafting_faults(exported.folder, exported.checkpoint, *ROW)
    assert "its logits differ from the checkpoint's, first at slot 2" in found


def test_a_map_that_does_not_hold_what_is_drafted_is_at_fault(exported: Exported):
    weights = {name: tensor.clone() for name, tensor in exported.weights.items()}
    weights["t2d"][:] = False
    (exported.folder / "model.safetensors").unlink()
    save_file(weights, exported.folder / "model.safetensors")
    (found,) = export_checks.drafting_faults(exported.folder, exported.checkpoint, *ROW)
    assert "t2d does not hold" in found
