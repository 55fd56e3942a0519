# SPDX-License-Identifier: Apache-2.0
"""Capture layers in h(k) numbering: the residual stream before 0-based layer k; k = L is the last, pre-norm."""

from collections.abc import Iterable, Sequence

from pilotfish.errors import UserError

DFLASH_LAYERS = 5


def default_capture_layers(layers: int) -> list[int] | None:
    """EAGLE-3's {2, L//2, L-3}; None where these are not three distinct layers."""
    chosen = sorted({2, layers // 2, layers - 3})
    return chosen if len(chosen) == 3 and chosen[0] > 0 else None


def dflash_capture_layers(layers: int) -> list[int] | None:
    """DFlash's outputs of layers round(linspace(1, L-3, 5)), in h(k) one more; None where these are not five."""
    steps = DFLASH_LAYERS - 1
    chosen = sorted({round(1 + (layers - 4) * step / steps) + 1 for step in range(DFLASH_LAYERS)})
    return chosen if len(chosen) == DFLASH_LAYERS else None


DEFAULTS = {"eagle3": default_capture_layers, "dflash": dflash_capture_layers}


def conditioning_layers(asked: Sequence[int] | None, target: dict, algorithm: str) -> list[int]:
    """A drafter's conditioning layers: those asked for, else its algorithm's default; checked against L.

    `target` is the statistics part of the target's manifest.
    """
    last = target["layers"]
    chosen = asked or DEFAULTS[algorithm](last)
    if chosen is None:
        raise UserError(
            f"capture_layers: a target of {last} layers has no default for {algorithm}; set layer numbers, e.g. "
            "[1, 2, 3]"
        )
    if sorted(set(chosen)) != list(chosen) or chosen[0] < 1 or chosen[-1] >= last:
        raise UserError(
            f"capture_layers: {list(chosen)} must rise and lie in 1..{last - 1} "
            "(h(k) is the residual stream before layer k)"
        )
    return list(chosen)


def layers_to_capture(asked: Iterable[tuple[str, Sequence[int] | None]], target: dict) -> list[int]:
    """What one capture must hold for several drafters, each an algorithm and its layers; and L for the labels."""
    wanted = {layer for algorithm, each in asked for layer in conditioning_layers(each, target, algorithm)}
    return sorted(wanted | {target["layers"]})
