# SPDX-License-Identifier: Apache-2.0
"""A trained drafter is held against its settings, its start and its target."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import get_cosine_schedule_with_warmup

from pilotfish import drafter_checks
from pilotfish.constants import Constants

SPEC = {"learning_rate": 2e-3, "warmup_ratio": 0.1, "epochs": 2}
STEPS = 20  # an epoch


def log(steps: int = 2 * STEPS) -> list[dict]:
    """A good log, its learning rates from transformers' own schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=SPEC["learning_rate"])
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, 2 * STEPS)
    rows = []
    for step in range(steps):
        rate = schedule.get_last_lr()[0]
        rows.append(
            {"kind": "train", "epoch": step // STEPS, "step": step, "loss": 5 - step / 10, "learning_rate": rate}
        )
        optimizer.step()
        schedule.step()
    return [*rows, {"kind": "heldout", "epoch": 1, "step": steps, "loss": 1.0}]


def test_a_good_log_has_no_fault():
    assert list(drafter_checks.log_faults(log(), SPEC)) == []


@pytest.mark.parametrize(
    ("step", "change", "says"),
    [
        (7, {"step": 8}, "step 7 is missing"),
        (9, {"loss": float("nan")}, "step 9: the loss is nan; lower learning_rate"),
        (30, {"learning_rate": 2e-3}, r"step 30: the learning rate is 0\.002 where the schedule has 0\.000357212"),
    ],
)
def test_the_first_bad_step_is_named(step: int, change: dict, says: str):
    rows = log()
    rows[step] |= change
    (fault,) = drafter_checks.log_faults(rows, SPEC)
    assert re.search(says, fault)


def test_a_schedule_that_began_anew_after_a_resume_is_told():
    rows = log()
    for step in range(STEPS, 2 * STEPS):
        rows[step]["learning_rate"] = rows[step - STEPS]["learning_rate"]
    (fault,) = drafter_checks.log_faults(rows, SPEC)
    assert fault.startswith("step 20: the learning rate is 0 where")


def test_a_loss_that_does_not_fall_is_told():
    rows = [{**row, "loss": 3.0} for row in log()]
    assert ["the loss did not fall (3.000 to 3.000)" in each for each in drafter_checks.log_faults(rows, SPEC)] == [
        True
    ]


def constants() -> Constants:
    return Constants(
        algorithm="eagle3", capture_layers=(1, 2, 3), draft_vocab_size=6, target_vocab_size=10, hidden_size=8, heads=4,
        kv_heads=2, head_dim=4, draft_layers=1, rms_norm_eps=1e-6, rope_theta=1e4, rope_type="default", rope_scaling={},
        partial_rotary_factor=1.0, sliding_window=None, causal=True, norm_before_residual=True, norm_before_fc=False,
        fc_norm=False, norm_output=False, max_position_embeddings=64, tied_head=False,
    )  # fmt: skip


@pytest.fixture
def held() -> dict[str, torch.Tensor]:
    """A drafter's tensors, of the sizes above and an MLP of 12."""
    shapes = {
        "embed_tokens": (10, 8), "lm_head": (6, 8), "fc": (8, 24), "norm": (8,), "layers.0.input_layernorm": (8,),
        "layers.0.hidden_norm": (8,), "layers.0.post_attention_layernorm": (8,), "layers.0.self_attn.q_proj": (16, 16),
        "layers.0.self_attn.k_proj": (8, 16), "layers.0.self_attn.v_proj": (8, 16),
        "layers.0.self_attn.o_proj": (8, 16), "layers.0.mlp.gate_proj": (12, 8), "layers.0.mlp.up_proj": (12, 8),
        "layers.0.mlp.down_proj": (8, 12),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    made = {f"{name}.weight": torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    return made | {"d2t": torch.tensor([0, 0, 1, 1, 2, 4]), "t2d": torch.zeros(10, dtype=torch.bool)}


def test_the_formula_counts_the_parameters(held: dict[str, torch.Tensor]):
    assert drafter_checks.count_fault(held, constants()) is None
    held["fc.weight"] = torch.zeros(8, 16)
    assert "train again" in drafter_checks.count_fault(held, constants())


def start_of(held: dict[str, torch.Tensor], frozen: set[str], moved: set[str]) -> dict:
    def sha(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()

    weights = {name: value for name, value in held.items() if name.endswith("weight")}
    before = {name: sha(value + 1 if name in moved else value) for name, value in weights.items()}
    return {
        "frozen": {name: before[name] for name in frozen},
        "trainable": {name: before[name] for name in weights.keys() - frozen},
    }


def test_what_should_move_has_moved_and_what_should_not_has_not(held: dict[str, torch.Tensor]):
    frozen = {"embed_tokens.weight"}
    weights = {name for name in held if name.endswith("weight")}
    assert list(drafter_checks.movement_faults(held, start_of(held, frozen, weights - frozen))) == []
    (fault,) = drafter_checks.movement_faults(held, start_of(held, frozen, weights - frozen - {"fc.weight"}))
    assert fault.startswith("fc.weight: never moved from its start")
    (fault,) = drafter_checks.movement_faults(held, start_of(held, frozen, weights))
    assert fault.startswith("embed_tokens.weight: has moved though it is frozen")


def test_a_tensor_that_was_lost_in_training_is_told(held: dict[str, torch.Tensor]):
    start = start_of(held, set(), {name for name in held if name.endswith("weight")})
    del held["fc.weight"]
    assert [fault.split(",")[0] for fault in drafter_checks.movement_faults(held, start)] == ["fc.weight: missing"]


def test_another_map_and_one_that_was_never_applied_are_told(held: dict[str, torch.Tensor]):
    vocabulary = {name: held[name].clone() for name in ("d2t", "t2d")}
    assert list(drafter_checks.map_faults(held, vocabulary)) == []
    held["d2t"] = torch.zeros_like(held["d2t"])
    (fault,) = drafter_checks.map_faults(held, vocabulary)
    assert "it is all zero: never applied" in fault


@pytest.fixture
def target(tmp_path: Path, held: dict[str, torch.Tensor]) -> Path:
    """A target whose embedding is the drafter's, and whose head's rows the drafter has, a little changed."""
    chosen = torch.arange(6) + held["d2t"]
    head = torch.randn(10, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    held["lm_head.weight"] = (head[chosen].float() * 1.1 + 0.05).bfloat16()
    tensors = {"model.embed_tokens.weight": held["embed_tokens.weight"].clone(), "lm_head.weight": head}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_embedding_and_head_must_come_from_the_target(target: Path, held: dict[str, torch.Tensor]):
    vocabulary = {name: held[name] for name in ("d2t", "t2d")}
    assert list(drafter_checks.origin_faults(held, target, vocabulary)) == []
    held["embed_tokens.weight"][3, 2] += 1
    held["lm_head.weight"] = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = list(drafter_checks.origin_faults(held, target, vocabulary))
    assert [fault.split(":")[0] for fault in found] == ["embed_tokens.weight", "lm_head.weight"]
