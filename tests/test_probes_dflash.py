# SPDX-License-Identifier: Apache-2.0
"""The probes find nothing in DFlash's real data path and forward, and name what is wrong in a changed one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import random_probe, random_target
from pilotfish import dflash, transfer
from pilotfish.dflash import DFlash
from pilotfish.heads import Head

VOCABULARY, DRAFT_VOCABULARY = 200, 80
SPEC = {
    "algorithm": "dflash",
    "trust_remote_code": False,
    "seed": 3,
    "draft_layers": 2,
    "block_size": 4,
    "speculative_tokens": 3,
    "mask_token": 5,
    "gamma": 4.0,
    "anchors": 1,
    "loss": {"hard": 1.0},
    "noise": 0.0,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", VOCABULARY)


@pytest.fixture
def faults(target: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A function that gives what the probes find over random rows; keywords change the spec."""

    def found(vocabulary: int = DRAFT_VOCABULARY, **spec) -> list[str]:
        probe = random_probe(tmp_path, target, {**SPEC, **spec}, VOCABULARY, vocabulary)
        return list(probe.faults(Head(target)))

    return found


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"loss": {"soft": 1.0}},
        {"loss": {"hard": 0.7, "soft": 0.3}},
        {"block_size": 12},
        {"noise": 0.5},
        {"seed": 4},
    ],
    ids=str,
)
def test_the_real_path_passes_every_probe(faults, spec: dict):
    assert faults(**spec) == []


def test_a_drafter_of_the_whole_vocabulary_passes_too(faults):
    assert faults(vocabulary=VOCABULARY) == []


def test_a_layer_that_is_not_projected_is_named(faults, monkeypatch: pytest.MonkeyPatch):
    # Four of five layers reached the projection: the last of them twice.
    view = dflash.view

    def doubled(sample, states):
        made = view(sample, states)
        hidden = states.shape[-1]
        made["hidden_states"] = made["hidden_states"].clone()
        made["hidden_states"][:, :hidden] = made["hidden_states"][:, hidden : 2 * hidden]
        return made

    monkeypatch.setattr(dflash, "view", doubled)
    assert any("layer 1 does not reach the projection" in each for each in faults())


def test_noise_that_is_added_before_the_labels_are_read_is_told(faults, monkeypatch: pytest.MonkeyPatch):
    forward = DFlash.forward

    def noisy(self, hidden_states, input_ids, loss_mask, verifier_last_hidden_states, *args, noise=0.0, **more):
        last = verifier_last_hidden_states
        if noise and self.training:
            last = last + noise * torch.randn_like(last)
        return forward(self, hidden_states, input_ids, loss_mask, last, *args, noise=noise, **more)

    monkeypatch.setattr(DFlash, "forward", noisy)
    assert "noise reaches the labels: take them before any is added" in faults()


def test_a_label_layer_among_the_conditioning_is_told(faults, monkeypatch: pytest.MonkeyPatch):
    get = transfer.SampleDataset._get_raw_data

    def leaking(self, index):
        made = get(self, index)
        last = made["verifier_last_hidden_states"]
        made["hidden_states"] = torch.cat([made["hidden_states"][:, : -last.shape[1]], last], 1)
        return made

    monkeypatch.setattr(transfer.SampleDataset, "_get_raw_data", leaking)
    assert any("label layer 4 leaks into the conditioning" in each for each in faults())


def test_a_soft_loss_where_hard_was_asked_is_told(faults, monkeypatch: pytest.MonkeyPatch):
    arguments = dflash.call_arguments
    monkeypatch.setattr(dflash, "call_arguments", lambda spec: arguments({**spec, "loss": {"soft": 1.0}}))
    (found,) = faults()
    assert "1 hard, as asked" in found
    assert found.endswith("it is that of soft")


def test_labels_of_the_likeliest_token_instead_of_the_datas_are_told(faults, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DFlash, "_labels", lambda self, tokens, counts: torch.where(counts, tokens % 7, -100))
    assert any("is not the token there, in the draft vocabulary" in each for each in faults())


def test_blocks_that_see_each_other_are_told(faults, monkeypatch: pytest.MonkeyPatch):
    build = DFlash._create_attention_mask
    monkeypatch.setattr(DFlash, "_create_attention_mask", lambda *args, **more: torch.zeros_like(build(*args, **more)))
    found = faults()
    assert any("blocks see each other" in each for each in found)
    assert any("packed documents see each other" in each for each in found)
    assert any("it sees its own future" in each for each in found)


def test_anchors_lost_at_the_end_of_a_pack_are_told(faults, monkeypatch: pytest.MonkeyPatch):
    collator = dflash.collator
    monkeypatch.setattr(dflash, "collator", lambda spec, *rest: collator({**spec, "block_size": 0}, *rest))
    assert any("positions that only training uses [], only serving" in each for each in faults())


def test_a_block_that_runs_on_into_the_next_document_is_told(faults, monkeypatch: pytest.MonkeyPatch):
    forward = DFlash.forward

    def one_document(self, *args, document_ids, **more):
        return forward(self, *args, document_ids=document_ids.clamp(max=0), **more)

    monkeypatch.setattr(DFlash, "forward", one_document)
    assert any(
        "document 0 (row 3): (anchor, label) positions that only training uses [(" in e for e in faults(block_size=12)
    )
