# SPDX-License-Identifier: Apache-2.0
"""What is stored of the rows that were served, and the judgement of texts that part by the target's own logits."""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from pilotfish import agreement, samples, shards
from pilotfish.agreement import Departure
from pilotfish.heads import Head

logger = logging.getLogger(__name__)

AGREEMENT_MIN = 0.5  # below it the head that was read is not the target's (a family with another norm): no judge


class StoredRows:
    """Prompts, responses and last states h(L) of some rows of a set; the samples are streamed, only these kept.

    `head` reads the target's head; it is asked only once two texts part.
    """

    def __init__(self, path: Path, states: Path, layer: int, head: Callable[[], Head], rows: Collection[int]):
        self.prompts: dict[int, list[int]] = {}
        self.responses: dict[int, list[int]] = {}
        for sample in samples.load(path):
            if sample["row"] in rows:
                split, ids = sample["prompt_length"], sample["input_ids"]
                self.prompts[sample["row"]], self.responses[sample["row"]] = ids[:split], ids[split:]
        self._reader = shards.ShardReader(shards.verified_indexes(states), [layer])
        self._head = head

    def judged(self, left: Sequence[dict], right: Sequence[dict]) -> tuple[list[tuple[Departure, float]], dict]:
        """Departures of two measurements whose gap is known, with it; and the counts and the largest gap."""
        parted = agreement.departures(left, right, self.responses)
        known = [each for each in parted if each.comparable]
        gaps = self._gaps(known) if known else []
        return list(zip(known, gaps, strict=bool(gaps))), {
            "rows_differing": len(parted),
            "rows_judged": len(gaps),
            "largest_gap": round(max(gaps), 4) if gaps else None,
        }

    def _gaps(self, known: Sequence[Departure]) -> list[float]:
        head = self._head()
        before = [each for each in known if each.position]
        tokens = [self.responses[each.row][each.position - 1] for each in before]
        if before and head.agreement(self._states(before, -1), tokens) < AGREEMENT_MIN:
            logger.warning("the target's head, as read, is not the one that answered; no text is judged by it")
            return []
        return head.gaps(self._states(known, 0), [each.tokens for each in known])

    def _states(self, parted: Sequence[Departure], shift: int) -> torch.Tensor:
        """States [N, H] from which the tokens at the departures, or `shift` later, are drawn."""
        # Token p of a response is drawn from the state of the token before it.
        places = [(each.row, len(self.prompts[each.row]) + each.position + shift - 1) for each in parted]
        return torch.stack([self._reader.read(row).hidden_states[place, 0] for row, place in places])
