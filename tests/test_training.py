# SPDX-License-Identifier: Apache-2.0
"""A drafter learns what it should and nothing else, and a broken-off training ends as an unbroken one."""

import hashlib
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel

from helpers import LAYERS, arrow_of, captured_folder, random_ids, random_target, response
from pilotfish import algorithms, constants, files, replay, samples, shards, training, transfer, vocabulary
from pilotfish.progress import Heartbeat

VOCABULARY, DRAFT_VOCABULARY = 200, 80
LENGTH, PACK, STEPS_PER_EPOCH = 20, 42, 8  # two samples of 20 tokens with states to a pack
SHARED = {
    "trust_remote_code": False,
    "speculative_tokens": 3,
    "tokens_per_batch": PACK,
    "seed": 5,
    "learning_rate": 1e-3,
    "epochs": 2,
    "weight_decay": 0.01,
    "warmup_ratio": 0.1,
}
SPECS = {
    "eagle3": {"algorithm": "eagle3", "loss": "kl_div", "ttt_steps": 3, "ttt_step_loss_decay": 1.0, **SHARED},
    # With random anchors and noise, which a resumed training must draw as an unbroken one does.
    "dflash": {
        "algorithm": "dflash", "draft_layers": 1, "block_size": 4, "mask_token": 199, "gamma": 4.0, "anchors": 5,
        "loss": {"hard": 0.7, "soft": 0.3}, "noise": 0.1, **SHARED,
    },
}  # fmt: skip
# Of the parameters in memory: the first are exported and the others are not.
FROZEN = {
    "eagle3": ({"embed_tokens.weight"}, {"verifier_norm.weight", "verifier_lm_head.weight"}),
    "dflash": ({"lm_head.weight"}, {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}),
}


class Inputs(NamedTuple):
    spec: dict
    target: Path
    train: transfer.SampleDataset
    heldout: transfer.SampleDataset
    maps: dict[str, torch.Tensor]

    @property
    def algorithm(self) -> str:
        return self.spec["algorithm"]


def dataset(folder: Path, lengths: list[int], seed: int, spec: dict) -> transfer.SampleDataset:
    """Random samples with as many states as `lengths` say, behind prompts of 4 tokens."""
    made = [
        response(row, random_ids(4, seed + row), random_ids(length - 3, seed + 100 + row))
        for row, length in enumerate(lengths)
    ]
    ids = {each["row"]: each["prompt_token_ids"] + each["token_ids"] for each in made}
    captured = captured_folder(folder / "captured", ids)
    states = transfer.ShardTransfer([captured / shards.INDEX], LAYERS)
    return transfer.SampleDataset(arrow_of(folder, made), states, PACK, algorithms.of(spec))


@pytest.fixture(scope="module", params=SPECS)
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A random target of four layers, samples with states, a draft vocabulary, and how to train on them."""
    folder, spec = tmp_path_factory.mktemp("training"), SPECS[request.param]
    random_target(folder / "target", VOCABULARY)
    train = dataset(folder / "train", [LENGTH] * 2 * STEPS_PER_EPOCH, 0, spec)
    heldout = dataset(folder / "heldout", [LENGTH] * 3, 1000, spec)
    stored = samples.load(folder / "train" / "samples.arrow")
    chosen = vocabulary.choose(vocabulary.generated_counts(stored, VOCABULARY), DRAFT_VOCABULARY, [0, 199])
    d2t, t2d = map(torch.from_numpy, vocabulary.maps(chosen, VOCABULARY))
    return Inputs(spec, folder / "target", train, heldout, {"d2t": d2t, "t2d": t2d})


def drafter(inputs: Inputs, seed: int = SHARED["seed"]) -> SpeculatorModel:
    return training.build_drafter({**inputs.spec, "seed": seed}, inputs.target, LAYERS[:3], inputs.maps)


def replayed(folder: Path) -> dict:
    """A stand-in for the replay of held-out rows: a number that depends on every weight of an exported drafter."""
    weights = load_file(folder / "model.safetensors").values()
    return {"tau": round(sum(weight.double().sum().item() for weight in weights), 6), "rows": 3}


class Trained(NamedTuple):
    model: SpeculatorModel
    log: list[dict]
    rates: dict[int, list[float]]  # the learning rates that a step was taken with
    work: Path


class Noted(Heartbeat):
    """A heartbeat that keeps what it was told."""

    def __init__(self):
        super().__init__(None, "train", 0, "steps")
        self.told: list[tuple[int, int]] = []  # steps and tokens

    def advance(self, done: int, tokens: int = 0) -> None:
        super().advance(done, tokens)
        self.told.append((done, tokens))


def train(
    inputs: Inputs,
    work: Path,
    weights: int = SHARED["seed"],
    rates: dict | None = None,
    heartbeat: Heartbeat | None = None,
    **spec,
) -> Trained:
    """Train a drafter with random `weights` of that seed; `rates` goes on from an earlier try."""
    work.mkdir(exist_ok=True)
    heartbeat = heartbeat or Noted()
    rates = {} if rates is None else rates
    handler = logging.Handler()
    handler.emit = lambda record: (
        rates.setdefault(record.step, []).append(record.msg["lr"]) if "lr" in record.msg else None
    )
    metrics = logging.getLogger("speculators.metrics")
    metrics.addHandler(handler)
    model = drafter(inputs, weights)
    try:
        log = training.train(model, {**inputs.spec, **spec}, inputs.train, inputs.heldout, replayed, work, heartbeat)
    finally:
        metrics.removeHandler(handler)
    return Trained(model, files.read_jsonl(log), rates, work)


@pytest.fixture(scope="module")
def unbroken(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(inputs, tmp_path_factory.mktemp("unbroken"))


def test_the_head_starts_from_the_targets_rows_of_the_draft_vocabulary(inputs: Inputs):
    head = load_file(inputs.target / "model.safetensors")["lm_head.weight"]
    target_ids = torch.arange(DRAFT_VOCABULARY) + inputs.maps["d2t"]
    assert torch.equal(drafter(inputs).lm_head.weight, head[target_ids])


def test_the_trainable_tensors_move_and_the_frozen_ones_do_not(inputs: Inputs, unbroken: Trained):
    before = drafter(inputs).state_dict()
    after = unbroken.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == before.keys() - set.union(*FROZEN[inputs.algorithm], {"d2t", "t2d"})


@pytest.mark.parametrize(
    ("captured", "computed"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_drafter_computes_in_fp32_on_states_in_fp32_and_in_bf16_on_others(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: torch.dtype, computed: torch.dtype
):
    read, products = shards.ShardReader.read, set()

    def read_as_captured(reader: shards.ShardReader, row: int) -> shards.RowStates:
        held = read(reader, row)
        return replace(held, hidden_states=held.hidden_states.to(captured))

    def notice(*_: object) -> None:
        products.add((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)

    monkeypatch.setattr(shards.ShardReader, "read", read_as_captured)
    monkeypatch.setattr(training.ResumableTrainer, "_reseed", notice)
    assert next(iter(training.loader(inputs.train, inputs.spec, PACK, 0)))["hidden_states"].dtype == computed
    train(inputs, tmp_path, epochs=1)
    assert products == {computed}


def test_each_step_is_logged_once_and_each_epoch_ends_with_a_replay_and_on_the_heldout_samples(unbroken: Trained):
    steps = [(row["kind"], row["epoch"], row["step"]) for row in unbroken.log]
    first = [("train", 0, step) for step in range(8)] + [("replay", 0, 8), ("heldout", 0, 8)]
    assert steps == first + [("train", 1, step) for step in range(8, 16)] + [("replay", 1, 16), ("heldout", 1, 16)]


def test_a_replay_is_of_the_drafter_as_it_is_after_its_epoch(unbroken: Trained, tmp_path: Path):
    first, last = [row for row in unbroken.log if row["kind"] == "replay"]
    training.export(unbroken.model, tmp_path)
    assert {key: last[key] for key in ("tau", "rows")} == replayed(tmp_path)
    assert first["tau"] != last["tau"]


def test_the_start_follows_from_the_seed_alone(inputs: Inputs):
    one, same, other = drafter(inputs, 1), drafter(inputs, 1), drafter(inputs, 2)
    assert torch.equal(one.fc.weight, same.fc.weight) and not torch.equal(one.fc.weight, other.fc.weight)


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_nothing(unbroken: Trained):
    rates = [rate for (rate,) in unbroken.rates.values()]
    assert rates[0] == 0 and max(rates) == rates[1] == SHARED["learning_rate"]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.02 * SHARED["learning_rate"]


def test_the_log_has_the_learning_rate_of_each_step(unbroken: Trained):
    logged = {row["step"]: [row["learning_rate"]] for row in unbroken.log if row["kind"] == "train"}
    assert logged == unbroken.rates


def starts(inputs: Inputs) -> dict[str, str]:
    """sha256 of what each tensor of the first try's drafter was at the start, in bf16."""
    state = drafter(inputs).state_dict()
    return {
        name: hashlib.sha256(tensor.bfloat16().view(torch.uint8).numpy()).hexdigest() for name, tensor in state.items()
    }


def test_what_each_exported_tensor_was_at_the_start_is_recorded(inputs: Inputs, unbroken: Trained):
    recorded, before = files.read_json(unbroken.work / training.START), starts(inputs)
    exported, kept_back = FROZEN[inputs.algorithm]
    parameters = {name for name, _ in unbroken.model.named_parameters()}
    assert recorded["frozen"] == {name: before[name] for name in exported}
    assert recorded["trainable"] == {name: before[name] for name in parameters - exported - kept_back}


def test_the_record_of_the_start_survives_a_resume(resumed: Trained, unbroken: Trained):
    ours, theirs = (files.read_json(each.work / training.START) for each in (resumed, unbroken))
    assert ours == theirs


def test_nothing_is_pickled(unbroken: Trained):
    suffixes = {path.suffix for path in unbroken.work.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jsonl", ".safetensors"}


class Interruption(Exception):
    pass


# What is called when training ends, and at which call of it. A checkpoint follows steps 2, 4 and 6 of each
# epoch of 8 and its end, before the held-out samples.
INTERRUPTIONS = [
    ("_optimizers_step", 2),
    ("_optimizers_step", 4),
    ("_optimizers_step", 9),
    ("_optimizers_step", 14),
    ("maybe_save_checkpoint", 1),
    ("maybe_save_checkpoint", 4),
    ("val_epoch", 1),
    ("val_epoch", 2),
    ("maybe_update_best", 2),
]


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, call: int, how: Callable[[], object]) -> None:
    """Have `how` called instead of the trainer's method when it is called for the `call`-th time."""
    method, calls = getattr(training.ResumableTrainer, name), Counter()

    def counted(self, *args, **kwargs):
        calls[name] += 1
        return how() if calls[name] == call else method(self, *args, **kwargs)

    monkeypatch.setattr(training.ResumableTrainer, name, counted)


def throw() -> None:
    raise Interruption


def send_sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def resume(inputs: Inputs, work: Path, rates: dict | None = None) -> Trained:
    """Go on with a drafter of other weights than the first try's, unless that left no checkpoint."""
    return train(inputs, work, weights=2 if any(work.glob("*state")) else SHARED["seed"], rates=rates)


@pytest.fixture(scope="module", params=INTERRUPTIONS, ids=lambda point: f"{point[0].removeprefix('_')}-{point[1]}")
def resumed(request, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training that ended early and was resumed."""
    work, rates = tmp_path_factory.mktemp("resumed"), {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt(monkeypatch, *request.param, throw)
        with pytest.raises(Interruption):
            train(inputs, work, rates=rates)
    return resume(inputs, work, rates)


def assert_same_weights(ours: Trained, theirs: Trained) -> None:
    left, right = ours.model.state_dict(), theirs.model.state_dict()
    assert [name for name in right if not torch.equal(left[name], right[name])] == []


def test_resumed_training_ends_with_the_weights_of_an_unbroken_one(resumed: Trained, unbroken: Trained):
    assert_same_weights(resumed, unbroken)


def test_resumed_training_takes_each_step_with_the_same_learning_rate(resumed: Trained, unbroken: Trained):
    ours, theirs = ({step: set(rates) for step, rates in each.rates.items()} for each in (resumed, unbroken))
    assert ours == theirs


@pytest.mark.parametrize("kind", ["train", "heldout", "replay"])
def test_resumed_training_logs_the_same_steps_once(resumed: Trained, unbroken: Trained, kind: str):
    ours, theirs = ([row for row in each.log if row["kind"] == kind] for each in (resumed, unbroken))
    assert ours == theirs


def test_progress_is_the_steps_that_a_checkpoint_contains_and_never_those_after_it(inputs: Inputs, tmp_path: Path):
    first, second = Noted(), Noted()
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Interruption):
        interrupt(monkeypatch, "_optimizers_step", 14, throw)
        train(inputs, tmp_path, heartbeat=first)
    train(inputs, tmp_path, weights=2, heartbeat=second)
    tokens = int(inputs.train.approx_lengths.sum()) // STEPS_PER_EPOCH
    assert first.told == [(step, step * tokens) for step in (0, 2, 4, 6, 8, 10, 12)]
    assert [step for step, _ in second.told] == [12, 14, 16, 16], "what an earlier try left is the start"
    assert second.line().startswith("16 of 16 steps, 100%")


def test_a_replay_that_an_earlier_try_logged_is_not_logged_again(inputs: Inputs, unbroken: Trained, tmp_path: Path):
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Interruption):
        monkeypatch.setattr(training.Trainer, "val_epoch", lambda *_: throw())
        train(inputs, tmp_path)
    assert files.read_jsonl(tmp_path / "training_log.jsonl")[-1]["kind"] == "replay"
    assert resume(inputs, tmp_path).log == unbroken.log


def seeds_of_steps(inputs: Inputs, work: Path, **spec) -> set[int]:
    """The seeds that random numbers follow from, of every call of the model in a training."""
    found, owner = set(), type(drafter(inputs))
    forward = owner.forward
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            owner, "forward", lambda *args, **more: (found.add(torch.initial_seed()), forward(*args, **more))[1]
        )
        train(inputs, work, **spec)
    return found


def test_every_step_of_every_seed_draws_its_own_random_numbers(inputs: Inputs, tmp_path: Path):
    ours, theirs = (seeds_of_steps(inputs, tmp_path / str(seed), seed=seed) for seed in (5, 6))
    assert len(ours) == len(theirs) == 16 + 1  # the last held-out samples come after the last step
    assert not ours & theirs


def test_the_last_checkpoint_is_resumed_if_the_next_was_not_yet_in_its_place(
    inputs: Inputs, unbroken: Trained, tmp_path: Path
):
    replaced, staged = os.replace, []

    def die_at_the_second(source: Path, destination: Path) -> None:
        staged.extend([1] if Path(source).name == ".state.tmp" else [])
        if len(staged) == 2:
            raise Interruption
        replaced(source, destination)

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Interruption):
        monkeypatch.setattr(os, "replace", die_at_the_second)
        train(inputs, tmp_path)
    assert not (tmp_path / "state").exists()
    assert_same_weights(resume(inputs, tmp_path), unbroken)


@pytest.mark.parametrize("point", [("_optimizers_step", 7), ("val_epoch", 2)], ids=str)
def test_a_signal_ends_training_as_unfinished(inputs: Inputs, unbroken: Trained, tmp_path: Path, point: tuple):
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt(monkeypatch, *point, send_sigterm)
        with pytest.raises(SystemExit) as ended:
            train(inputs, tmp_path)
    assert ended.value.code == 143
    assert_same_weights(resume(inputs, tmp_path), unbroken)


def test_a_finished_training_is_not_done_again_and_keeps_its_log(inputs: Inputs, tmp_path: Path):
    first = train(inputs, tmp_path)
    second = train(inputs, tmp_path, weights=2)
    assert_same_weights(second, first)
    assert second.rates == {}
    assert second.log == first.log


def test_a_log_line_cut_short_does_not_stop_a_resumed_training(inputs: Inputs, unbroken: Trained, tmp_path: Path):
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Interruption):
        interrupt(monkeypatch, "_optimizers_step", 8, throw)
        train(inputs, tmp_path)
    log = tmp_path / "training_log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    assert resume(inputs, tmp_path).log == unbroken.log


@pytest.mark.parametrize(("short", "packs"), [(1, [8, 7]), (0, [7, 8])], ids=["fewer", "more"])
def test_epochs_of_different_numbers_of_packs_are_all_trained(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int, packs: list[int]
):
    sampler = type(training.loader(inputs.train, inputs.spec, PACK, 0).batch_sampler)
    generate = sampler._generate_batches
    monkeypatch.setattr(sampler, "_generate_batches", lambda self, epoch: generate(self, epoch)[epoch == short :])
    trained = train(inputs, tmp_path)
    steps = [(row["epoch"], row["step"]) for row in trained.log if row["kind"] == "train"]
    assert steps == [(step >= packs[0], step) for step in range(sum(packs))]
    falling = [rate for (rate,) in trained.rates.values()][1:]
    assert falling == sorted(falling, reverse=True)


def test_the_export_is_a_bf16_folder_of_full_attention_that_the_replay_reads(
    inputs: Inputs, unbroken: Trained, tmp_path: Path
):
    training.export(unbroken.model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {str(tensor.dtype) for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {"torch.bfloat16"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["speculators_model_type"] == inputs.algorithm
    layer = config["transformer_layer_config"]
    assert layer["layer_types"] == ["full_attention"]
    assert layer["sliding_window"] is None
    made = constants.read(files.read_json(tmp_path / constants.FILE), tmp_path)
    assert constants.differences(made, constants.of_config(config)) == []
    assert list(made.capture_layers) == LAYERS[:3]
    drafter = replay.open_drafter(tmp_path, inputs.target)
    trained = dict(unbroken.model.named_parameters())
    assert drafter.weights.keys() == tensors.keys() - {"d2t", "t2d"}
    assert all(torch.equal(held, trained[name].bfloat16().float()) for name, held in drafter.weights.items())
