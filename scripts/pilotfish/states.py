# SPDX-License-Identifier: Apache-2.0
"""What must hold of the hidden states of a split, row by row, whatever the target."""

import hashlib

import numpy as np
import torch

from pilotfish.errors import UserError
from pilotfish.shards import RowStates, ShardReader
from pilotfish.tensors import Faults, Tensor, faults

NORM_FACTOR = 5  # of a row's norm to the split's; clean rows lie within 0.8 and 1.5 of it
RECAPTURE = (
    "Capture these rows anew: delete the part's index.json and kept.json (hidden_states/SPLIT/PART) and what "
    "`respond` captured of it (responses/SPLIT/PART.captured), and run again"
)


class Review:
    """Takes one row after another and collects what is wrong with each.

    It keeps a few bytes a row, which the comparison of rows needs: a norm for each layer, and a hash.
    """

    def __init__(self, where: object, reader: ShardReader, hidden_size: int, dtype: torch.dtype):
        self.reader = reader
        self._where = where
        self._faults = Faults(where)
        self._sizes = {"layers": len(reader.layers), "hidden": hidden_size}
        self._schema = {
            "hidden_states": Tensor(
                dtype,
                ("tokens", "layers", "hidden"),
                cure="float16 overflows, so capture with engine.dtype bfloat16" if dtype == torch.float16 else "",
            )
        }
        self._rows: list[int] = []
        self._norms: list[np.ndarray] = []
        self._row_of_hash: dict[bytes, int] = {}
        self._tokens = 0

    def take(self, sample: dict) -> RowStates | None:
        """The states of a sample's row, or None where something is wrong with them."""
        row = sample["row"]
        if lacking := self.reader.lacking(row):
            what = "it" if lacking == self.reader.captured else f"its layers {lacking}"
            self._faults.add(f"row {row}: no shard holds {what}")
            return None
        held = self.reader.read(row)
        found = self._faults_of(sample, held)
        for fault in found:
            self._faults.add(f"{self.reader.place(row)}, {fault}")
        if found:
            return None
        self._rows.append(row)
        self._tokens += len(held.token_ids)
        return held

    def _faults_of(self, sample: dict, held: RowStates) -> list[str]:
        ids, expected = held.token_ids.tolist(), sample["input_ids"][:-1]
        if len(ids) < len(expected):
            return [
                f"token_ids: states of {len(ids)} tokens where the sample has {len(expected)}: a cached prefix is not "
                "computed again, so the engine must run with prefix caching and chunked prefill off"
            ]
        if ids != expected:
            pairs = enumerate(zip(ids, expected, strict=False))
            first = next((place for place, (held_id, due) in pairs if held_id != due), len(expected))
            return [f"token_ids: not the sample's from token {first} on: states of another request"]
        found = faults({"hidden_states": held.hidden_states}, self._schema, tokens=len(ids), **self._sizes)
        return found or self._faults_of_values(sample["row"], held)

    def _faults_of_values(self, row: int, held: RowStates) -> list[str]:
        states = held.hidden_states
        norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)  # [tokens, layers]
        if zeros := (norms == 0).nonzero().tolist():
            token, column = zeros[0]
            return [
                f"hidden_states: {len(zeros)} zero vector(s), the first at token {token}, "
                f"h({self.reader.layers[column]}): this position was never computed"
            ]
        last = states[-1].contiguous().view(torch.uint8).numpy()
        twin = self._row_of_hash.setdefault(hashlib.blake2b(last, digest_size=16).digest(), row)
        # Equal tokens have equal states; that two rows are the same is for earlier gates to say.
        if twin != row and not torch.equal(self.reader.read(twin).token_ids, held.token_ids):
            return [f"hidden_states: the last state is that of row {twin}, bit for bit: states of another request"]
        # The median over tokens, since the first token of many models is a hundred times larger.
        self._norms.append(norms.median(dim=0).values.numpy())
        return []

    def refuse(self) -> None:
        """Raise a UserError with all that is wrong, if anything is."""
        self._faults.refuse(RECAPTURE)
        if not self._rows:
            raise UserError(f"{self._where}: there is no sample to hold the states against; look at validate_responses")
        found = Faults(self._where)
        norms = np.stack(self._norms)
        typical = np.median(norms, axis=0)
        for number, column in np.argwhere((norms > NORM_FACTOR * typical) | (norms * NORM_FACTOR < typical)):
            found.add(
                f"{self.reader.place(self._rows[number])}, h({self.reader.layers[column]}): norm "
                f"{norms[number, column]:.3g} where the split's is {typical[column]:.3g}: scaled, or of something else"
            )
        found.refuse(RECAPTURE)

    def statistics(self) -> dict:
        """Rows, tokens, and for each layer the smallest, median and largest row norm (median over its tokens)."""
        norms = np.stack(self._norms)
        spread = zip(self.reader.layers, norms.min(0), np.median(norms, axis=0), norms.max(0), strict=True)
        return {
            "rows": len(self._rows),
            # Captured before a gate left their answers out; nobody reads them.
            "rows_without_sample": len(self.reader) - len(self._rows),
            "tokens": self._tokens,
            "norms": {str(layer): [float(f"{value:.3g}") for value in values] for layer, *values in spread},
        }
