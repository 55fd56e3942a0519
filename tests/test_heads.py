# SPDX-License-Identifier: Apache-2.0
"""The target's logits from stored states equal those of the whole model, whatever its files look like."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pilotfish import heads
from pilotfish.errors import UserError

HIDDEN, VOCABULARY = 32, 50


def target(folder: Path, tied: bool = False, **saving) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a random target; states before its final norm [N, H], and its logits for them [N, V]."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        rms_norm_eps=1e-3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, mean=1.0)
    model.save_pretrained(folder, **saving)
    states_NH = torch.randn(5, HIDDEN)
    with torch.no_grad():
        return states_NH, model.lm_head(model.model.norm(states_NH))


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("saving", [{}, {"max_shard_size": "5KB"}], ids=["one file", "shards"])
def test_logits_are_the_whole_models(tied: bool, saving: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    states, logits = target(tmp_path, tied, **saving)
    monkeypatch.setattr(heads, "ROWS_AT_ONCE", 7)
    torch.testing.assert_close(heads.Head(tmp_path).logits(states), logits)


def test_a_family_whose_norm_adds_one_is_known_by_its_model_type(tmp_path: Path):
    states, logits = target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] -= 1
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**config, "model_type": "gemma3_text"}}))
    torch.testing.assert_close(heads.Head(tmp_path).logits(states), logits)


def test_a_target_without_a_head_by_a_known_name_is_refused(tmp_path: Path):
    target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"{name}_other": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="is it a language model"):
        heads.Head(tmp_path)


def test_a_gap_is_from_the_likeliest_token_to_the_lesser_of_two(tmp_path: Path):
    states, logits = target(tmp_path)
    best, second, last = (int(logits[0].argsort(descending=True)[i]) for i in (0, 1, -1))
    head, scale = heads.Head(tmp_path), logits[0].std()
    to_second, to_last, of_itself = head.gaps(states[:1].expand(3, -1), [(best, second), (last, second), (best, best)])
    assert to_second == pytest.approx(float((logits[0, best] - logits[0, second]) / scale), rel=1e-4)
    assert to_last == pytest.approx(float((logits[0, best] - logits[0, last]) / scale), rel=1e-4)
    assert of_itself == 0


def test_agreement_is_the_share_of_tokens_that_the_head_finds_likeliest(tmp_path: Path):
    states, logits = target(tmp_path)
    tokens = logits.argmax(1).tolist()
    tokens[0] = (tokens[0] + 1) % VOCABULARY
    assert heads.Head(tmp_path).agreement(states, tokens) == pytest.approx(4 / 5)
