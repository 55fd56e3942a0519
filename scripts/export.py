# SPDX-License-Identifier: Apache-2.0
"""Export a verified drafter as a folder that `vllm serve` loads as it is: config.json, model.safetensors.

python scripts/export.py --help
"""

from pilotfish import cli, files, manifest, replay

CODE_KEYS = ("auto_map",)  # points at Python beside the weights, which no server should be asked to run


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--drafter", "the drafter's manifest; its checkpoint lies beside it")
    cli.path_argument(made, "--output", "folder to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, "drafter")
    checkpoint = arguments.drafter.parent / "checkpoint"
    config = files.read_json(checkpoint / "config.json")
    for key in CODE_KEYS:
        config.pop(key, None)
    local = (arguments.target.parent / "model").as_posix()
    # Only a hub id has a revision; every other source is known by its files in the run's folder.
    config["speculators_config"]["verifier"]["name_or_path"] = facts["source"] if facts["revision"] else local
    files.write_json(arguments.output / "config.json", config)
    files.link(checkpoint / "model.safetensors", arguments.output / "model.safetensors")
    # Reading it back checks that no tensor is missing or unknown, and no value defaults differently.
    replay.Eagle3Drafter(arguments.output)


if __name__ == "__main__":
    cli.run(main)
