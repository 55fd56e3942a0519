# SPDX-License-Identifier: Apache-2.0
"""A trained drafter is held against its settings, its start and its target."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import get_cosine_schedule_with_warmup

import test_replay_dflash
import test_replay_eagle3
from helpers import LAYERS, arrow_of, captured_folder, random_ids, random_target, response
from pilotfish import drafter_checks, replay, rounds, samples, shards
from pilotfish.constants import Constants
from pilotfish.shards import RowStates

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


def constants(algorithm: str) -> Constants:
    return Constants(
        algorithm=algorithm, capture_layers=(1, 2, 3), draft_vocab_size=6, target_vocab_size=10, hidden_size=8, heads=4,
        kv_heads=2, head_dim=4, draft_layers=1, rms_norm_eps=1e-6, rope_theta=1e4, rope_type="default", rope_scaling={},
        partial_rotary_factor=1.0, sliding_window=None, causal=True, max_position_embeddings=64, tied_head=False,
    )  # fmt: skip


OF_EITHER = {
    "lm_head": (6, 8), "fc": (8, 24), "norm": (8,), "layers.0.input_layernorm": (8,),
    "layers.0.post_attention_layernorm": (8,), "layers.0.self_attn.o_proj": (8, 16), "layers.0.mlp.gate_proj": (12, 8),
    "layers.0.mlp.up_proj": (12, 8), "layers.0.mlp.down_proj": (8, 12),
}  # fmt: skip
SHAPES = {
    "eagle3": {
        "embed_tokens": (10, 8), "layers.0.hidden_norm": (8,), "layers.0.self_attn.q_proj": (16, 16),
        "layers.0.self_attn.k_proj": (8, 16), "layers.0.self_attn.v_proj": (8, 16),
    },
    "dflash": {
        "hidden_norm": (8,), "layers.0.self_attn.q_norm": (4,), "layers.0.self_attn.k_norm": (4,),
        "layers.0.self_attn.q_proj": (16, 8), "layers.0.self_attn.k_proj": (8, 8), "layers.0.self_attn.v_proj": (8, 8),
    },
}  # fmt: skip
FROZEN = {"eagle3": "embed_tokens.weight", "dflash": "lm_head.weight"}


@pytest.fixture(params=SHAPES)
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def held(algorithm: str) -> dict[str, torch.Tensor]:
    """A drafter's tensors, of the sizes above and an MLP of 12."""
    draw, shapes = torch.Generator().manual_seed(0), OF_EITHER | SHAPES[algorithm]
    made = {f"{name}.weight": torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    return made | {"d2t": torch.tensor([0, 0, 1, 1, 2, 4]), "t2d": torch.zeros(10, dtype=torch.bool)}


def test_the_formula_counts_the_parameters(algorithm: str, held: dict[str, torch.Tensor]):
    assert drafter_checks.count_fault(held, constants(algorithm)) is None
    held["fc.weight"] = torch.zeros(8, 16)
    assert "train again" in drafter_checks.count_fault(held, constants(algorithm))


def start_of(held: dict[str, torch.Tensor], frozen: set[str], moved: set[str]) -> dict:
    def sha(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()

    weights = {name: value for name, value in held.items() if name.endswith("weight")}
    before = {name: sha(value + 1 if name in moved else value) for name, value in weights.items()}
    return {
        "frozen": {name: before[name] for name in frozen},
        "trainable": {name: before[name] for name in weights.keys() - frozen},
    }


def test_what_should_move_has_moved_and_what_should_not_has_not(algorithm: str, held: dict[str, torch.Tensor]):
    frozen = {FROZEN[algorithm]}
    weights = {name for name in held if name.endswith("weight")}
    assert list(drafter_checks.movement_faults(held, start_of(held, frozen, weights - frozen))) == []
    (fault,) = drafter_checks.movement_faults(held, start_of(held, frozen, weights - frozen - {"fc.weight"}))
    assert fault.startswith("fc.weight: never moved from its start")
    (fault,) = drafter_checks.movement_faults(held, start_of(held, frozen, weights))
    assert fault.startswith(f"{FROZEN[algorithm]}: has moved though it is frozen")


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
def target(tmp_path: Path, algorithm: str, held: dict[str, torch.Tensor]) -> Path:
    """A target whose embedding and head's rows the drafter has, the rows of EAGLE-3 a little changed."""
    chosen = torch.arange(6) + held["d2t"]
    embedding, head = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    held["lm_head.weight"] = head[chosen]
    if algorithm == "eagle3":
        held["embed_tokens.weight"] = embedding.clone()
        held["lm_head.weight"] = (head[chosen].float() * 1.1 + 0.05).bfloat16()
    tensors = {"model.embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


EAGLE3 = pytest.mark.parametrize("algorithm", ["eagle3"], indirect=True)
DFLASH = pytest.mark.parametrize("algorithm", ["dflash"], indirect=True)


@EAGLE3
def test_embedding_and_head_must_come_from_the_target(target: Path, held: dict[str, torch.Tensor]):
    vocabulary = {name: held[name] for name in ("d2t", "t2d")}
    assert list(drafter_checks.origin_faults(held, target, vocabulary)) == []
    held["embed_tokens.weight"][3, 2] += 1
    held["lm_head.weight"] = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = list(drafter_checks.origin_faults(held, target, vocabulary))
    assert [fault.split(":")[0] for fault in found] == ["embed_tokens.weight", "lm_head.weight"]


@DFLASH
def test_a_frozen_head_must_be_the_targets_rows_to_the_last_bit(target: Path, held: dict[str, torch.Tensor]):
    vocabulary = {name: held[name] for name in ("d2t", "t2d")}
    assert list(drafter_checks.origin_faults(held, target, vocabulary)) == []
    held["lm_head.weight"][2, 1] *= 1.01
    (fault,) = drafter_checks.origin_faults(held, target, vocabulary)
    assert fault.startswith("lm_head.weight: not the target's rows of the draft vocabulary, bit for bit")


@DFLASH
def test_a_dflash_drafter_of_the_whole_vocabulary_holds_nothing_of_its_target(
    target: Path, held: dict[str, torch.Tensor]
):
    vocabulary = {"d2t": torch.zeros(10, dtype=torch.long), "t2d": torch.ones(10, dtype=torch.bool)}
    own = {name: tensor for name, tensor in held.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    whole = constants("dflash").model_copy(update={"draft_vocab_size": 10})
    assert drafter_checks.count_fault(own, whole) is None
    assert [*drafter_checks.origin_faults(own, target, vocabulary), *drafter_checks.map_faults(own, vocabulary)] == []


ROWS, K = 20, 3


class Stored(NamedTuple):
    """A random drafter with held-out rows that follow its drafts, and training rows of random tokens."""

    target: Path
    drafter: Path
    train: Path
    heldout: Path
    states: Path

    @property
    def reader(self) -> shards.ShardReader:
        return shards.ShardReader([self.states / shards.INDEX], LAYERS[:3])


@pytest.fixture
def stored(algorithm: str, tmp_path: Path) -> Stored:
    target = random_target(tmp_path / "target")
    if algorithm == "eagle3":
        made, model = test_replay_eagle3, test_replay_eagle3.reference_model(*test_replay_eagle3.FORWARDS[0])
    else:
        made, model = test_replay_dflash, test_replay_dflash.reference_model(target)
    model.save_pretrained(tmp_path / "drafter")
    rows = [made.row_that_follows_drafts(model, row, prompt=4, n_out=12, stored=12) for row in range(ROWS)]
    tokens = [row.tokens_T.tolist() for row in rows]
    heldout = arrow_of(tmp_path / "heldout", [response(row, ids[:4], ids[4:]) for row, ids in enumerate(tokens)])
    states = tmp_path / "states"
    states.mkdir()
    path = states / shards.shard_name(0, ROWS)
    held = [
        (row, RowStates(each.tokens_T[:-1], torch.cat([each.states_TLH, each.states_TLH[:, :1]], 1).bfloat16()))
        for row, each in enumerate(rows)
    ]
    shards.write_shard(path, held, LAYERS)
    shards.write_index(states, LAYERS, [shards.describe(path)])
    random = [response(row, random_ids(4, row), random_ids(12, 50 + row)) for row in range(ROWS)]
    return Stored(target, tmp_path / "drafter", arrow_of(tmp_path / "train", random), heldout, states)


def test_tau_is_replayed_over_rows_spread_over_the_held_out_ones(stored: Stored):
    found, places = drafter_checks.replayed(stored.drafter, stored.target, stored.heldout, stored.reader, K)
    assert places == [0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19]
    every = samples.load(stored.heldout).select(places)
    rounds_of_all = replay.replay_samples(
        replay.open_drafter(stored.drafter, stored.target), stored.reader, every, K
    ).values()
    tau = rounds.summarise(list(rounds_of_all), K)["tau_micro_incl_bonus"]
    assert found == {"tau": round(tau, 4), "rows": 16}


def accept(stored: Stored) -> tuple[dict, str | None]:
    return drafter_checks.acceptance(stored.drafter, stored.target, stored.train, stored.heldout, stored.reader, K)


def test_a_drafter_that_foresees_more_than_the_most_frequent_tokens_is_of_use(stored: Stored):
    found, fault = accept(stored)
    assert fault is None
    assert found["rows"] == 16
    assert found["tau_replay"] > 1.5 > found["tau_most_frequent"] >= 1


def test_a_drafter_that_foresees_less_than_the_most_frequent_tokens_is_told(stored: Stored, tmp_path: Path):
    turning = [response(row, random_ids(4, row), [1, 2, 3, 4] * 3) for row in range(ROWS)]
    arrow = arrow_of(tmp_path / "turning", turning)
    ids = {each["row"]: each["prompt_token_ids"] + each["token_ids"] for each in turning}
    states = captured_folder(tmp_path / "turning-states", ids)
    found, fault = accept(stored._replace(train=arrow, heldout=arrow, states=states))
    assert found["tau_most_frequent"] == 4 == K + 1
    assert re.search(r"replay tau 1\.\d+ on 16 held-out rows, where always .* gives 4\.000: it has learnt", fault)
