# SPDX-License-Identifier: Apache-2.0
"""Tensors are held against a schema as tables are: all failures in one message, with place and cure."""

import math

import pytest
import torch

from pilotfish.errors import UserError
from pilotfish.tensors import Faults, Tensor, check, faults

SCHEMA = {
    "token_ids": Tensor(torch.int64, ("tokens",), low=0, high=9, cure="was another tokenizer used?"),
    "states": Tensor(torch.bfloat16, ("tokens", 2, "hidden")),
    "mask": Tensor(torch.bool, ("tokens",), optional=True),
}


def tensors(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    good = {"token_ids": torch.tensor([3, 9, 0]), "states": torch.ones(3, 2, 4, dtype=torch.bfloat16)}
    return {name: tensor for name, tensor in {**good, **changed}.items() if tensor is not None}


def test_tensors_as_declared_pass_with_and_without_the_optional_one():
    assert faults(tensors(), SCHEMA, hidden=4) == []
    assert faults(tensors(mask=torch.tensor([True, False, True])), SCHEMA) == []
    assert (
        faults(tensors(token_ids=torch.zeros(0, dtype=torch.int64), states=torch.ones(0, 2, 4).bfloat16()), SCHEMA)
        == []
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"states": None}, "states: missing"),
        ({"more": torch.ones(1)}, "more: not expected here"),
        ({"states": torch.ones(3, 2, 4)}, "states: stored as float32, not bfloat16"),
        ({"states": torch.ones(3, 2).bfloat16()}, r"states: shape \[3, 2\], not \[3, 2, 4\]"),
        ({"states": torch.ones(2, 2, 4).bfloat16()}, r"states: shape \[2, 2, 4\], not \[3, 2, 4\]"),
        (
            {"token_ids": torch.tensor([3, 10, 0])},
            r"token_ids: values from 0 to 10 leave 0\.\.9; was another tokenizer",
        ),
        ({"mask": torch.tensor([True])}, r"mask: shape \[1\], not \[3\]"),
    ],
)
def test_one_fault_is_named_with_its_tensor(changed: dict, said: str):
    with pytest.raises(UserError, match=f"(?s)^x.safetensors: 1 check.*{said}.*\nmake it again$"):
        check(tensors(**changed), SCHEMA, "x.safetensors", "make it again", hidden=4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_single_value_that_is_not_finite_is_found_with_its_place(value: float, dtype: torch.dtype):
    states = torch.ones(3, 2, 4, dtype=dtype)
    states[2, 1, 3] = value
    found = faults({"states": states}, {"states": Tensor(dtype, ("tokens", 2, 4))})
    assert found == ["states: 1 of 24 values are NaN or infinite, the first at [2, 1, 3]"]


def test_infinity_may_be_allowed_but_nan_never():
    allowed = {"x": Tensor(torch.float32, (1,), finite=False)}
    assert faults({"x": torch.tensor([-math.inf])}, allowed) == []
    assert faults({"x": torch.tensor([math.nan])}, allowed) == ["x: NaN among its values"]


def test_a_size_given_by_name_holds_for_every_tensor():
    assert faults(tensors(), SCHEMA, tokens=4) == [
        "token_ids: shape [3], not [4]",
        "states: shape [3, 2, 4], not [4, 2, 4]",
    ]


def test_many_faults_are_counted_and_the_first_few_shown():
    found = Faults("folder")
    for row in range(8):
        found.add(f"row {row}: bad")
    with pytest.raises(
        UserError, match=r"(?s)^folder: 8 check\(s\) failed:\n  row 0.*row 4: bad\n  and 3 more\nthe cure$"
    ):
        found.refuse("the cure")


def test_no_fault_refuses_nothing():
    assert Faults("folder").refuse("the cure") is None
