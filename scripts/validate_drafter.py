# SPDX-License-Identifier: Apache-2.0
"""Gate of a trained drafter: trained as declared, every tensor what it should be, better than the simplest guess.

Checks: the loss of every step finite, and falling; the learning rate of every step as the schedule has it, also
after a resume; tensors of the right names, shapes and type, finite, as many parameters as the formula gives; every
trained tensor has moved from its start and no frozen one has; embedding and head are the target's bit for bit, but
EAGLE-3's head, which is trained, resembles the rows it started from; map and layers are the declared ones; a replay
after every epoch; replay tau on a few held-out rows above what always proposing the most frequent continuation gives.
Does not check: what the training code feeds a drafter, which the rehearsal's gate has probed before; tau on all
held-out rows, which `replay` computes.

python scripts/validate_drafter.py --help
"""

import pandas as pd
from safetensors.torch import load_file

from pilotfish import cli, constants, drafter_checks, export_checks, files, layers, manifest, shards, tables, tensors

FILES = ("config.json", "model.safetensors", "constants.json", "initial.json", "training_log.jsonl")
CURE = "delete the checkpoint's folder and run again once the cause is mended"


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    folder = arguments.checkpoint
    log = files.read_jsonl(folder / "training_log.jsonl")
    tables.check(pd.DataFrame(log), tables.TRAINING_LOG, folder / "training_log.jsonl")
    held, vocabulary = load_file(folder / "model.safetensors"), load_file(arguments.vocabulary)
    made = constants.read(files.read_json(folder / constants.FILE), folder / constants.FILE)
    wanted = layers.conditioning_layers(spec["capture_layers"], facts, spec["algorithm"])
    found = tensors.Faults(folder)
    for fault in drafter_checks.log_faults(log, spec):
        found.add(f"training_log.jsonl, {fault}")
    for fault in tensors.faults(held, export_checks.schema(made)):
        found.add(f"model.safetensors, {fault}")
    if (epochs := sum(row["kind"] == "replay" for row in log)) != spec["epochs"]:
        found.add(f"training_log.jsonl: {epochs} replays of held-out rows, {spec['epochs']} epochs; train again")
    found.refuse(CURE)  # what follows reads these tensors
    if list(made.capture_layers) != wanted:
        found.add(f"constants.json: layers {list(made.capture_layers)}, where {wanted} are declared; train again")
    for fault in (
        drafter_checks.count_fault(held, made),
        *drafter_checks.movement_faults(held, files.read_json(folder / "initial.json")),
        *drafter_checks.map_faults(held, vocabulary),
        *drafter_checks.origin_faults(held, arguments.target.parent / "model", vocabulary),
    ):
        if fault:
            found.add(f"model.safetensors, {fault}")
    found.refuse(CURE)
    reader = shards.ShardReader(shards.verified_indexes(arguments.heldout_states), wanted)
    accepted, fault = drafter_checks.acceptance(
        folder, arguments.target.parent / "model", arguments.train_samples, arguments.heldout_samples, reader,
        spec["speculative_tokens"],
    )  # fmt: skip
    if fault:
        found.add(fault)
    found.refuse(CURE)
    manifest.write(
        arguments.manifest,
        schema="drafter",
        paths=[folder / name for name in FILES],
        spec=arguments.spec,
        code=arguments.code,
        statistics={**_statistics(log, held), "acceptance": accepted},
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--vocabulary", "vocabulary map")
    cli.path_argument(made, "--train-samples", "training samples")
    cli.path_argument(made, "--heldout-samples", "held-out samples")
    cli.path_argument(made, "--heldout-states", "manifest of their hidden states")
    cli.path_argument(made, "--checkpoint", "the drafter's folder")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _statistics(log: list[dict], held: dict) -> dict:
    heldout = [row for row in log if row["kind"] == "heldout"]
    return {
        "steps": sum(row["kind"] == "train" for row in log),
        "parameters": sum(tensor.numel() for tensor in held.values() if tensor.is_floating_point()),
        "heldout": [{key: row[key] for key in row if key.startswith(("loss", "full_acc"))} for row in heldout],
    }


if __name__ == "__main__":
    cli.run(main)
