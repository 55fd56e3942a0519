# SPDX-License-Identifier: Apache-2.0
"""The declared layer must match what transformers computes best of all, and clearly."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers import random_ids
from pilotfish import golden
from pilotfish.errors import UserError

L, HIDDEN = 6, 16


class FakeGolden:
    """Stands for a target of L layers: each adds a tenth to the stream, and the final norm doubles it."""

    def states(self, ids: Sequence[int]) -> torch.Tensor:
        draw = torch.Generator().manual_seed(sum(ids))
        states = torch.randn(L + 1, len(ids), HIDDEN, generator=draw)
        states[1:] *= 0.1
        states = states.cumsum(0)
        return torch.cat([states, 2 * states[-1:]])


def captured(ids: list[int], layers: Sequence[int], noise: float = 0.005) -> torch.Tensor:
    """States [T, layers, H] as an engine with a little noise would write them."""
    states = FakeGolden().states(ids)[list(layers)].transpose(0, 1)
    return (states * (1 + noise * torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))).bfloat16()


def probe(stored: Sequence[int], declared: Sequence[int] = (2, 3, L), rows: int = 3, **made) -> golden.LayerProbe:
    """A probe that has seen rows with the `stored` layers where others are declared."""
    probe = golden.LayerProbe(FakeGolden(), declared)
    for row in range(rows):
        ids = random_ids(30, seed=row)
        probe.take(f"row {row} of a shard", ids, captured(ids, stored, **made))
    return probe


def test_the_declared_layers_pass_and_the_figures_say_by_how_much():
    found = probe((2, 3, L))
    found.refuse("folder")
    statistics = found.statistics()
    assert statistics["rows"] == 3
    assert list(statistics["layers"]) == ["2", "3", "6"]
    for layer, next_best in (("2", ("h(1)", "h(3)")), ("6", ("h(5)",))):
        assert statistics["layers"][layer]["next_best"] in next_best
        assert statistics["layers"][layer]["error"] < 0.02 < statistics["layers"][layer]["next_error"]


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ((3, 3, L), r"layer h\(2\) of 3 rows: holds h\(3\) .*declared h\(2\) .*off by \+1"),
        ((2, 2, L), r"layer h\(3\) of 3 rows: holds h\(2\) .*off by -1"),
        ((2, 3, L - 1), r"layer h\(6\) of 3 rows: holds h\(5\)"),
        ((2, 3, L + 1), r"layer h\(6\) of 3 rows: holds h\(6\) after the final norm"),
    ],
)
def test_another_layer_is_named_with_the_one_that_was_declared(stored: tuple, said: str):
    with pytest.raises(UserError, match=rf"(?s)^folder: 1 check.*{said}.*delete the part's index.json"):
        probe(stored).refuse("folder")


def test_states_that_match_no_layer_are_those_of_another_target():
    with pytest.raises(UserError, match="states of another target, or of other tokens"):
        probe((2, 3, L), noise=1.0).refuse("folder")


def test_one_row_that_differs_from_the_others_is_named():
    found = probe((2, 3, L))
    found.take("row 9 of a shard", random_ids(30, seed=9), captured(random_ids(30, seed=8), (2, 3, L)))
    with pytest.raises(UserError, match=r"folder: 3 check\(s\) failed:\n  row 9 of a shard, layer h\(2\)"):
        found.refuse("folder")


def test_layers_that_cannot_be_told_apart_are_refused():
    errors = torch.tensor([0.9, 0.05, 0.06, 0.9, 0.9])
    assert golden.layer_fault(errors, 1) == "declared h(1) (error 0.050) cannot be told from h(2)"
    assert golden.layer_fault(torch.tensor([0.9, 0.02, 0.06, 0.9, 0.9]), 1) is None


def test_one_token_with_a_huge_norm_hides_nothing():
    ids = random_ids(30, seed=0)
    candidates, stored = FakeGolden().states(ids), captured(ids, [2])
    stored[0] *= 1000
    assert golden.layer_errors(stored, candidates)[0].argmin() == 2


def test_no_more_than_the_first_tokens_of_a_row_are_recomputed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(golden, "PROBE_TOKENS", 8)
    asked = []
    monkeypatch.setattr(
        FakeGolden, "states", lambda self, ids: asked.append(len(ids)) or torch.ones(L + 2, len(ids), 4)
    )
    golden.LayerProbe(FakeGolden(), [1]).take("row 0", random_ids(30, seed=0), torch.ones(30, 1, 4))
    assert asked == [8]


@pytest.mark.parametrize(
    ("rows", "parts", "places"),
    [(1, 1, {0}), (2, 1, {0, 1}), (640, 1, {0, 320, 639}), (10, 5, {0, 2, 4, 7, 9})],
)
def test_recomputed_rows_are_spread_over_the_split_and_its_parts(rows: int, parts: int, places: set):
    assert golden.probe_rows(rows, parts) == places


def test_states_and_logits_are_those_of_transformers(tiny_target: Path):
    target = golden.Golden(tiny_target, torch.float32, trust_remote_code=False, gpu=False)
    ids = random_ids(20, seed=3)
    with torch.no_grad():
        wanted = target.model(torch.tensor([ids]), output_hidden_states=True)
    states = target.states(ids)
    assert torch.equal(states[0], wanted.hidden_states[0][0])
    assert torch.allclose(states[-1], wanted.hidden_states[-1][0], atol=1e-5)
    assert torch.allclose(target.logits(states[-2]), wanted.logits[0], atol=1e-3)
    assert torch.allclose(target.logits(states[-1], normed=False), wanted.logits[0], atol=1e-3)


def test_a_folder_that_transformers_cannot_load_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=f"{tmp_path}: transformers cannot load it .*give the job the memory"):
        golden.Golden(tmp_path, torch.bfloat16, trust_remote_code=False, gpu=False)
