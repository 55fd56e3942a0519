# SPDX-License-Identifier: Apache-2.0
"""Whether captured states lead to the recorded tokens, through the target's own norm and head."""

from collections.abc import Sequence

import torch

from pilotfish.errors import UserError
from pilotfish.golden import Golden
from pilotfish.states import RECAPTURE
from pilotfish.tensors import Faults

POSITIONS = 8  # of each response whose token is looked at
AT_ONCE = 256  # positions whose logits are in memory
LIKELIEST = 20
# Shares measured: greedy 0.99, without the norm 0.30, other rows' states 0.04; sampled at temperature 1, among the
# 20 likeliest, 0.94 and 0.17.
MIN_GREEDY, MIN_SAMPLED = 0.9, 0.7
# What others wrote: solutions of HumanEval after their problems 0.86 of a row's 20 likeliest and a gap of 0.5 to 0.9,
# prose about something else than was asked 0.43 and 1.7 to 2.7; other rows' states 0.14 and 2.7 to 4.6.
MIN_GIVEN, MAX_GAP_GIVEN = 0.3, 3.0
# Mean gap of a row's tokens to the likeliest ones, in standard deviations of the logits, so that a head's scale
# does not matter. Measured: greedy at most 0.01, sampled at temperature 1 at most 1.3; other rows' states 1.7 to 9.
MAX_GAP, MAX_GAP_BY_TEMPERATURE = 0.5, 2.0
EVERY = 16  # of the logits, enough for their standard deviation


def _limits(temperature: float | None) -> tuple[float, float]:
    """The least share of right tokens over a split, and the largest gap of a row; of given ones where None."""
    if temperature is None:
        return MIN_GIVEN, MAX_GAP_GIVEN
    return MIN_SAMPLED if temperature else MIN_GREEDY, MAX_GAP + MAX_GAP_BY_TEMPERATURE * temperature


class AnswerProbe:
    """Takes the last states and the tokens of one row after another, and looks at a few positions of each.

    Greedy tokens are compared with the likeliest one, sampled ones with the 20 likeliest; so are those that the data
    give (`temperature` None), which the target would often not have said.
    """

    def __init__(self, golden: Golden, temperature: float | None, where: object):
        self._golden, self._greedy = golden, temperature == 0
        self._least, self._max_gap = _limits(temperature)
        self._where, self._faults = where, Faults(where)
        self._waiting: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._positions = self._right = 0
        # With and without the norm are compared at the middle position of each row: all of them would double the cost.
        self._middles = self._right_of_middles = self._right_unnormed = 0
        self._largest_gap = 0.0

    def take(self, place: str, tokens: Sequence[int], prompt_length: int, states: torch.Tensor) -> None:
        """A row with tokens [T + 1] and h(L) [T, H], where state t leads to token t + 1; `place` says where it lies."""
        first, last = prompt_length - 1, len(states) - 1
        places = torch.linspace(first, last, min(POSITIONS, last - first + 1)).round().long()
        self._waiting.append((place, states[places], torch.tensor(tokens)[places + 1]))
        if sum(len(each) for _, _, each in self._waiting) >= AT_ONCE:
            self._look()

    def _look(self) -> None:
        if not self._waiting:
            return
        places, states, tokens = zip(*self._waiting, strict=True)
        self._waiting = []
        lengths = torch.tensor([len(each) for each in tokens])
        states, tokens = torch.cat(states), torch.cat(tokens)
        right, gaps = self._compare(self._golden.logits(states), tokens)
        for place, own, gap in zip(places, right.split(lengths.tolist()), gaps.split(lengths.tolist()), strict=True):
            self._check_row(place, own, gap.mean().item())
        middles = lengths.cumsum(0) - (lengths + 1) // 2
        unnormed, _ = self._compare(self._golden.logits(states[middles], normed=False), tokens[middles])
        self._positions += len(right)
        self._right += int(right.sum())
        self._middles += len(middles)
        self._right_of_middles += int(right[middles].sum())
        self._right_unnormed += int(unnormed.sum())

    def _check_row(self, place: str, right: torch.Tensor, gap: float) -> None:
        self._largest_gap = max(self._largest_gap, gap)
        if gap > self._max_gap:
            self._faults.add(
                f"{place}, last layer: {int(right.sum())} of {len(right)} recorded tokens follow from its states, "
                f"and on average they lie {gap:.1f} deviations behind the likeliest (at most {self._max_gap:.1f}): "
                "states of another request"
            )

    def _compare(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each token is right, and its gap to the likeliest in deviations of the logits: [N] each."""
        own = logits.gather(1, tokens.to(logits.device)[:, None])
        best = logits.amax(1, keepdim=True)
        gaps = (best - own).float()[:, 0] / logits[:, ::EVERY].float().std(1).clamp_min(1e-9)
        # A tie in bf16 may have gone either way in the engine.
        right = own >= best if self._greedy else (logits > own).sum(1, keepdim=True) < LIKELIEST
        return right[:, 0].cpu(), gaps.cpu()

    def refuse(self) -> None:
        """UserError where tokens and states do not belong together, over the split or in a row."""
        self._look()
        share, least = self._right / self._positions, self._least
        if share < least:
            raise UserError(
                f"{self._where}, last layer: {share:.2f} of {self._positions} recorded tokens follow from the states, "
                f"where {least} must: states of another target, or not those before its final norm. {RECAPTURE}"
            )
        if self._right_of_middles < self._right_unnormed:
            raise UserError(
                f"{self._where}, last layer: {self._right_unnormed} of {self._middles} recorded tokens follow from the "
                f"states without the final norm, {self._right_of_middles} with it: they are normed already. {RECAPTURE}"
            )
        self._faults.refuse(RECAPTURE)

    def statistics(self) -> dict:
        """Positions, the share whose token is right, and of one position a row the share with and without the norm."""
        return {
            "positions": self._positions,
            "right": round(self._right / self._positions, 3),
            "right_with_norm": round(self._right_of_middles / self._middles, 3),
            "right_without_norm": round(self._right_unnormed / self._middles, 3),
            "largest_row_gap": round(self._largest_gap, 3),
        }
