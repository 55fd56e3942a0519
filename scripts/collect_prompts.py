# SPDX-License-Identifier: Apache-2.0
"""Read prompts from a file and split them by conversation.

python scripts/collect_prompts.py --spec '{"train": 400, "heldout": 48, "seed": 0, "max_model_len": 512}' \\
    --source P.jsonl --train train.jsonl --heldout heldout.jsonl
"""

import logging

from pilotfish import cli, files, prompts


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--source", "prompts or conversations, in any of the shapes of prompts.path")
    cli.path_argument(made, "--train", "prompts to train on")
    cli.path_argument(made, "--heldout", "prompts to evaluate on")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    found = prompts.read(arguments.source, spec["max_model_len"])
    splits = prompts.split(found, spec["train"], spec["heldout"], spec["seed"])
    files.write_jsonl(arguments.train, splits["train"])
    files.write_jsonl(arguments.heldout, splits["heldout"])
    logging.info(
        "%d prompts read; %d to train on, %d held out",
        len(found), len(splits["train"]), len(splits["heldout"]),
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
