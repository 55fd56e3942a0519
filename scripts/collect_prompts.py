# SPDX-License-Identifier: Apache-2.0
"""Read prompts from their sources, mix them by weight, and split them by conversation.

python scripts/collect_prompts.py --train train.jsonl --heldout heldout.jsonl --spec '{"train": 400, "heldout": 48,
    "seed": 0, "max_model_len": 512, "answers": "anew",
    "sources": [{"source": "p.jsonl", "weight": 1, "field": null, "rows": null, "max_bad": 0}]}'
"""

import logging

from pilotfish import cli, files, prompts, turns


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--train", "prompts to train on")
    cli.path_argument(made, "--heldout", "prompts to evaluate on")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    sources = spec["sources"]
    read = [
        prompts.read(f"prompts.sources.{number}", source, spec["max_model_len"], spec["answers"])
        for number, source in enumerate(sources)
    ]
    read = [[row for prompt in found for row in _rows(prompt, spec["answers"])] for found in read]
    weights = [source["weight"] for source in sources]
    splits = prompts.split(prompts.together(read), spec["train"], spec["heldout"], spec["seed"], weights)
    kept = splits["train"] if spec["answers"] == "given" else map(turns.unanswered, splits["train"])
    files.write_jsonl(arguments.train, kept)
    files.write_jsonl(arguments.heldout, map(turns.given, splits["heldout"]))
    for number, (source, found) in enumerate(zip(sources, read, strict=True)):
        logging.info("prompts.sources.%d, %s: %d prompts", number, source["source"], len(found))
    logging.info("%d to train on, %d held out", len(splits["train"]), len(splits["heldout"]))


def _rows(prompt: dict, answers: str) -> list[dict]:
    """The rows of a prompt, by whose answers are trained on (`prompts.answers`)."""
    if answers == "anew":
        return turns.expanded(prompt)
    return turns.each_answer(prompt) if answers == "given" else [prompt]


if __name__ == "__main__":
    cli.run(main)
