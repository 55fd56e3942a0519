# SPDX-License-Identifier: Apache-2.0
"""What must hold of a trained drafter: its log, its tensors against their start and the target, and what it accepts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pilotfish import continuations, parameters, replay, rounds, samples
from pilotfish.constants import Constants
from pilotfish.device import DTYPE
from pilotfish.heads import TargetTensors
from pilotfish.shards import ShardReader
from pilotfish.tensors import digest

RATE_TOLERANCE = 1e-6  # relative, of a logged learning rate
HEAD_LIKENESS_MIN = 0.5  # mean cosine to the target's rows: trained heads have 0.96 to 0.99, random ones 0
REPLAYED_ROWS = 16  # spread over the held-out split


def scheduled_rate(step: int, peak: float, warmup: int, total: int) -> float:
    """Learning rate of a step: linear up over `warmup` steps, then half a cosine down to 0 at `total`.

    As transformers' get_cosine_schedule_with_warmup has it.
    """
    if step < warmup:
        return peak * step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return peak * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def log_faults(log: Sequence[dict], spec: Mapping) -> Iterator[str]:
    """Steps that are missing, not finite or at a wrong learning rate, and a loss that does not fall.

    `spec` holds `learning_rate`, `warmup_ratio` and `epochs`. The first fault of a kind is told.
    """
    steps = [row for row in log if row["kind"] == "train"]
    # The schedule is laid out for as many steps an epoch as the first one has.
    total = spec["epochs"] * sum(row["epoch"] == 0 for row in steps)
    warmup = int(total * spec["warmup_ratio"])
    for number, row in enumerate(steps):
        rate = scheduled_rate(number, spec["learning_rate"], warmup, total)
        if row["step"] != number:
            yield f"step {number} is missing; delete the folder and run again"
        elif not math.isfinite(row["loss"]):
            yield f"step {number}: the loss is {row['loss']}; lower learning_rate and train again"
        elif not math.isclose(row["learning_rate"], rate, rel_tol=RATE_TOLERANCE, abs_tol=1e-15):
            yield (
                f"step {number}: the learning rate is {row['learning_rate']:.6g} where the schedule has {rate:.6g}; it "
                "was resumed or set up wrongly, so delete the folder and train again"
            )
        else:
            continue
        return
    tenth = max(1, len(steps) // 10)
    first, last = (sum(row["loss"] for row in part) / tenth for part in (steps[:tenth], steps[-tenth:]))
    if last >= first:
        yield f"the loss did not fall ({first:.3f} to {last:.3f}); look at learning_rate and the samples"


def count_fault(tensors: Mapping[str, torch.Tensor], made: Constants) -> str | None:
    """Whether the checkpoint has as many parameters as its constants give."""
    held = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    width = len(tensors["layers.0.mlp.gate_proj.weight"])
    due = parameters.stored(made, width)
    return f"{held} parameters where its constants give {due}; train again" if held != due else None


def movement_faults(tensors: Mapping[str, torch.Tensor], start: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Trained tensors that are still their start, and frozen ones that are not.

    `start` holds the sha256 of each tensor's bf16 bytes before training, under `trainable` and `frozen`.
    """
    for kind, digests in start.items():
        for name, before in digests.items():
            if name not in tensors:
                yield f"{name}: missing, though it was there when training began; train again"
                continue
            after = digest(tensors[name])
            if kind == "trainable" and after == before:
                yield f"{name}: never moved from its start; was it left out of the optimizer? Train again"
            if kind == "frozen" and after != before:
                yield f"{name}: has moved though it is frozen; train again"


def map_faults(tensors: Mapping[str, torch.Tensor], vocabulary: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Whether the drafter's map is the vocabulary's, and its head as large."""
    for name in ("d2t", "t2d"):
        if name in tensors and not torch.equal(tensors[name], vocabulary[name]):
            zero = " (it is all zero: never applied)" if name == "d2t" and not tensors[name].any() else ""
            yield f"{name}: not the vocabulary map's{zero}; train again on the present map"
    if "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) != len(vocabulary["d2t"]):
        yield "lm_head.weight: another size than the draft vocabulary; train again on the present map"


def origin_faults(
    tensors: Mapping[str, torch.Tensor], target: Path, vocabulary: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Whether what a checkpoint holds of embedding and head is the target's.

    EAGLE-3 holds both, the embedding frozen and the head trained from the target's rows; DFlash the head of a
    reduced vocabulary, frozen.
    """
    held = TargetTensors(target)
    if "embed_tokens.weight" in tensors and not all(
        torch.equal(rows.to(DTYPE), tensors["embed_tokens.weight"][start : start + len(rows)])
        for start, rows in held.embedding()
    ):
        yield "embed_tokens.weight: not the target's, bit for bit: random, or another model's; train again"
    if "lm_head.weight" not in tensors:
        return
    head, chosen = tensors["lm_head.weight"], torch.arange(len(vocabulary["d2t"])) + vocabulary["d2t"]
    rows = held.head_rows(chosen)
    if "embed_tokens.weight" not in tensors:
        if not torch.equal(rows.to(DTYPE), head):
            yield "lm_head.weight: not the target's rows of the draft vocabulary, bit for bit; train again"
        return
    likeness = torch.cosine_similarity(rows.float(), head.float()).mean().item()
    if not likeness >= HEAD_LIKENESS_MIN:
        yield (
            f"lm_head.weight: its rows resemble the target's by {likeness:.2f} (cosine, at least {HEAD_LIKENESS_MIN}): "
            "it did not start from the target's head, or it went astray; train again, or lower learning_rate"
        )


def replayed(drafter: Path, target: Path, heldout: Path, reader: ShardReader, k: int) -> tuple[dict, list[int]]:
    """`tau` of a drafter's folder over `rows` spread over the held-out split, and the places of these rows.

    `reader` gives the drafter's conditioning layers.
    """
    every = samples.load(heldout)
    places = torch.linspace(0, len(every) - 1, min(REPLAYED_ROWS, len(every))).round().long().unique().tolist()
    found = replay.replay_samples(replay.open_drafter(drafter, target), reader, every.select(places), k)
    tau = rounds.summarise(list(found.values()), k)["tau_micro_incl_bonus"]
    return {"tau": round(tau, 4), "rows": len(places)}, places


def acceptance(
    drafter: Path, target: Path, train: Path, heldout: Path, reader: ShardReader, k: int
) -> tuple[dict[str, float], str | None]:
    """tau of the drafter and of the most frequent continuations on the same held-out rows; and what that is wrong."""
    ours, places = replayed(drafter, target, heldout, reader, k)
    counted = samples.load(train)
    following = continuations.most_frequent(counted.select(range(min(continuations.ROWS, len(counted)))))
    chosen = samples.load(heldout).select(places)
    plain = [continuations.rounds(each["input_ids"][each["prompt_length"] :], following, k) for each in chosen]
    simplest = rounds.summarise(plain, k)["tau_micro_incl_bonus"]
    found = {"rows": len(places), "tau_replay": ours["tau"], "tau_most_frequent": round(simplest, 4)}
    if ours["tau"] > simplest:
        return found, None
    return found, (
        f"replay tau {ours['tau']:.3f} on {len(places)} held-out rows, where always proposing the most frequent "
        f"continuation gives {simplest:.3f}: it has learnt nothing of use; look at learning_rate, epochs and the "
        "number of samples"
    )
