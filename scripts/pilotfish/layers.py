# SPDX-License-Identifier: Apache-2.0
"""Capture layers in h(k) numbering: the residual stream before 0-based layer k; k = L is the last, pre-norm."""

from collections.abc import Iterable

from pilotfish.errors import UserError


def default_capture_layers(layers: int) -> list[int] | None:
    """EAGLE-3's {2, L//2, L-3}; None where these are not three distinct layers."""
    chosen = sorted({2, layers // 2, layers - 3})
    return chosen if len(chosen) == 3 and chosen[0] > 0 else None


def conditioning_layers(asked: list[int] | None, target: dict) -> list[int]:
    """A drafter's conditioning layers: those asked for, else the target's default; checked against L.

    `target` is the statistics part of the target's manifest.
    """
    last = target["layers"]
    layers = asked or target["default_capture_layers"]
    if layers is None:
        raise UserError(
            f"capture_layers: a target of {last} layers has no default; set three layer numbers, e.g. [1, 2, 3]"
        )
    if sorted(set(layers)) != list(layers) or layers[0] < 1 or layers[-1] >= last:
        raise UserError(
            f"capture_layers: {list(layers)} must rise and lie in 1..{last - 1} "
            "(h(k) is the residual stream before layer k)"
        )
    return list(layers)


def layers_to_capture(asked: Iterable[list[int] | None], target: dict) -> list[int]:
    """What one capture must hold for several drafters: their layers, and L for the target distribution."""
    wanted = {layer for each in asked for layer in conditioning_layers(each, target)}
    return sorted(wanted | {target["layers"]})
