# SPDX-License-Identifier: Apache-2.0
"""Train a drafter with speculators' Trainer, on the CPU or one GPU."""

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import loguru
import torch
from safetensors.torch import load_file, save_file
from speculators.model import SpeculatorModel
from speculators.train import trainer as speculators_trainer
from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader

from pilotfish import algorithms, batches, constants, files, tensors
from pilotfish.device import DTYPE, compute_dtype, device, on_gpu
from pilotfish.progress import Heartbeat
from pilotfish.transfer import SampleDataset

logger = logging.getLogger(__name__)
# What is computed in fp32 needs no autocast, which torch turns off by itself, with a warning.
warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")
loguru.logger.disable("speculators")

CHECKPOINTS_PER_EPOCH = 4
REPORT_SECONDS = 15
START = "initial.json"  # what each tensor was before training
STEPS_PER_SEED = 2**32  # more than a training has
WORKERS = 4  # data-loader processes on a GPU


def build_drafter(spec: Mapping, target: Path, layers: list[int], maps: Mapping[str, torch.Tensor]) -> SpeculatorModel:
    """A fresh drafter in fp32 of the algorithm in `spec`, its random start decided by the seed there."""
    torch.manual_seed(spec["seed"])
    return algorithms.of(spec).build(spec, target, layers, maps)


def loader(dataset: SampleDataset, spec: Mapping, tokens: int, seed: int) -> DataLoader:
    """Packs of `tokens` tokens in a seeded order, as the drafter's algorithm wants them."""
    sampler = batches.PackedBatches(dataset.approx_lengths, tokens, seed)
    sample = dataset[0]
    hidden = sample["verifier_last_hidden_states"].shape[1]
    layers = sample["hidden_states"].shape[1] // hidden
    dtype = compute_dtype(sample["verifier_last_hidden_states"])
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=WORKERS if on_gpu() else 0,
        pin_memory=on_gpu(),
        multiprocessing_context="spawn" if on_gpu() else None,
        collate_fn=algorithms.of(spec).collator(spec, tokens, hidden, layers, dtype),
    )


class ResumableTrainer(Trainer):
    """speculators' Trainer on the CPU too, with checkpoints that resume exactly.

    speculators pickles the optimizer and rounds it and the weights to bf16; here fp32 tensors go to
    safetensors and the counters to JSON, in one folder that appears by rename.
    """

    def __init__(
        self,
        *args,
        state: Path,
        seed: int,
        replay: Callable[[int, int], None],
        saved: Callable[[int], None],
        **kwargs,
    ):
        """`replay` is called with each finished epoch and its step, `saved` with the step of each checkpoint."""
        self._state, self._replay, self._saved = state, replay, saved
        self.between_epochs = False  # resumed where an epoch was complete
        super().__init__(*args, **kwargs)
        self._resume()
        self._seed = seed
        self.model.register_forward_pre_hook(self._reseed)

    def _reseed(self, *_: object) -> None:
        """A step's random numbers (anchors, noise) follow from its number alone: a resumed run has the same."""
        torch.manual_seed(self._seed * STEPS_PER_SEED + self.global_step)

    def setup_trainer(self) -> None:
        super().setup_trainer()
        chosen = device()
        self.device_type, self.local_rank = chosen.type, chosen

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Save the state after `local_step` steps of `epoch`; 0 means that the epoch is complete."""
        if epoch == "interrupted":
            # The last regular checkpoint is resumed; an ill-timed one could be of half a step.
            return
        staged = self._state.with_name(f".{self._state.name}.tmp")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        save_file(_trainable(self.model), staged / "model.safetensors")
        (optimizer,) = self.optimizers
        tensors, plain = _flatten_optimizer(optimizer.state_dict())
        save_file(tensors, staged / "optimizer.safetensors")
        counters = {"epoch": epoch, "local_step": local_step, "global_step": self.global_step}
        schedule = [scheduler.state_dict() for scheduler in self.schedulers]
        files.write_json(staged / "state.json", {**counters, "optimizer": plain, "schedulers": schedule})
        old = self._state.with_name(f".{self._state.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._state.exists():
            os.replace(self._state, old)
        os.replace(staged, self._state)
        shutil.rmtree(old, ignore_errors=True)
        self._saved(self.global_step)

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        """Replay held-out rows, then validate."""
        self._replay(epoch, self.global_step)
        return super().val_epoch(epoch)

    def maybe_update_best(self, epoch: int, val_metrics: dict | None) -> None:
        """The last epoch is the result: held-out tau decides between runs, not the smallest loss."""

    def _resume(self) -> None:
        old = self._state.with_name(f".{self._state.name}.old")
        if not self._state.exists() and old.exists():
            os.replace(old, self._state)
        if not self._state.exists():
            return
        saved = files.read_json(self._state / "state.json")
        self.model.load_state_dict(load_file(self._state / "model.safetensors"), strict=False)
        (optimizer,) = self.optimizers
        optimizer.load_state_dict(
            _unflatten_optimizer(load_file(self._state / "optimizer.safetensors"), saved["optimizer"])
        )
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.global_step = saved["global_step"]
        self._resume_local_step = saved["local_step"]
        self.between_epochs = not saved["local_step"]
        self.current_epoch = saved["epoch"] + self.between_epochs
        logger.info("resumed at step %d", self.global_step)


def _trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def _flatten_optimizer(state: dict) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """An optimizer's state as named tensors, and its parameter groups as plain values."""
    flat = {
        f"{number}.{name}": value.detach().cpu().clone()
        for number, entry in state["state"].items()
        for name, value in entry.items()
    }
    return flat, state["param_groups"]


def _unflatten_optimizer(tensors: dict[str, torch.Tensor], groups: list[dict]) -> dict:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    return {"state": state, "param_groups": groups}


class StepLog(logging.Handler):
    """Turns the trainer's metric records into lines of a JSONL file, and now and then into a log line."""

    def __init__(self, path: Path, heartbeat: Heartbeat):
        super().__init__()
        self.path, self.heartbeat = path, heartbeat
        self.reported = time.monotonic()

    def keep_until(self, step: int) -> None:
        """Drop what a run resumed at `step` is going to do again: later steps, and later validations."""
        rows = [row for row in files.read_appended(self.path) if row["step"] < step + (row["kind"] != "train")]
        files.write_text(self.path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))

    def holds(self, kind: str, epoch: int) -> bool:
        """Whether the `heldout` validation, or the `replay`, after `epoch` is in the log."""
        return any((row["kind"], row["epoch"]) == (kind, epoch) for row in files.read_appended(self.path))

    def replayed(self, epoch: int, step: int, found: dict) -> None:
        """Write down what the replay of held-out rows after `epoch` gave."""
        files.append_jsonl(self.path, {"kind": "replay", "epoch": epoch, "step": step, **found})
        logger.info("epoch %d: replay tau %.3f on %d held-out rows", epoch + 1, found["tau"], found["rows"])

    def emit(self, record: logging.LogRecord) -> None:
        content = record.msg
        kind = "train" if "train" in content else "heldout"
        metrics = content["train"] if kind == "train" else content["val"]
        row = {"kind": kind, "epoch": content["epoch"], "step": record.step}
        if kind == "train":
            row["learning_rate"] = content["lr"]
        row |= {name.removesuffix("_epoch"): round(float(value), 6) for name, value in metrics.items()}
        files.append_jsonl(self.path, row)
        self._report(row)

    def _report(self, row: dict) -> None:
        now = time.monotonic()
        if row["kind"] == "heldout" or now - self.reported > REPORT_SECONDS:
            self.reported = now
            self.heartbeat.stage(f"epoch {row['epoch'] + 1}, step {row['step'] + 1}")
            places = sorted(int(key.removeprefix("full_acc_")) for key in row if key.startswith("full_acc_"))
            accuracy = " ".join(f"{row[f'full_acc_{place}']:.3f}" for place in places)
            logger.info(
                "%s, step %d of about %d: loss %.3f, accuracy by step %s",
                row["kind"], row["step"] + 1, self.heartbeat.total, row["loss"], accuracy,
            )  # fmt: skip


def _trainer_config(spec: dict, work: Path, dtype: torch.dtype) -> TrainerConfig:
    arguments = algorithms.of(spec).call_arguments(spec)
    return TrainerConfig(
        lr=spec["learning_rate"],
        num_epochs=spec["epochs"],
        save_path=str(work / "speculators"),
        train_call_kwargs=arguments,
        val_call_kwargs=arguments,
        weight_decay=spec["weight_decay"],
        scheduler_type="cosine",
        scheduler_warmup_ratio=spec["warmup_ratio"],
        checkpoint_freq=1 / CHECKPOINTS_PER_EPOCH,
        hidden_states_dtype=dtype,
    )


def record_start(model: SpeculatorModel, path: Path) -> None:
    """Write what each tensor is before training, unless an earlier try did: the sha256 of its bf16 bytes.

    `trainable` and `frozen` hold the parameters that an export will have, by name.
    """
    if path.exists():
        return
    kept = convert_float_dtype(model.state_dict(), DTYPE)
    left_out = set(model._keys_to_ignore_on_save or ())
    start: dict[str, dict[str, str]] = {"trainable": {}, "frozen": {}}
    for name, parameter in model.named_parameters():
        if name not in left_out:
            start["trainable" if parameter.requires_grad else "frozen"][name] = tensors.digest(kept[name])
    files.write_json(path, start)


@contextmanager
def _metrics_to(log: StepLog) -> Iterator[None]:
    """Have speculators' metric records go to `log` and nowhere else."""
    logging.getLogger("speculators").setLevel(logging.WARNING)
    metrics = logging.getLogger("speculators.metrics")
    metrics.setLevel(logging.INFO)
    metrics.propagate = False
    metrics.addHandler(log)
    try:
        yield
    finally:
        metrics.removeHandler(log)


def _count_saved(heartbeat: Heartbeat, packs: DataLoader, epochs: int) -> Callable[[int], None]:
    """What tells a heartbeat the step of a checkpoint; tokens are the packs' mean times the steps."""
    heartbeat.total = epochs * len(packs)  # about: epochs pack differently
    tokens_per_step = int(packs.batch_sampler.lengths.sum()) / len(packs)

    def saved(step: int) -> None:
        heartbeat.total = max(heartbeat.total, step)
        heartbeat.advance(step, round(step * tokens_per_step))

    return saved


def train(
    model: SpeculatorModel,
    spec: dict,
    train_set: SampleDataset,
    heldout_set: SampleDataset,
    replay: Callable[[Path], dict],
    work: Path,
    heartbeat: Heartbeat,
) -> Path:
    """Train for `epochs`, resuming from `work` if it holds a checkpoint; returns the log of steps.

    The heartbeat's finished work is the steps that the checkpoint on disk contains: those after it would be done
    again, and stand in the stage's text, which shows that the training moves.

    START, beside the log, says what each tensor was before the first step. After each epoch `replay` is given a
    folder with the drafter as exported; the log keeps what it finds (`tau` over `rows`).

    Raises SystemExit when a signal ended training early: the state is kept for the next try.
    """
    if device().type == "cpu":
        # speculators times each step with this; there is nothing to wait for on a CPU.
        torch.accelerator.synchronize = lambda *_: None
    # StepLog reports instead of a progress bar.
    speculators_trainer.tqdm = lambda batches, **_: batches
    record_start(model, work / START)
    train_loader = loader(train_set, spec, spec["tokens_per_batch"], spec["seed"])
    saved = _count_saved(heartbeat, train_loader, spec["epochs"])
    logger.info("%s", batches.describe(train_loader.batch_sampler))
    log = StepLog(work / "training_log.jsonl", heartbeat)

    def replay_after(epoch: int, step: int) -> None:
        if log.holds("replay", epoch):  # by an earlier try, which ended before the validation
            return
        heartbeat.stage(f"epoch {epoch + 1}, replay of held-out rows")
        export(model, work / "replayed")
        log.replayed(epoch, step, replay(work / "replayed"))

    trainer = ResumableTrainer(
        model,
        _trainer_config(spec, work, train_loader.collate_fn.dtype),
        train_loader,
        loader(heldout_set, spec, spec["tokens_per_batch"], 0),
        state=work / "state",
        seed=spec["seed"],
        replay=replay_after,
        saved=saved,
    )
    saved(trainer.global_step)
    log.keep_until(trainer.global_step)
    with _metrics_to(log):
        if trainer.between_epochs and not log.holds("heldout", trainer.current_epoch - 1):
            trainer.val_epoch(trainer.current_epoch - 1)
        trainer.run_training()
    if not log.holds("heldout", spec["epochs"] - 1):
        logger.info("interrupted; the last checkpoint is kept, and the same command goes on from there")
        raise SystemExit(143)
    heartbeat.total = trainer.global_step
    saved(trainer.global_step)
    return log.path


def export(model: SpeculatorModel, folder: Path) -> None:
    """Write config.json and bf16 model.safetensors in speculators' format, which vLLM serves as it is.

    Beside them constants.json says what the model was in training.
    """
    state = convert_float_dtype(model.state_dict(), DTYPE)
    model.save_pretrained(folder, state_dict=state)
    patch_config_dtype(folder / "config.json", DTYPE)
    constants.write(folder, constants.of_model(model))
    # speculators lays its own code beside the weights; nobody here runs it.
    (folder / "config.py").unlink(missing_ok=True)
