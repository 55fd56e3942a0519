# SPDX-License-Identifier: Apache-2.0
"""Export a verified drafter as a folder that `vllm serve` loads as it is: config.json, model.safetensors.

python scripts/export.py --help
"""

from pilotfish import cli, export, manifest


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--drafter", "the drafter's manifest; its checkpoint lies beside it")
    cli.path_argument(made, "--output", "folder to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, "drafter")
    target = export.target_name(arguments.target, facts)
    export.write(arguments.drafter.parent / "checkpoint", arguments.output, target)


if __name__ == "__main__":
    cli.run(main)
