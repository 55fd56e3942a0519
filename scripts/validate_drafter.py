# SPDX-License-Identifier: Apache-2.0
"""Gate of a trained drafter: every step's loss finite and falling, weights finite, head and map the right ones.

python scripts/validate_drafter.py --help
"""

import math

import torch
from safetensors.torch import load_file

from pilotfish import cli, files, layers, manifest
from pilotfish.errors import UserError

FILES = ("config.json", "model.safetensors", "training_log.jsonl")


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--vocabulary", "vocabulary map")
    cli.path_argument(made, "--checkpoint", "the drafter's folder")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    wanted = layers.conditioning_layers(spec["capture_layers"], facts)
    log = files.read_jsonl(arguments.checkpoint / "training_log.jsonl")
    tensors = load_file(arguments.checkpoint / "model.safetensors")
    for fault in (
        *_log_faults(log),
        *_weight_faults(tensors, load_file(arguments.vocabulary)),
        *_config_faults(files.read_json(arguments.checkpoint / "config.json"), wanted),
    ):
        raise UserError(f"{arguments.checkpoint}: {fault}")
    manifest.write(
        arguments.manifest,
        schema="drafter",
        paths=[arguments.checkpoint / name for name in FILES],
        spec=arguments.spec,
        code=arguments.code,
        statistics=_statistics(log, tensors),
    )


def _log_faults(log: list[dict]):
    steps = [row for row in log if row["kind"] == "train"]
    for number, row in enumerate(steps):
        if row["step"] != number:
            yield f"training_log.jsonl: step {number} is missing; delete the folder and run again"
            return
        if not math.isfinite(row["loss"]):
            yield f"training_log.jsonl, step {number}: the loss is {row['loss']}; lower learning_rate"
            return
    tenth = max(1, len(steps) // 10)
    first, last = (sum(row["loss"] for row in part) / tenth for part in (steps[:tenth], steps[-tenth:]))
    if last >= first:
        yield f"the loss did not fall ({first:.3f} to {last:.3f}); look at learning_rate and the samples"


def _weight_faults(tensors: dict[str, torch.Tensor], vocabulary: dict[str, torch.Tensor]):
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            yield f"model.safetensors: {name} holds NaN or infinity"
    for name in ("d2t", "t2d"):
        if name in tensors and not torch.equal(tensors[name], vocabulary[name]):
            yield f"model.safetensors: {name} is not the vocabulary map's; train again on the present map"
    if len(tensors["lm_head.weight"]) != len(vocabulary["d2t"]):
        yield "model.safetensors: lm_head has another size than the draft vocabulary"


def _config_faults(config: dict, wanted: list[int]):
    if config["eagle_aux_hidden_state_layer_ids"] != wanted:
        yield f"config.json: layers {config['eagle_aux_hidden_state_layer_ids']}, trained on {wanted}"


def _statistics(log: list[dict], tensors: dict[str, torch.Tensor]) -> dict:
    heldout = [row for row in log if row["kind"] == "heldout"]
    return {
        "steps": sum(row["kind"] == "train" for row in log),
        "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "heldout": [{key: row[key] for key in row if key.startswith(("loss", "full_acc"))} for row in heldout],
    }


if __name__ == "__main__":
    cli.run(main)
