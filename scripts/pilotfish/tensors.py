# SPDX-License-Identifier: Apache-2.0
"""Schemas of named tensors, and errors that name the file, the row, the tensor and the cure.

What `pilotfish.tables` does for tables:

    STATES = {
        "token_ids": Tensor(torch.int64, ("tokens",), low=0),
        "hidden_states": Tensor(torch.bfloat16, ("tokens", "layers", "hidden")),
    }
    check(load_file(path), STATES, path, "delete it and run again", hidden=576)
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pilotfish.errors import UserError

SHOWN = 5  # failures listed in an error


@dataclass(frozen=True)
class Tensor:
    """What one named tensor must be.

    A name in `shape` stands for one number: the one given to `check`, else that of the first tensor in the
    schema that has it. `low` and `high` are inclusive, and NaN lies in no range. `cure` follows a message
    about the values; an optional tensor may be absent.
    """

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    low: float = -math.inf
    high: float = math.inf
    finite: bool = True
    optional: bool = False
    cure: str = ""


Schema = Mapping[str, Tensor]


def faults(tensors: Mapping[str, torch.Tensor], schema: Schema, **sizes: int) -> list[str]:
    """Everything wrong with the tensors, one text each that starts with a tensor's name; empty if nothing is.

    `sizes` gives numbers to names in shapes. A tensor that the schema does not list is wrong too.
    """
    found = []
    for name, wanted in schema.items():
        if name in tensors:
            found.extend(f"{name}: {fault}" for fault in _faults_of(tensors[name], wanted, sizes))
        elif not wanted.optional:
            found.append(f"{name}: missing")
    return found + [f"{name}: not expected here" for name in tensors if name not in schema]


def _faults_of(tensor: torch.Tensor, wanted: Tensor, sizes: dict[str, int]) -> Iterator[str]:
    if tensor.dtype != wanted.dtype:
        yield f"stored as {_name(tensor.dtype)}, not {_name(wanted.dtype)}"
    if len(wanted.shape) == tensor.ndim:
        for name, size in zip(wanted.shape, tensor.shape, strict=True):
            if isinstance(name, str):
                sizes.setdefault(name, size)
    shape = [sizes.get(size, size) for size in wanted.shape]
    if list(tensor.shape) != shape:
        yield f"shape {list(tensor.shape)}, not [{', '.join(map(str, shape))}]"
    if fault := _fault_of_values(tensor, wanted):
        yield f"{fault}; {wanted.cure}" if wanted.cure else fault


def _fault_of_values(tensor: torch.Tensor, wanted: Tensor) -> str | None:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return None
    # One pass, where isfinite makes four: the extremes of anything with a NaN in it are NaN.
    low, high = (extreme.item() for extreme in torch.aminmax(tensor))
    if math.isnan(low) or (wanted.finite and (math.isinf(low) or math.isinf(high))):
        if not wanted.finite:
            return "NaN among its values"
        bad = ~torch.isfinite(tensor)
        where = bad.nonzero()[0].tolist()
        return f"{int(bad.sum())} of {tensor.numel()} values are NaN or infinite, the first at {where}"
    if low < wanted.low or high > wanted.high:
        return f"values from {low:g} to {high:g} leave {wanted.low:g}..{wanted.high:g}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest(tensor: torch.Tensor) -> str:
    """Hex sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


class Faults:
    """Collects what is wrong with a file or a folder of them: the first few in words, the others as a number."""

    def __init__(self, where: object):
        self.where = where
        self._count = 0
        self._first: list[str] = []

    def add(self, text: str) -> None:
        """Note one fault; the text names the place within the file, and the cure."""
        self._count += 1
        if len(self._first) < SHOWN:
            self._first.append(f"  {text}")

    def refuse(self, cure: str) -> None:
        """Raise a UserError with all that was noted and the cure, if anything was."""
        if self._count:
            more = [f"  and {self._count - SHOWN} more"] if self._count > SHOWN else []
            raise UserError("\n".join([f"{self.where}: {self._count} check(s) failed:", *self._first, *more, cure]))


def check(tensors: Mapping[str, torch.Tensor], schema: Schema, where: object, cure: str, **sizes: int) -> None:
    """Hold tensors against a schema; UserError with the file (`where`), each tensor that fails, and the cure."""
    found = Faults(where)
    for fault in faults(tensors, schema, **sizes):
        found.add(fault)
    found.refuse(cure)
