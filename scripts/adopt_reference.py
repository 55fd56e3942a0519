# SPDX-License-Identifier: Apache-2.0
"""Adopt a published drafter: a folder or a hub id of speculators, SGLang (EAGLE-3) or z-lab (DFlash) format.

Writes config.json and model.safetensors in speculators' format, and adopted.json, what was done to get there.

python scripts/adopt_reference.py --spec '{"source": "ORG/NAME", "revision": null, "speculative_tokens": 3}' \\
    --target T/manifest.json --output FOLDER
"""

import logging

from pilotfish import cli, export, manifest, reference


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--output", "folder to write")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    source, revision = reference.locate(spec["source"], spec["revision"])
    record = reference.adopt(
        source,
        arguments.output,
        model=arguments.target.parent / "model",
        facts=facts,
        target=export.target_name(arguments.target, facts),
        speculative_tokens=spec["speculative_tokens"],
        revision=revision,
    )
    logging.info(
        "%s format, made for %s; converted to bfloat16: %s; from the target: %s; dropped as the target's own: %s",
        record["format"], record["verifier"] or "a target it does not name", record["converted"] or "nothing",
        ", ".join(record["filled"]) or "nothing", ", ".join(record["dropped"]) or "nothing",
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
