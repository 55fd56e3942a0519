# SPDX-License-Identifier: Apache-2.0
"""Faults of a trained drafter: of its log, of its tensors, and of what its export tells an engine."""

from hashlib import sha256

import torch
from safetensors.torch import load_file, save_file

from faults import Scene, fault
from pilotfish import files
from pilotfish.drafter_checks import scheduled_rate

CHECKPOINT = "drafters/eagle3/checkpoint"
WHERE = r"results/tiny/drafters/eagle3/checkpoint: \d+ check\(s\) failed:\n"


def tensor_fault(name: str, says: str, checkpoint: str = CHECKPOINT):
    """Register a fault that changes a checkpoint's tensors."""

    def register(change) -> None:
        def inject(scene: Scene) -> None:
            path = scene.path(f"{checkpoint}/model.safetensors")
            tensors = {key: value.clone() for key, value in load_file(path).items()}
            change(scene, tensors)
            save_file(tensors, path)

        fault("Training", name, "validate_drafter", WHERE.replace(CHECKPOINT, checkpoint) + says)(inject)

    return register


@fault(
    "Training",
    "learning rate wrong after resume",
    "validate_drafter",
    WHERE
    + r"  training_log\.jsonl, step \d+: the learning rate is .* where the schedule has .*; it was resumed or set up"
    r" wrongly, so delete the folder and train again",
)
def _(scene: Scene) -> None:
    """From the middle on the schedule begins anew, as it does where a resume forgets it."""

    def change(rows: list[dict]) -> None:
        steps = [row for row in rows if row["kind"] == "train"]
        half = len(steps) // 2
        for row in steps[half:]:
            row["learning_rate"] = scheduled_rate(row["step"] - half, 2e-3, len(steps) // 33, len(steps))

    scene.edit_rows(f"{CHECKPOINT}/training_log.jsonl", change)


@fault(
    "Training",
    "loss not finite",
    "validate_drafter",
    WHERE + r"  training_log\.jsonl, step 9: the loss is nan; lower learning_rate and train again",
)
def _(scene: Scene) -> None:
    path = scene.path(f"{CHECKPOINT}/training_log.jsonl")
    rows = files.read_jsonl(path)
    rows[9]["loss"] = float("nan")
    path.unlink()
    for row in rows:
        files.append_jsonl(path, row)


@tensor_fault("embedding random", r"(.*\n)*.*embed_tokens\.weight: not the target's, bit for bit: random.*train again")
def _(_: Scene, tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(tensors["embed_tokens.weight"].shape).bfloat16()


@tensor_fault("head random", r"(.*\n)*.*lm_head\.weight: its rows resemble the target's by -?0\.\d+ .*train again")
def _(_: Scene, tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = torch.randn(tensors["lm_head.weight"].shape).bfloat16()


@tensor_fault(
    "head NaN", r"  model\.safetensors, lm_head\.weight: \d+ of \d+ values are NaN or infinite, .*\n.*run again"
)
def _(_: Scene, tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][7] = float("nan")


@tensor_fault(
    "a tensor that never moved", r"  model\.safetensors, fc\.weight: never moved from its start; .*Train again"
)
def _(scene: Scene, tensors: dict[str, torch.Tensor]) -> None:
    """The record of the start is set to what the tensor is: as if the optimizer had never seen it."""
    now = sha256(tensors["fc.weight"].contiguous().view(torch.uint8).numpy()).hexdigest()
    scene.edit_json(f"{CHECKPOINT}/initial.json", lambda start: start["trainable"].update({"fc.weight": now}))


@tensor_fault(
    "`d2t` not applied", r"  model\.safetensors, d2t: not the vocabulary map's \(it is all zero: never applied\)"
)
def _(_: Scene, tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


@tensor_fault(
    "no better than the most frequent continuation",
    r"  replay tau 1\.\d+ on 16 held-out rows, where always proposing the most frequent continuation gives \d\.\d+",
)
def _(_: Scene, tensors: dict[str, torch.Tensor]) -> None:
    """A drafter whose layer says nothing: all that is left are embedding and head."""
    tensors["layers.0.mlp.down_proj.weight"] = torch.randn(tensors["layers.0.mlp.down_proj.weight"].shape).bfloat16()


@fault(
    "Export and serving",
    "DFlash: the engine is not told that a block's tokens see those behind them",
    "validate_export",
    r"results/tiny/export/dflash: 1 check\(s\) failed:\n  config\.json: causal True, not False as trained\n"
    r"delete the folder and run again",
)
def _(scene: Scene) -> None:
    """As speculators exports it: vLLM takes a setting of sliding windows for one of all layers."""
    scene.edit_json("export/dflash/config.json", lambda config: config.update(sliding_window_non_causal=False))
