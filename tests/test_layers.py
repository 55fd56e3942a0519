# SPDX-License-Identifier: Apache-2.0
"""Which layers a drafter conditions on and a capture holds, in h(k) numbering."""

import pytest
import torch

from pilotfish import layers
from pilotfish.errors import UserError

SMALL, LARGE = {"layers": 4}, {"layers": 30}


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(30, [2, 15, 27]), (36, [2, 18, 33]), (61, [2, 30, 58]), (8, [2, 4, 5]), (7, [2, 3, 4])],
)
def test_the_default_is_an_early_a_middle_and_a_late_layer(count: int, chosen: list[int]):
    assert layers.default_capture_layers(count) == chosen


@pytest.mark.parametrize("count", range(1, 7))
def test_a_small_target_has_no_default(count: int):
    assert layers.default_capture_layers(count) is None


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(64, [2, 17, 32, 47, 62]), (36, [2, 10, 18, 26, 34]), (30, [2, 9, 15, 21, 28]), (8, [2, 3, 4, 5, 6])],
)
def test_dflash_has_the_outputs_of_five_layers_from_the_second_to_the_third_last(count: int, chosen: list[int]):
    assert layers.dflash_capture_layers(count) == chosen
    # In the numbering of others, whose v is the output of layer v.
    assert [layer - 1 for layer in chosen] == torch.linspace(1, count - 3, 5).double().round().long().tolist()


@pytest.mark.parametrize("count", range(1, 8))
def test_a_target_of_fewer_than_eight_layers_has_no_default_for_dflash(count: int):
    assert layers.dflash_capture_layers(count) is None


@pytest.mark.parametrize(("algorithm", "fewest"), [("eagle3", 7), ("dflash", 8)])
def test_every_default_is_allowed(algorithm: str, fewest: int):
    for count in range(fewest, 130):
        default = layers.conditioning_layers(None, {"layers": count}, algorithm)
        assert default == layers.DEFAULTS[algorithm](count)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_layers_that_are_asked_for_win_over_the_default(algorithm: str):
    assert layers.conditioning_layers([1, 2, 29], LARGE, algorithm) == [1, 2, 29]


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_no_default_and_no_choice_is_an_error_with_an_example(algorithm: str):
    with pytest.raises(UserError, match=rf"a target of 4 layers has no default for {algorithm}; .* \[1, 2, 3\]"):
        layers.conditioning_layers(None, SMALL, algorithm)


@pytest.mark.parametrize("asked", [[0, 1, 2], [1, 2, 4], [2, 1, 3], [1, 1, 2], [-1, 1, 2], [1, 2, 30]])
def test_layers_that_do_not_rise_within_the_target_are_an_error(asked: list[int]):
    with pytest.raises(UserError, match=r"capture_layers: \[.*\] must rise and lie in 1\.\.3"):
        layers.conditioning_layers(asked, SMALL, "eagle3")


def test_a_capture_holds_every_drafters_layers_and_the_last():
    drafters = [("eagle3", None), ("eagle3", [1, 15, 20]), ("dflash", None)]
    assert layers.layers_to_capture(drafters, LARGE) == [1, 2, 9, 15, 20, 21, 27, 28, 30]
