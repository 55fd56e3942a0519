# SPDX-License-Identifier: Apache-2.0
"""A stretch that noise cannot change is chosen and learnt by heart, and what comes back is judged."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from helpers import LAYERS, random_ids, random_states, random_target
from pilotfish import constants, excerpts, heads, rehearsal, rehearsal_checks, shards, training
from pilotfish.errors import UserError

VOCABULARY, K = 200, 3
SHARED = {"trust_remote_code": False, "seed": 0, "speculative_tokens": K}
SPECS = {
    "eagle3": {"algorithm": "eagle3", "loss": "kl_div", "ttt_steps": 3, "ttt_step_loss_decay": 1.0, **SHARED},
    # With fewer anchors than places, and noise, neither of which a rehearsal has.
    "dflash": {
        "algorithm": "dflash", "draft_layers": 1, "block_size": K + 1, "mask_token": 5, "gamma": 4.0, "anchors": 2,
        "loss": {"hard": 1.0}, "noise": 0.5, **SHARED,
    },
}  # fmt: skip
ALL = torch.ones(VOCABULARY, dtype=torch.bool)
PROMPT = 6


class Rows(dict):
    """States by row, as a reader of shards gives them."""

    read = dict.__getitem__


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", VOCABULARY)


def greedy_row(target: Path, row: int, length: int = 60, clear: float = 1.0) -> tuple[dict, shards.RowStates]:
    """A sample whose every response token is the target's first choice after the state before it.

    The smaller `clear`, the narrower the choice.
    """
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    ids = random_ids(PROMPT + length, row)
    states = random_states(ids[:-1]).hidden_states
    towards = head[ids[PROMPT:]] / head.std()
    states[PROMPT - 1 :, -1] = (clear * towards + (1 - clear) * states[PROMPT - 1 :, -1].float()).bfloat16()
    ids[PROMPT:] = heads.Head(target).logits(states[PROMPT - 1 :, -1]).argmax(1).tolist()
    sample = {"row": row, "input_ids": ids, "prompt_length": PROMPT}
    return sample, shards.RowStates(torch.tensor(ids[:-1]), states)


def choose(target: Path, rows: list, t2d: torch.Tensor = ALL) -> excerpts.Excerpt:
    reader = Rows({sample["row"]: states for sample, states in rows})
    return rehearsal.choose((sample for sample, _ in rows), reader, heads.Head(target), t2d, K)


def margins(target: Path, excerpt: excerpts.Excerpt) -> torch.Tensor:
    """How far each token of the stretch lies above the second choice."""
    logits = heads.Head(target).logits(excerpt.states_TLH[excerpt.prompt_length - 1 :, -1])
    top = logits.topk(2, 1)
    assert top.indices[:, 0].tolist() == excerpt.response
    return (top.values[:, 0] - top.values[:, 1]) / logits.std(1)


def test_the_stretch_is_the_one_with_the_widest_smallest_margin(target: Path):
    rows = [greedy_row(target, row) for row in range(3)]
    chosen = choose(target, rows)
    assert len(chosen.response) == rehearsal.TOKENS
    best = margins(target, chosen).min()
    for sample, states in rows:
        for start in range(PROMPT, len(sample["input_ids"]) - rehearsal.TOKENS + 1):
            other = excerpts.cut(sample, states, 0, start, start + rehearsal.TOKENS)
            assert margins(target, other).min() <= best


def test_a_token_that_is_no_first_choice_or_not_in_the_draft_vocabulary_is_not_in_the_stretch(target: Path):
    sample, states = greedy_row(target, 0, length=90)
    tokens = sample["input_ids"]
    tokens[PROMPT + 20] = (tokens[PROMPT + 20] + 1) % VOCABULARY
    unknown = tokens[PROMPT + 85]
    t2d = ALL.clone().index_fill(0, torch.tensor([unknown]), False)
    chosen = choose(target, [(sample, states)], t2d)
    assert chosen.prompt_length > PROMPT + 20
    assert unknown not in chosen.response


def test_a_shorter_stretch_is_taken_where_there_is_no_long_one(target: Path):
    assert len(choose(target, [greedy_row(target, 0, length=30)]).response) == rehearsal.shortest(K) == 17


def test_a_shorter_stretch_is_taken_where_the_long_ones_hang_on_narrow_choices(target: Path):
    narrow = greedy_row(target, 0, clear=0.0)
    chosen = choose(target, [narrow])
    assert len(chosen.response) == rehearsal.shortest(K)
    assert 0 < margins(target, chosen).min() < rehearsal.MARGIN


def test_without_a_stretch_the_error_says_what_to_change(target: Path):
    with pytest.raises(UserError, match=r"none of the first 1 training samples has 17 tokens .*raise draft_vocab_size"):
        choose(target, [greedy_row(target, 0, length=16)])


@pytest.fixture(scope="module", params=SPECS)
def learnt(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A drafter that knows a stretch by heart, exported, and what a right engine would say of it."""
    folder, spec = tmp_path_factory.mktemp("learnt"), SPECS[request.param]
    excerpt = choose(target, [greedy_row(target, 0)])
    maps = {"d2t": torch.zeros(VOCABULARY, dtype=torch.long), "t2d": ALL}
    model = training.build_drafter(spec, target, LAYERS[:3], maps)
    log = rehearsal.memorise(model, excerpt, spec, folder)
    training.export(model, folder)
    served = {
        "training": log,
        "token_ids": excerpt.response,
        "per_step_accepted": 10 * [K],
        "engine": {
            "drafter": constants.of_model(model).model_dump(),
            "speculative": {"num_speculative_tokens": K},
        },
    }
    return SimpleNamespace(folder=folder, excerpt=excerpt, served=served, target=target)


def faults(learnt: SimpleNamespace, **changes) -> list[str]:
    """What the checks say when the engine had said something else."""
    served = {**learnt.served, **changes}
    return [
        *rehearsal_checks.learning_faults(served),
        *rehearsal_checks.round_faults(served, learnt.excerpt, learnt.folder, learnt.target, K),
        *rehearsal_checks.constants_faults(served, learnt.folder, K),
    ]


def test_a_stretch_is_learnt_until_no_step_is_wrong(learnt: SimpleNamespace):
    log = learnt.served["training"]
    assert len(log) < rehearsal.STEPS
    assert all(row["accuracy"] == [1, 1, 1] for row in log[-rehearsal.SURE :])
    # DFlash's head is the target's, here too small for a loss near nothing.
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_a_rehearsal_trains_at_every_place_without_noise():
    spec = rehearsal.everywhere(SPECS["dflash"], 40)
    assert spec == {**SPECS["dflash"], "anchors": 40, "noise": 0.0}


def test_full_blocks_that_the_replay_has_too_pass(learnt: SimpleNamespace):
    assert faults(learnt) == []


def test_a_block_that_is_not_full_is_told_with_its_place(learnt: SimpleNamespace):
    found = faults(learnt, per_step_accepted=[K, K, 1, 1, *7 * [K]])
    assert "round 2 accepted 1 of 3 tokens of a row known by heart (from its response token 8)" in found[0]
    assert "round 2: the replay has (8, 3) (start, accepted) where the engine has (8, 1)" in found[1]


def test_too_few_rounds_within_the_shared_text_are_told(learnt: SimpleNamespace):
    tokens = learnt.excerpt.response
    (fault,) = faults(learnt, token_ids=[*tokens[:10], (tokens[10] + 1) % VOCABULARY, *tokens[11:]])
    assert "2 rounds within the 10 tokens that the engine's text shares with the row's 40, 4 needed" in fault


def test_a_stretch_that_was_not_learnt_is_told_with_its_loss(learnt: SimpleNamespace):
    log = [*learnt.served["training"], {"loss": 3.5, "accuracy": [1.0, 0.5, 0.25]}]
    (fault,) = faults(learnt, training=log)
    assert f"after {len(log)} steps on one row the loss is 3.5, accuracy by step [1.0, 0.5, 0.25]" in fault


def test_an_engine_with_other_constants_is_told(learnt: SimpleNamespace):
    seen = {**learnt.served["engine"]["drafter"], "rope_theta": 5.0}
    (fault,) = faults(learnt, engine={**learnt.served["engine"], "drafter": seen})
    assert "the engine saw rope_theta 5.0, not 10000.0 as trained" in fault


def test_rows_that_have_changed_since_are_refused(learnt: SimpleNamespace, target: Path):
    sample, states = greedy_row(target, 0)
    excerpt = learnt.excerpt
    served = {"row": 0, "prompt_length": excerpt.prompt_length, "tokens": excerpt.response}
    rows = Rows({0: states})
    found = rehearsal_checks.stored_excerpt(served, [sample], rows, Path("served.json"))
    assert torch.equal(found.tokens_T, excerpt.tokens_T) and torch.equal(found.states_TLH, excerpt.states_TLH)
    sample["input_ids"][excerpt.prompt_length] += 1
    with pytest.raises(UserError, match=r"served\.json: no training sample is row 0 .*delete the folder and run again"):
        rehearsal_checks.stored_excerpt(served, [sample], rows, Path("served.json"))
