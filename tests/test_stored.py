# SPDX-License-Identifier: Apache-2.0
"""Texts that part are judged by the target's logits at the stored state from which their tokens were drawn."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import HIDDEN, LAYERS, arrow_of, captured_folder, random_ids, random_states, response
from pilotfish import heads, manifest, samples, shards, stored

VOCABULARY, LAST = 200, LAYERS[-1]
PROMPT, RESPONSE = random_ids(6, seed=1), random_ids(9, seed=2)


@pytest.fixture
def rows(tmp_path: Path) -> stored.StoredRows:
    """One row's states and sample, of a random target."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    folder = captured_folder(tmp_path / "states" / "part", {0: PROMPT + RESPONSE, 1: PROMPT + RESPONSE[:3]})
    paths = [folder / shards.INDEX]
    manifest.write(
        tmp_path / "states" / "manifest.json", schema="hidden_states", paths=paths, spec="{}", code="", statistics={}
    )
    path = arrow_of(tmp_path / "samples", [response(0, PROMPT, RESPONSE), response(1, PROMPT, RESPONSE[:3])])
    assert len(samples.load(path)) == 2
    states = tmp_path / "states" / "manifest.json"
    return stored.StoredRows(path, states, LAST, lambda: heads.Head(tmp_path / "model"), range(1))


def answer(ids: list[int]) -> dict:
    return {"row": 0, "token_ids": ids}


def test_only_the_rows_that_were_served_are_kept(rows: stored.StoredRows):
    assert rows.prompts == {0: PROMPT}
    assert rows.responses == {0: RESPONSE}


def test_equal_texts_need_no_judge(rows: stored.StoredRows):
    found = rows.judged([answer(RESPONSE)], [answer(RESPONSE)])
    assert found == ([], {"rows_differing": 0, "rows_judged": 0, "largest_gap": None})


@pytest.mark.parametrize("position", [0, 4, 8])
def test_a_gap_is_taken_at_the_state_before_the_token(
    rows: stored.StoredRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
):
    monkeypatch.setattr(stored, "AGREEMENT_MIN", 0)  # random tokens are not the likeliest ones
    other = [*RESPONSE[:position], (RESPONSE[position] + 1) % VOCABULARY]
    states = random_states((PROMPT + RESPONSE)[:-1]).hidden_states[:, LAYERS.index(LAST)]
    expected = heads.Head(tmp_path / "model").gaps(
        states[len(PROMPT) + position - 1][None], [(other[-1], RESPONSE[position])]
    )
    ((departure, gap),), counts = rows.judged([answer(other)], [answer(RESPONSE)])
    assert (departure.row, departure.position) == (0, position)
    assert [gap] == expected
    assert counts == {"rows_differing": 1, "rows_judged": 1, "largest_gap": round(gap, 4)}


def test_a_head_that_did_not_give_the_stored_tokens_judges_nothing(rows: stored.StoredRows):
    other = [*RESPONSE[:4], (RESPONSE[4] + 1) % VOCABULARY]
    found = rows.judged([answer(other)], [answer(RESPONSE)])
    assert found == ([], {"rows_differing": 1, "rows_judged": 0, "largest_gap": None})
