# SPDX-License-Identifier: Apache-2.0
"""The probes find nothing in the real data path and forward, and name what is wrong in a changed one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import PROBED, random_probe, random_target
from pilotfish import eagle3, probes, probes_eagle3
from pilotfish.heads import Head

VOCABULARY, DRAFT_VOCABULARY = 200, 80
SPEC = {
    "algorithm": "eagle3",
    "trust_remote_code": False,
    "speculative_tokens": 3,
    "seed": 3,
    "loss": "kl_div",
    "ttt_steps": 3,
    "ttt_step_loss_decay": 0.8,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", VOCABULARY)


@pytest.fixture
def probe(target: Path, tmp_path: Path) -> Callable[..., probes.Probe]:
    """A function that makes a probe over random rows; keywords change the spec."""
    return lambda **spec: random_probe(tmp_path, target, {**SPEC, **spec}, VOCABULARY, DRAFT_VOCABULARY)


@pytest.mark.parametrize("spec", [{}, {"loss": "ce"}, {"ttt_steps": 5}, {"ttt_steps": 1, "seed": 4}], ids=str)
def test_the_real_path_passes_every_probe(probe, target: Path, spec: dict):
    assert list(probe(**spec).faults(Head(target))) == []


def test_the_documents_are_the_start_of_the_two_longest_responses(probe):
    documents = probe().documents
    assert [each.row for each in documents] == [3, 2]
    for each in documents:
        stored = PROBED[each.row]
        assert each.tokens_T.tolist() == stored["prompt_token_ids"][-8:] + stored["token_ids"][:12]
        assert each.prompt_length == 8


def test_a_future_that_is_seen_is_told_with_its_slot(probe, target: Path, monkeypatch: pytest.MonkeyPatch):
    build = eagle3.Eagle3DraftModel._build_attn_mask
    monkeypatch.setattr(
        eagle3.Eagle3DraftModel, "_build_attn_mask", lambda *args, **more: torch.zeros_like(build(*args, **more))
    )
    assert any("changes the logits of slot 0 (step 0): not causal" in fault for fault in probe().faults(Head(target)))


def shifting(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have the shift change what it gives under these names once more."""
    shift = eagle3.shift_batch

    def changed(sample: dict) -> dict:
        shifted = shift(sample)
        return shifted | {name: change(shifted[name]) for name, change in changes.items()}

    monkeypatch.setattr(eagle3, "shift_batch", changed)


@pytest.mark.parametrize(
    ("name", "turn", "says"),
    [
        ("input_ids", -1, "slot 0: its input token is that of position 2, not t+1's"),
        ("hidden_states", 1, "slot 0: its conditioning is that of position 17, not t+0's"),
        ("verifier_last_hidden_states", -2, "slot 0: its label state is that of position 3, not t+1's"),
        ("loss_mask", -1, "positions that only training uses [(7, 8)], only serving [(18, 19)]"),
    ],
)
def test_what_is_out_of_line_is_told_with_its_slot_and_where_it_comes_from(
    probe, monkeypatch: pytest.MonkeyPatch, name: str, turn: int, says: str
):
    shifting(monkeypatch, **{name: lambda values: values.roll(turn, 0)})
    found = list(probes_eagle3.line_up_faults(probe()))
    assert len(found) == 2
    assert says in found[0] and "document 0 (row 3)" in found[0] and "document 1 (row 2)" in found[1]


def test_noise_that_depends_on_nothing_but_the_seed_is_found_in_the_labels(probe, monkeypatch: pytest.MonkeyPatch):
    shifting(monkeypatch, verifier_last_hidden_states=lambda states: states + torch.randn(states.shape))
    made = probe()
    assert any("noise reaches the labels" in fault for fault in probes_eagle3.label_faults(made))
    assert any("that of no position" in fault for fault in probes_eagle3.line_up_faults(made))


@pytest.mark.parametrize(("asked", "taken"), [("ce", "kl_div"), ("kl_div", "ce")])
def test_another_loss_than_was_asked_for_is_named(
    probe, target: Path, monkeypatch: pytest.MonkeyPatch, asked: str, taken: str
):
    arguments = eagle3.call_arguments
    monkeypatch.setattr(eagle3, "call_arguments", lambda spec: arguments({**spec, "loss": taken}))
    (fault,) = probe(loss=asked).faults(Head(target))
    assert f"where {asked}, as asked, is" in fault and fault.endswith(f"it is that of {taken}")
