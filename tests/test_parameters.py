# SPDX-License-Identifier: Apache-2.0
"""The number of parameters follows from the constants, and is that of speculators' models, built without weights."""

import pytest
import torch
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, Qwen3Config

import helpers  # noqa: F401
from pilotfish import parameters
from pilotfish.constants import Constants

SMALL = {"target_vocab_size": 1000, "hidden_size": 64, "heads": 8, "kv_heads": 2, "head_dim": 16}
# The drafter of a target of 27 billion parameters, and its MLP's width.
LARGE = {"target_vocab_size": 248_320, "hidden_size": 5120, "heads": 32, "kv_heads": 8, "head_dim": 128}
LARGE_WIDTH = 17_408


def constants(algorithm: str, **given) -> Constants:
    return Constants(
        **{
            "algorithm": algorithm, "capture_layers": (1, 2, 3), "draft_vocab_size": 300, "draft_layers": 1,
            "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_type": "default", "rope_scaling": {},
            "partial_rotary_factor": 1.0, "sliding_window": None, "causal": False, "norm_before_residual": True,
            "norm_before_fc": False, "fc_norm": False, "norm_output": False, "max_position_embeddings": 64,
            "tied_head": False, **SMALL, **given,
        }
    )  # fmt: skip


def model(made: Constants, width: int) -> torch.nn.Module:
    """speculators' model of these constants on the meta device."""
    eagle3 = made.algorithm == "eagle3"
    layer = (LlamaConfig if eagle3 else Qwen3Config)(
        vocab_size=made.target_vocab_size, hidden_size=made.hidden_size, intermediate_size=width,
        num_hidden_layers=made.draft_layers, num_attention_heads=made.heads, num_key_value_heads=made.kv_heads,
        head_dim=made.head_dim,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    shared = {"transformer_layer_config": layer, "draft_vocab_size": made.draft_vocab_size}
    with torch.device("meta"):
        if eagle3:
            layers = {"eagle_aux_hidden_state_layer_ids": list(made.capture_layers)}
            return Eagle3DraftModel(Eagle3SpeculatorConfig(**shared, **layers))
        return DFlashDraftModel(DFlashSpeculatorConfig(**shared, aux_hidden_state_layer_ids=list(made.capture_layers)))


@pytest.mark.parametrize(("layers", "millions"), [((2, 17, 32, 47, 62), 1730.2), ((2, 17, 32, 47), 1704.0)])
def test_a_large_dflash_drafter_has_as_many_as_is_known_of_it(layers: tuple[int, ...], millions: float):
    made = constants("dflash", **LARGE, capture_layers=layers, draft_layers=5, draft_vocab_size=248_320)
    assert round(parameters.trainable(made, LARGE_WIDTH) / 1e6, 1) == millions
    assert parameters.trainable(made, LARGE_WIDTH) == trained(model(made, LARGE_WIDTH))


def trained(of: torch.nn.Module) -> int:
    return sum(each.numel() for each in of.parameters() if each.requires_grad)


def saved(of: torch.nn.Module) -> int:
    left_out = set(of._keys_to_ignore_on_save)
    return sum(each.numel() for name, each in of.named_parameters() if name not in left_out)


@pytest.mark.parametrize("vocabulary", [300, 1000], ids=["reduced", "full"])
@pytest.mark.parametrize("draft_layers", [1, 3])
def test_dflash_counts_as_speculators_model_does(draft_layers: int, vocabulary: int):
    made = constants("dflash", draft_layers=draft_layers, draft_vocab_size=vocabulary)
    built = model(made, width=96)
    assert (parameters.trainable(made, 96), parameters.stored(made, 96)) == (trained(built), saved(built))


def test_eagle3_counts_as_speculators_model_does_with_its_head_trained():
    made = constants("eagle3", causal=True)
    built = model(made, width=96)
    built.lm_head.weight.requires_grad_(True)
    assert (parameters.trainable(made, 96), parameters.stored(made, 96)) == (trained(built), saved(built))
