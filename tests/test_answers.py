# SPDX-License-Identifier: Apache-2.0
"""The last states of every row lead to its recorded tokens, and to those of no other."""

import pytest
import torch

from pilotfish.answers import POSITIONS, AnswerProbe
from pilotfish.errors import UserError

VOCABULARY, PROMPT, TOKENS = 1024, 5, 25


class FakeGolden:
    """A head that reads logits off the states; the norm turns the order of the vocabulary round."""

    def logits(self, states: torch.Tensor, normed: bool = True) -> torch.Tensor:
        return states.flip(1) if normed else states


def row(seed: int, temperature: float = 0.0) -> tuple[list[int], torch.Tensor]:
    """Tokens [T + 1] drawn from the logits of the states [T, V] before them."""
    draw = torch.Generator().manual_seed(seed)
    # Cubes, since a few tokens of a language model stand far above the others.
    states = 0.5 * torch.randn(TOKENS, VOCABULARY, generator=draw) ** 3
    logits = FakeGolden().logits(states)
    drawn = (
        torch.multinomial((logits / temperature).softmax(1), 1, generator=draw)[:, 0]
        if temperature
        else logits.argmax(1)
    )
    return [0, *drawn.tolist()], states


def taken(seeds, temperature: float | None = 0.0, sampled: float = 0.0, other: frozenset = frozenset()) -> AnswerProbe:
    """A probe over these rows; those in `other` have the states of another row."""
    probe = AnswerProbe(FakeGolden(), temperature, "folder")
    for seed in seeds:
        tokens, states = row(seed, sampled)
        probe.take(f"row {seed} of a shard", tokens, PROMPT, row(1000 + seed)[1] if seed in other else states)
    return probe


def test_greedy_rows_pass_and_the_figures_say_how_well():
    probe = taken(range(40))
    probe.refuse()
    found = probe.statistics()
    assert (found["positions"], found["right"], found["right_with_norm"]) == (40 * POSITIONS, 1.0, 1.0)
    assert found["right_without_norm"] < 0.2


def test_sampled_rows_pass_at_their_temperature_and_not_as_greedy_ones():
    taken(range(40), temperature=1.0, sampled=1.0).refuse()
    with pytest.raises(UserError, match=r"folder, last layer: 0\.\d+ of 320 recorded tokens .* where 0\.9 must"):
        taken(range(40), temperature=0.0, sampled=1.0).refuse()


def test_answers_that_the_data_give_need_not_be_the_likeliest_but_of_these_states():
    taken(range(40), temperature=None, sampled=1.0).refuse()
    with pytest.raises(UserError, match=r"where 0\.3 must"):
        taken(range(40), temperature=None, sampled=1.0, other=frozenset(range(40))).refuse()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_the_states_of_another_request_is_named(temperature: float):
    probe = taken(range(40), temperature, temperature, other=frozenset({7}))
    with pytest.raises(UserError, match=r"(?s)^folder: 1 check.*  row 7 of a shard, last layer: .*another request"):
        probe.refuse()


def test_states_that_are_normed_already_are_told():
    probe = AnswerProbe(FakeGolden(), 0.0, "folder")
    for seed in range(40):
        _, states = row(seed)
        if seed > 0:  # the norm makes no difference to most
            states = states + states.flip(1)
        probe.take(f"row {seed}", [0, *states.argmax(1).tolist()], PROMPT, states)
    with pytest.raises(
        UserError, match=r"folder, last layer: 40 of 40 .* without the final norm, 39 with it: .* already"
    ):
        probe.refuse()


def test_a_response_of_one_token_is_looked_at_once():
    probe = AnswerProbe(FakeGolden(), 0.0, "folder")
    tokens, states = row(0)
    probe.take("row 0", tokens, TOKENS, states)
    probe.refuse()
    assert probe.statistics()["positions"] == 1


def test_only_states_that_lead_to_the_response_are_looked_at():
    tokens, states = row(0)
    states[: PROMPT - 1] = torch.nan
    probe = AnswerProbe(FakeGolden(), 0.0, "folder")
    probe.take("row 0", tokens, PROMPT, states)
    probe.refuse()
    assert probe.statistics()["right"] == 1.0
