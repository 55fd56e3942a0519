# SPDX-License-Identifier: Apache-2.0
"""Which layers a drafter conditions on and a capture holds, in h(k) numbering."""

import pytest

from pilotfish import layers
from pilotfish.errors import UserError

SMALL = {"layers": 4, "default_capture_layers": None}
LARGE = {"layers": 30, "default_capture_layers": [2, 15, 27]}


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(30, [2, 15, 27]), (36, [2, 18, 33]), (61, [2, 30, 58]), (8, [2, 4, 5]), (7, [2, 3, 4])],
)
def test_the_default_is_an_early_a_middle_and_a_late_layer(count: int, chosen: list[int]):
    assert layers.default_capture_layers(count) == chosen


@pytest.mark.parametrize("count", range(1, 7))
def test_a_small_target_has_no_default(count: int):
    assert layers.default_capture_layers(count) is None


def test_every_default_is_allowed():
    for count in range(7, 130):
        default = layers.default_capture_layers(count)
        target = {"layers": count, "default_capture_layers": default}
        assert layers.conditioning_layers(None, target) == default


def test_layers_that_are_asked_for_win_over_the_default():
    assert layers.conditioning_layers([1, 2, 29], LARGE) == [1, 2, 29]


def test_no_default_and_no_choice_is_an_error_with_an_example():
    with pytest.raises(UserError, match=r"a target of 4 layers has no default; set three .* \[1, 2, 3\]"):
        layers.conditioning_layers(None, SMALL)


@pytest.mark.parametrize("asked", [[0, 1, 2], [1, 2, 4], [2, 1, 3], [1, 1, 2], [-1, 1, 2], [1, 2, 30]])
def test_layers_that_do_not_rise_within_the_target_are_an_error(asked: list[int]):
    with pytest.raises(UserError, match=r"capture_layers: \[.*\] must rise and lie in 1\.\.3"):
        layers.conditioning_layers(asked, SMALL)


def test_a_capture_holds_every_drafters_layers_and_the_last():
    assert layers.layers_to_capture([None, [1, 15, 20]], LARGE) == [1, 2, 15, 20, 27, 30]
