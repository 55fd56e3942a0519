# SPDX-License-Identifier: Apache-2.0
"""DFlash replay against speculators' own forward pass, an engine-like oracle, and sums done by hand."""

import json
import os
import random
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from transformers import Qwen3Config

from helpers import HIDDEN, SMALL_LAYER, random_map, random_target, randomise, served_as
from pilotfish import ddtree, drafting, replay, replay_dflash, rounds
from pilotfish.drafting import ReplayRow
from pilotfish.heads import TargetTensors
from pilotfish.replay_dflash import DFlashDrafter

BLOCK, VOCABULARY, DRAFT_VOCABULARY, MASK = 4, 200, 80, 199
DEPTH = BLOCK - 1


def reference_model(target: Path, draft_vocabulary: int = DRAFT_VOCABULARY) -> DFlashDraftModel:
    """A random drafter of two layers whose attention and norms matter, with the target's embedding (and head)."""
    layer = Qwen3Config(
        vocab_size=VOCABULARY,
        **SMALL_LAYER,
        num_hidden_layers=2,
    )
    layer._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocabulary,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2, 3],
        mask_token_id=MASK,
        sliding_window_non_causal=True,
        speculators_config=served_as("dflash", DEPTH),
    )
    model = DFlashDraftModel(config).eval()
    draw = randomise(model)
    held = TargetTensors(target)
    model.embed_tokens.weight.data = torch.cat([rows for _, rows in held.embedding()])
    if draft_vocabulary == VOCABULARY:
        model.lm_head.weight.data = torch.cat(list(held.head()))
    else:
        random_map(model, draw, VOCABULARY, draft_vocabulary)
    return model


@torch.no_grad()
def reference_logits(model: DFlashDraftModel, tokens_T: torch.Tensor, states_TLH: torch.Tensor, anchors: range):
    """Logits [anchors, DEPTH, V] of speculators' forward pass, all anchors in one pass over one document."""
    tokens = torch.cat([tokens_T, torch.zeros(BLOCK + 1, dtype=torch.long)])  # anchors near the end are not chosen
    states = torch.cat([states_TLH, torch.zeros(len(tokens) - len(states_TLH), *states_TLH.shape[1:])])
    chosen = torch.zeros(1, len(tokens))
    chosen[:, anchors.start : anchors.stop] = 1
    logits = model._backbone_forward(
        states.flatten(1)[None],
        tokens[None],
        chosen,
        torch.zeros(1, len(tokens), HIDDEN),
        torch.zeros(1, len(tokens), dtype=torch.long),
        max_anchors=len(anchors),
    )[1]
    return logits.view(len(anchors), BLOCK, -1)[:, 1:]


def anchors_of(row: ReplayRow) -> range:
    return range(row.prompt_length, row.prompt_length + row.n_out - 1)


def target_ids(model: DFlashDraftModel, ids: torch.Tensor) -> torch.Tensor:
    return ids if model.d2t is None else ids + model.d2t[ids]


def reference_table(model: DFlashDraftModel, row: ReplayRow) -> list[int]:
    """Acceptance: compare each anchor's drafts with the tokens that follow, and cumulate over the slots."""
    anchors, tokens, table = anchors_of(row), row.tokens_T.tolist(), []
    if not anchors:
        return []
    drafts = target_ids(model, reference_logits(model, row.tokens_T, row.states_TLH, anchors).argmax(-1)).tolist()
    for anchor, drafted in zip(anchors, drafts, strict=True):
        accepted, following = 0, tokens[anchor + 1 : anchor + 1 + DEPTH]
        while accepted < len(following) and drafted[accepted] == following[accepted]:
            accepted += 1
        table.append(accepted)
    return table


def row_that_follows_drafts(model: DFlashDraftModel, seed: int, prompt: int, n_out: int, stored: int) -> ReplayRow:
    """A response of runs of 0 to DEPTH drafted tokens, each ended by a random token of the whole vocabulary."""
    draw, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    tokens = torch.randint(VOCABULARY, (prompt + stored,), generator=draw)
    states = torch.randn(prompt + stored - 1, 3, HIDDEN, generator=draw)
    anchor = prompt
    while anchor < len(tokens):
        run = choose.randint(0, DEPTH)
        logits = reference_logits(model, tokens, states, range(anchor, anchor + 1))[0, :run]
        drafts = target_ids(model, logits.argmax(-1))[: len(tokens) - anchor - 1]
        tokens[anchor + 1 : anchor + 1 + len(drafts)] = drafts
        anchor += run + 1
    return ReplayRow(tokens, states, prompt, n_out)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=[DRAFT_VOCABULARY, VOCABULARY], ids=["reduced", "full"])
def case(request, target, tmp_path_factory):
    """A reference model, the folder it was saved to, and rows: plain, long, stored on, and very short."""
    model = reference_model(target, request.param)
    folder = tmp_path_factory.mktemp("drafter")
    model.save_pretrained(folder)
    sizes = [(9, 40, 40), (5, 60, 60), (1, 25, 25), (4, 30, 30 + DEPTH), (6, 2, 2), (6, 1, 1)]
    return model, folder, [row_that_follows_drafts(model, seed, *size) for seed, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory) -> Path:
    """The folder of a drafter with a reduced vocabulary."""
    reference_model(target).save_pretrained(path := tmp_path_factory.mktemp("drafter"))
    return path


def tables_equal(drafter: DFlashDrafter, case) -> list[bool]:
    model, _, rows = case
    tables = [table.tolist() for table in drafter.table(rows, DEPTH)]
    return [table == reference_table(model, row) for table, row in zip(tables, rows, strict=True)]


def test_table_equals_the_reference_forward_of_speculators(case, target):
    drafter = DFlashDrafter(case[1], target)
    assert all(tables_equal(drafter, case))
    seen = torch.cat(drafter.table(case[2], DEPTH)).unique().tolist()
    assert seen == list(range(BLOCK)), "rows that lack a length prove less"


def test_log_probabilities_equal_the_reference_forward_of_speculators(case, target):
    model, folder, rows = case
    ((log_probs, _),) = DFlashDrafter(folder, target).ranked(rows[:1], 5)
    logits = reference_logits(model, rows[0].tokens_T, rows[0].states_TLH, anchors_of(rows[0]))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).topk(5).values, rtol=1e-4, atol=1e-4)


def test_table_and_walk_equal_one_round_at_a_time(case, target):
    _, folder, rows = case
    drafter = DFlashDrafter(folder, target)
    walked = [rounds.walk(table, row.n_stored) for table, row in zip(drafter.table(rows, DEPTH), rows, strict=True)]
    assert walked == [drafter.sequential(row, DEPTH) for row in rows]
    assert sum(map(len, walked)) > 50


def test_blocks_do_not_change_what_is_found(case, target, monkeypatch):
    whole = DFlashDrafter(case[1], target).ranked(case[2], 8)
    monkeypatch.setattr(drafting, "SLOTS_AT_ONCE", 7 * BLOCK)
    monkeypatch.setattr(replay_dflash, "SLOTS_PER_ATTENTION", 3 * BLOCK)
    pieces = DFlashDrafter(case[1], target).ranked(case[2], 8)
    for (log_probs, ranks), (theirs, their_ranks) in zip(pieces, whole, strict=True):
        torch.testing.assert_close(log_probs, theirs)
        assert ranks.equal(their_ranks)


def test_ranks_are_the_places_of_the_true_tokens_in_the_reference(case, target):
    model, folder, rows = case
    row = rows[3]  # stored on: every true token is known
    ((log_probs, ranks),) = DFlashDrafter(folder, target).ranked([row], 8)
    logits = reference_logits(model, row.tokens_T, row.states_TLH, anchors_of(row))
    likeliest = target_ids(model, logits.topk(8).indices)
    true = torch.stack([row.tokens_T[anchor + 1 : anchor + BLOCK] for anchor in anchors_of(row)])
    places = (likeliest == true[..., None]).long()
    assert ranks.equal(torch.where(places.any(-1), places.argmax(-1), -1))
    assert log_probs.shape == (row.n_out - 1, DEPTH, 8)
    assert {-1, 0} < set(ranks.flatten().tolist())


def test_a_tree_of_one_token_a_depth_is_the_chain(case, target):
    drafter = DFlashDrafter(case[1], target)
    for row, table, (log_probs, ranks) in zip(
        case[2], drafter.table(case[2], DEPTH), drafter.ranked(case[2], 1), strict=True
    ):
        tree = ddtree.TreeTable(log_probs, ranks, budget=DEPTH)
        assert rounds.walk(tree, row.n_stored) == rounds.walk(table, row.n_stored)


def test_only_states_before_the_anchor_matter(case, target):
    _, folder, rows = case
    drafter, anchor = DFlashDrafter(folder, target), 20
    tokens, states = rows[0].tokens_T[:-1], rows[0].states_TLH
    first, _ = drafter.first_drafts(tokens, states)
    after, before = states.clone(), states.clone()
    after[anchor:] += 1
    before[anchor - 1] += 1
    assert drafter.first_drafts(tokens, after)[0][: anchor - 1].equal(first[: anchor - 1])
    torch.testing.assert_close(drafter.first_drafts(tokens, after)[0][anchor - 1], first[anchor - 1])
    changed = (drafter.first_drafts(tokens, before)[0] != first).any(-1)
    assert changed.nonzero().flatten().tolist() == list(range(anchor - 1, len(first)))


def test_first_drafts_are_the_first_slots_of_rounds_from_every_token(case, target):
    model, folder, rows = case
    tokens, states = rows[0].tokens_T[:-1], rows[0].states_TLH
    logits, drafts = DFlashDrafter(folder, target).first_drafts(tokens, states)
    expected = reference_logits(model, tokens, states, range(1, len(tokens)))[:, 0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert drafts.equal(target_ids(model, expected.argmax(-1)))


class NormsTheContext(DFlashDrafter):
    """Context as the layer's own input would enter."""

    def context(self, states_SLH, first=0):
        self._before = "input_layernorm"
        return super().context(states_SLH, first)

    def _keys_values(self, inputs_SH, layer, positions_S):
        if self._before:
            inputs_SH = self._norm(inputs_SH, f"layers.{layer}.{self._before}")
        return super()._keys_values(inputs_SH, layer, positions_S)

    def outputs(self, *arguments):
        self._before = None
        return super().outputs(*arguments)


class SkipsTheHiddenNorm(DFlashDrafter):
    def _norm(self, x, name):
        return x if name == "hidden_norm" else super()._norm(x, name)


class SkipsTheNormOfKeys(DFlashDrafter):
    def _norm(self, x, name):
        return x if name.endswith("k_norm") else super()._norm(x, name)


class ReadsShiftedStates(DFlashDrafter):
    def project(self, states_SLH):
        return super().project(states_SLH.roll(1, 0))


class KeepsPositions(DFlashDrafter):
    def _rotate(self, x, positions_S):
        return super()._rotate(x, positions_S - positions_S % BLOCK)


@pytest.mark.parametrize(
    "faulty", [NormsTheContext, SkipsTheHiddenNorm, SkipsTheNormOfKeys, ReadsShiftedStates, KeepsPositions]
)
def test_a_wrong_forward_differs_from_the_reference(case, target, faulty):
    assert not all(tables_equal(faulty(case[1], target), case))


def causal(mask: torch.Tensor, seen: int) -> None:
    mask[:, seen:].logical_and_(torch.ones_like(mask[:, seen:]).tril())


def without_context(mask: torch.Tensor, seen: int) -> None:
    mask[:, :seen] = False


def all_context(mask: torch.Tensor, seen: int) -> None:
    mask[:, :seen] = True


@pytest.mark.parametrize("damage", [causal, without_context, all_context])
def test_a_wrong_mask_differs_from_the_reference(case, target, monkeypatch, damage):
    right = replay_dflash.visible

    def wrong(anchors_N, seen, block_size):
        mask = right(anchors_N, seen, block_size)
        damage(mask, seen)
        return mask

    monkeypatch.setattr(replay_dflash, "visible", wrong)
    assert not all(tables_equal(DFlashDrafter(case[1], target), case))


def test_a_token_outside_the_draft_vocabulary_has_no_rank(folder, target):
    draft_ids = DFlashDrafter(folder, target).target_ids_V.tolist()
    outside = next(token for token in range(VOCABULARY) if token not in draft_ids)
    tokens, states = torch.full((30,), outside), torch.randn(29, 3, HIDDEN)
    ((_, ranks),) = DFlashDrafter(folder, target).ranked([ReplayRow(tokens, states, 5, 25)], VOCABULARY)
    assert ranks.unique().tolist() == [-1]


def test_the_lowest_index_wins_a_tie():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]).repeat(6, 1)
    wanted = torch.tensor([0, 1, 2, 3, 4, -1])
    assert replay_dflash.rank(logits, wanted, logits.topk(4).values).tolist() == [-1, 0, 1, 3, 2, -1]
    assert replay_dflash.rank(logits, wanted, logits.topk(2).values).tolist() == [-1, 0, 1, -1, -1, -1]


@pytest.mark.parametrize("k", [DEPTH - 1, DEPTH + 1])
def test_a_block_of_another_length_is_refused(folder, target, k):
    with pytest.raises(ValueError, match=f"drafts {DEPTH} tokens a round, not {k}"):
        DFlashDrafter(folder, target).table([], k)


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
        {"speculators_model_type": "dspark"},
        {"model_type": "llama"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sample_from_anchor": True},
        {"sliding_window_non_causal": False},
        {"is_causal": True},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_type": "llama3"},
        {"rope_theta": None},
        {"head_dim": None},
        {"block_size": None},
        {"mask_token_id": None},
        {"num_hidden_layers": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_that_asks_for_another_forward_is_refused_by_its_key(folder, target, tmp_path, change):
    copy_folder(folder, tmp_path, **change)
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))} "):
        DFlashDrafter(tmp_path, target)


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight", "layers.1.self_attn.q_norm.weight", "embed_tokens.weight"])
def test_a_missing_or_unknown_tensor_is_refused_by_its_name(folder, target, tmp_path, name):
    copy_folder(folder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        DFlashDrafter(tmp_path, target)


def test_a_target_of_another_size_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=rf"an embedding of \[150, {HIDDEN}\], not \[{VOCABULARY}, {HIDDEN}\]"):
        DFlashDrafter(folder, random_target(tmp_path, vocabulary=150))


def test_states_of_other_layers_are_refused(folder, target):
    two_layers = ReplayRow(torch.zeros(10, dtype=torch.long), torch.zeros(9, 2, HIDDEN), 6, 4)
    with pytest.raises(ValueError, match=f"{2 * HIDDEN} values a position, not {3 * HIDDEN}"):
        replay.acceptance_table(DFlashDrafter(folder, target), [two_layers], DEPTH)
