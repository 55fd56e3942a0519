# SPDX-License-Identifier: Apache-2.0
"""The target's logits out of stored states: its final norm and its head, read from its files, nothing else loaded."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open

from pilotfish import files
from pilotfish.errors import UserError

ROWS_AT_ONCE = 8192  # of the head, in fp32 at a time
NORM = re.compile(r"^(?!.*\blayers\.).*\bnorm\.weight$")
EMBEDDING = re.compile(r"(^|.*\.)embed_tokens\.weight$")
HEADS = (re.compile(r"(^|.*\.)lm_head\.weight$"), EMBEDDING)  # own, then tied
ADDS_ONE = "gemma"  # families whose norms scale by 1 + weight


class TargetTensors:
    """Norm, head and embedding of the target in `folder`, found by their usual names and read in slices.

    Raises UserError where one of them is asked for and not found.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file_of = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as held:
                self._file_of.update(dict.fromkeys(held.keys(), path))

    def norm(self) -> torch.Tensor:
        """Weight [H] of the final norm, in fp32."""
        name = self._find(NORM)
        with safe_open(self._file_of[name], framework="pt") as held:
            return held.get_tensor(name).float()

    def head(self) -> Iterator[torch.Tensor]:
        """Rows of the head [V, H], some at a time; the embedding's where the two are tied."""
        return (rows for _, rows in self._slices(self._find(*HEADS)))

    def head_rows(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """The head's rows [N, H] of some tokens in rising order."""
        found = []
        for start, rows in self._slices(self._find(*HEADS)):
            inside = tokens_N[(tokens_N >= start) & (tokens_N < start + len(rows))]
            found.append(rows[inside - start])
        return torch.cat(found)

    def embedding(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows of the embedding [V, H], some at a time, each time with the number of the first."""
        return self._slices(self._find(EMBEDDING))

    def _slices(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        with safe_open(self._file_of[name], framework="pt") as held:
            rows = held.get_slice(name)
            for start in range(0, rows.get_shape()[0], ROWS_AT_ONCE):
                yield start, rows[start : start + ROWS_AT_ONCE]

    def _find(self, *patterns: re.Pattern) -> str:
        for pattern in patterns:
            found = [name for name in self._file_of if pattern.match(name)]
            if len(found) == 1:
                return found[0]
        raise UserError(f"{self._folder}: no tensor, or several, like {patterns[0].pattern!r}; is it a language model?")


class Head:
    """RMS norm and head of the target in `folder`, as `logits = head(norm(h(L)))`, in fp32."""

    def __init__(self, folder: Path):
        config = files.read_json(folder / "config.json")
        text = config.get("text_config") or config
        self.eps = text.get("rms_norm_eps", 1e-6)
        self._tensors = TargetTensors(folder)
        self.weight_H = self._tensors.norm()
        if text["model_type"].startswith(ADDS_ONE):
            self.weight_H += 1

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of pre-norm states [N, H]; the head is read in slices."""
        states_NH = F.rms_norm(states_NH.float(), self.weight_H.shape, self.weight_H, self.eps)
        return torch.cat([states_NH @ rows.float().T for rows in self._tensors.head()], 1)

    def gaps(self, states_NH: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """How far the lesser of two tokens lies below the likeliest one, in standard deviations of the logits."""
        logits_NV = self.logits(states_NH)
        lesser_N = logits_NV.gather(1, torch.tensor(pairs)).amin(1)
        return ((logits_NV.amax(1) - lesser_N) / logits_NV.std(1)).tolist()

    def agreement(self, states_NH: torch.Tensor, tokens: Sequence[int]) -> float:
        """Share of states whose likeliest next token is the given one; 1 without any."""
        right_N = self.logits(states_NH).argmax(1) == torch.tensor(tokens, dtype=torch.long)
        return float(right_N.float().mean()) if len(tokens) else 1.0
