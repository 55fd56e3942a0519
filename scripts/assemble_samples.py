# SPDX-License-Identifier: Apache-2.0
"""Turn the responses of all parts of a split into samples, as one memory-mapped Arrow file.

python scripts/assemble_samples.py --spec '{}' --responses R.jsonl --output samples.arrow
"""

import logging

from pilotfish import cli, manifest, samples


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--manifest", "manifest of the responses; left_out.jsonl lies beside it")
    cli.path_argument(made, "--responses", "responses, one JSONL a part, in order", many=True)
    cli.path_argument(made, "--output", "Arrow file to write")
    arguments = made.parse_args()
    manifest.read(arguments.manifest, "responses")
    left_out = arguments.manifest.parent / "left_out.jsonl"
    logging.info("%d samples", samples.assemble(arguments.responses, left_out, arguments.output))


if __name__ == "__main__":
    cli.run(main)
