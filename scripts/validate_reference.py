# SPDX-License-Identifier: Apache-2.0
"""Gate of an adopted drafter: whole, bit for bit the published one, made for this target, and as it was declared.

Checks: the folder's files; every tensor's name, shape and type, none missing or unknown, none with NaN or infinity;
each bit for bit what was read from the source (in bfloat16); the constants that config.json states, its sizes, layers
and mask token within the target; the map of a reduced vocabulary; algorithm, layers and k the configuration's; no
Python, no causal blocks, and positions enough for engine.max_model_len; the replay has a forward pass for it.
Does not check: whether the drafter is any good, or was trained on this very target, which its tau will tell.

python scripts/validate_reference.py --help
"""

from safetensors.torch import load_file

from pilotfish import cli, constants, export, export_checks, files, manifest, reference, replay, tensors

CURE = "what the configuration says is mended there; for the rest delete the folder and run again to adopt it anew"


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    folder = arguments.reference
    config, record = (files.read_json(folder / name) for name in ("config.json", reference.RECORD))
    stated = constants.of_config(config, folder / "config.json")
    held = load_file(folder / "model.safetensors")
    found = tensors.Faults(folder)
    width = config["transformer_layer_config"]["intermediate_size"]
    for fault in (
        *reference.declared_faults(config, stated, spec),
        *export_checks.config_faults(config, stated, stated, spec, export.target_name(arguments.target, facts)),
        *tensors.faults(held, export_checks.schema(stated), width=width),
    ):
        found.add(fault)
    found.refuse(CURE)  # what follows reads these tensors
    for fault in reference.faults(folder, held, stated, facts):
        found.add(fault)
    found.refuse(CURE)
    replay.open_drafter(folder, arguments.target.parent / "model")  # refuses what it has no forward pass for
    manifest.write(
        arguments.manifest,
        schema="reference",
        paths=[folder / name for name in reference.FILES],
        spec=arguments.spec,
        code=arguments.code,
        statistics={
            **{key: value for key, value in record.items() if key != "sha256"},
            "algorithm": stated.algorithm,
            "capture_layers": list(stated.capture_layers),
            "speculative_tokens": spec["speculative_tokens"],
            "parameters": sum(tensor.numel() for tensor in held.values() if tensor.is_floating_point()),
            "constants": stated.model_dump(),
        },
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--reference", "the adopted drafter's folder")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


if __name__ == "__main__":
    cli.run(main)
