# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 replay against speculators' own forward pass, an engine-like oracle, and sums done by hand."""

import json
import os
import random
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig

from helpers import HIDDEN, SMALL_LAYER, random_map, randomise, served_as
from pilotfish import drafting, replay, replay_eagle3, rounds
from pilotfish.drafting import ReplayRow
from pilotfish.replay_eagle3 import Eagle3Drafter

K, VOCABULARY, DRAFT_VOCABULARY = 3, 200, 80
FORWARDS = [(True, False), (False, False), (True, True)]  # norm_before_residual, norm_output


def reference_model(norm_before_residual: bool, norm_output: bool) -> Eagle3DraftModel:
    """A random drafter whose attention and norms matter."""
    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        **SMALL_LAYER,
        num_hidden_layers=1,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=served_as("eagle3", K),
    )
    model = Eagle3DraftModel(config).eval()
    draw = randomise(model)
    random_map(model, draw, VOCABULARY, DRAFT_VOCABULARY)
    return model


@torch.no_grad()
def reference_drafts(model: Eagle3DraftModel, tokens_T: torch.Tensor, states_TLH: torch.Tensor) -> torch.Tensor:
    """Tokens [T - 1, K] that speculators' teacher-forced TTT forward drafts at each slot, as target ids."""
    slots = len(tokens_T) - 1
    drafted = model(
        hidden_states=states_TLH.flatten(1)[None],
        input_ids=tokens_T[None, 1:],
        document_ids=torch.zeros(1, slots, dtype=torch.long),
        ttt_steps=K,
    )
    return torch.stack([ids[0] + model.d2t[ids[0]] for ids in drafted], 1)


def reference_table(model: Eagle3DraftModel, row: ReplayRow) -> list[int]:
    """Acceptance from teacher forcing: compare with the tokens that follow, and cumulate over the steps."""
    drafts = reference_drafts(model, row.tokens_T, row.states_TLH).tolist()
    tokens, table = row.tokens_T.tolist(), []
    for anchor in range(row.prompt_length, row.prompt_length + row.n_out - 1):
        accepted, following = 0, tokens[anchor + 1 : anchor + 1 + K]
        while accepted < len(following) and drafts[anchor - 1][accepted] == following[accepted]:
            accepted += 1
        table.append(accepted)
    return table


def row_that_follows_drafts(model: Eagle3DraftModel, seed: int, prompt: int, n_out: int, stored: int) -> ReplayRow:
    """A response of runs of 0 to K drafted tokens, each ended by a random token of the whole vocabulary."""
    draw, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    tokens = torch.randint(VOCABULARY, (prompt + stored,), generator=draw)
    states = torch.randn(prompt + stored - 1, 3, HIDDEN, generator=draw)
    anchor = prompt
    while anchor < len(tokens):
        run = choose.randint(0, K)
        for step in range(min(run, len(tokens) - anchor - 1)):
            tokens[anchor + 1 + step] = reference_drafts(model, tokens, states)[anchor - 1, step]
        anchor += run + 1
    return ReplayRow(tokens, states, prompt, n_out)


@pytest.fixture(scope="module", params=FORWARDS, ids=lambda flags: f"norms-{flags[0]:d}{flags[1]:d}")
def case(request, tmp_path_factory):
    """A reference model, the folder it was saved to, and rows: plain, long, stored on, and very short."""
    torch.set_num_threads(1)
    model = reference_model(*request.param)
    folder = tmp_path_factory.mktemp("drafter")
    model.save_pretrained(folder)
    sizes = [(9, 40, 40), (5, 60, 60), (1, 25, 25), (4, 30, 30 + K), (6, 2, 2), (6, 1, 1)]
    rows = [row_that_follows_drafts(model, seed, *size) for seed, size in enumerate(sizes)]
    return model, folder, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A drafter's folder, for what does not depend on its flags."""
    reference_model(*FORWARDS[0]).save_pretrained(path := tmp_path_factory.mktemp("drafter"))
    return path


def tables_equal(drafter: Eagle3Drafter, case) -> list[bool]:
    model, _, rows = case
    tables = [table.tolist() for table in replay.acceptance_table(drafter, rows, K)]
    return [table == reference_table(model, row) for table, row in zip(tables, rows, strict=True)]


def test_table_equals_the_reference_forward_of_speculators(case):
    drafter = Eagle3Drafter(case[1])
    assert all(tables_equal(drafter, case))
    seen = torch.cat(replay.acceptance_table(drafter, case[2], K)).unique().tolist()
    assert seen == list(range(K + 1)), "rows that lack a length prove less"


def test_table_and_walk_equal_one_round_at_a_time(case):
    _, folder, rows = case
    drafter = Eagle3Drafter(folder)
    tables = replay.acceptance_table(drafter, rows, K)
    walked = [rounds.walk(table, row.n_stored) for table, row in zip(tables, rows, strict=True)]
    assert walked == [drafter.sequential(row, K) for row in rows]
    assert sum(map(len, walked)) > 50


def test_batches_and_blocks_do_not_change_the_table(case, monkeypatch):
    drafter = Eagle3Drafter(case[1])
    whole = replay.acceptance_table(drafter, case[2], K)
    monkeypatch.setattr(replay, "ROWS_PER_BATCH", 2)
    monkeypatch.setattr(drafting, "SLOTS_AT_ONCE", 7)
    pieces = replay.acceptance_table(drafter, case[2], K)
    assert [table.tolist() for table in pieces] == [table.tolist() for table in whole]


class FeedsBackPostNorm(Eagle3Drafter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config["norm_output"] = not self.config["norm_output"]


class KeepsPositions(Eagle3Drafter):
    def project(self, states_SLH):
        self.step = 0
        return super().project(states_SLH)

    def qkv(self, tokens_S, features_SH, positions_S):
        self.step += 1
        return super().qkv(tokens_S, features_SH, positions_S - (self.step - 1))


class ReadsShiftedStates(Eagle3Drafter):
    def project(self, states_SLH):
        return super().project(states_SLH.roll(1, 0))


@pytest.mark.parametrize("faulty", [FeedsBackPostNorm, KeepsPositions, ReadsShiftedStates])
def test_a_wrong_forward_differs_from_the_reference(case, faulty):
    assert not all(tables_equal(faulty(case[1]), case))


def test_dropped_own_keys_differ_from_the_reference(case, monkeypatch):
    right = replay_eagle3.visible

    def without_own(slots_S, n_true, n_steps):
        mask = right(slots_S, n_true, n_steps)
        mask[:, n_true:] = False
        return mask

    monkeypatch.setattr(replay_eagle3, "visible", without_own)
    assert not all(tables_equal(Eagle3Drafter(case[1]), case))


def test_a_token_outside_the_draft_vocabulary_is_a_rejection(case):
    model, folder, rows = case
    drafter, tokens = Eagle3Drafter(folder), rows[0].tokens_T.clone()
    start = rows[0].prompt_length + 1
    tokens[start:] = int((~model.t2d).nonzero()[0])
    (table,) = replay.acceptance_table(drafter, [ReplayRow(tokens, rows[0].states_TLH, start - 1, 20)], K)
    assert table.tolist() == [0] * 19


def test_the_lowest_index_wins_a_tie(folder, tmp_path):
    copy_folder(folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:1].repeat(DRAFT_VOCABULARY, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = Eagle3Drafter(tmp_path)
    _, drafts = drafter.finish(torch.randn(5, HIDDEN), torch.randn(5, 4, 16))
    assert drafts.tolist() == [int(tensors["d2t"][0])] * 5


def copy_folder(source: Path, destination: Path, **changes) -> None:
    """Copy a drafter; a change goes to the part of config.json that has its key, None takes the key away."""
    (destination / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text())
    layer = config["transformer_layer_config"]
    for key, value in changes.items():
        parts = [part for part in (layer["rope_parameters"], layer, config) if key in part]
        (parts or [layer])[0][key] = value
        if value is None:
            del (parts or [layer])[0][key]
    (destination / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_before_residual": None},
        {"speculators_model_type": "peagle"},
        {"model_type": "qwen3"},
        {"num_hidden_layers": 2},
        {"layer_types": ["sliding_attention"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_type": "llama3"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"rope_theta": None},
        {"head_dim": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_asks_for_another_forward_is_refused_by_its_key(folder, tmp_path, change):
    copy_folder(folder, tmp_path, **change)
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))} "):
        Eagle3Drafter(tmp_path)


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight", "layers.0.self_attn.q_norm.weight"])
def test_a_missing_or_unknown_tensor_is_refused_by_its_name(folder, tmp_path, name):
    copy_folder(folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        Eagle3Drafter(tmp_path)


def test_a_drafter_of_the_whole_vocabulary_needs_no_map(folder, tmp_path):
    copy_folder(folder, tmp_path, draft_vocab_size=VOCABULARY)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    save_file(tensors, tmp_path / "model.safetensors")
    assert Eagle3Drafter(tmp_path).target_ids_V.tolist() == list(range(VOCABULARY))


def test_states_of_other_layers_are_refused(folder):
    two_layers = ReplayRow(torch.zeros(10, dtype=torch.long), torch.zeros(9, 2, HIDDEN), 6, 4)
    with pytest.raises(ValueError, match=f"{2 * HIDDEN} values a position, not {3 * HIDDEN}"):
        replay.acceptance_table(Eagle3Drafter(folder), [two_layers], K)
