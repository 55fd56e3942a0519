# SPDX-License-Identifier: Apache-2.0
"""Gate of an export: whole, bit for bit the verified checkpoint, and to a server the drafter that was trained.

Checks: the folder's files; every tensor's name, shape and type, none missing or unknown, none with NaN or infinity;
each bit for bit the verified checkpoint's, `d2t` and `t2d` the vocabulary map's; read back, it gives the checkpoint's
logits on stored states to the last bit; the constants that config.json states (layers, rope, window, causality,
norms, vocabularies, sizes, tied head) are those of training; k, the target's name and enough positions for
engine.max_model_len; no Python and no sliding window for a server to apply.
Does not check: whether the drafter is any good (its own gate), and what an engine makes of config.json, which the
gates of the rehearsal and of the evaluation compare with the engine's own view.

python scripts/validate_export.py --help
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from pilotfish import cli, constants, export, export_checks, files, manifest, shards, tensors

CURE = "delete the folder and run again to export the verified checkpoint anew"


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, "drafter")
    checkpoint = arguments.drafter.parent / "checkpoint"
    trained = constants.read(files.read_json(checkpoint / constants.FILE), checkpoint / constants.FILE)
    config = files.read_json(arguments.export / "config.json")
    served = constants.of_config(config, arguments.export / "config.json")
    held = load_file(arguments.export / "model.safetensors")
    found = tensors.Faults(arguments.export)
    name = export.target_name(arguments.target, facts)
    for fault in (
        *_file_faults(arguments.export),
        *export_checks.config_faults(config, served, trained, spec, name),
        *tensors.faults(
            held, export_checks.schema(trained), width=config["transformer_layer_config"]["intermediate_size"]
        ),
        *export_checks.tensor_faults(
            held, load_file(checkpoint / "model.safetensors"), load_file(arguments.vocabulary)
        ),
    ):
        found.add(fault)
    found.refuse(CURE)
    row = _first_row(arguments.states, trained.capture_layers)
    for fault in export_checks.drafting_faults(arguments.export, checkpoint, arguments.target.parent / "model", *row):
        found.add(fault)
    found.refuse(CURE)
    manifest.write(
        arguments.manifest,
        schema="export",
        paths=[arguments.export / name for name in export.FILES],
        spec=arguments.spec,
        code=arguments.code,
        statistics={"constants": served.model_dump(), "tensors": len(held), "slots_drafted": len(row[0]) - 1},
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--drafter", "the drafter's manifest; its checkpoint lies beside it")
    cli.path_argument(made, "--vocabulary", "vocabulary map")
    cli.path_argument(made, "--states", "manifest of the held-out hidden states")
    cli.path_argument(made, "--export", "folder to check")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _file_faults(folder: Path):
    """An engine loads every safetensors file that it finds, and may run Python."""
    known = {*export.FILES, "manifest.json"}
    for path in sorted(folder.iterdir()):
        if path.name not in known and not path.name.startswith("."):
            yield f"{path.name}: no file of an export"


def _first_row(states: Path, wanted: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens of a held-out row, and their states at the drafter's layers."""
    indexes = shards.verified_indexes(states)
    row = files.read_json(indexes[0])["shards"][0]["rows"][0]
    held = shards.ShardReader(indexes[:1], wanted).read(row)
    return held.token_ids[: export_checks.SLOTS + 1], held.hidden_states[: export_checks.SLOTS + 1]


if __name__ == "__main__":
    cli.run(main)
