# SPDX-License-Identifier: Apache-2.0
"""Gate of the prompts of an evaluation set, and of those to train on beside it: whole, once, and apart.

Checks: columns, ids, roles that alternate and end with the user, no empty turn; no id and no text twice; no
conversation both held out and trained on; no training prompt that nearly repeats an evaluation prompt (Jaccard index
of word 3-grams at least 0.8) or quotes one (half of its word 13-grams, or all of one of 8 to 12 words); the share of
near duplicates among the training prompts (MinHash, `prompts.max_near_duplicates`).

Does not check: paraphrases and translations, which share no runs of words; scripts without spaces between words,
where only whole clauses are compared; evaluation prompts of fewer than 8 words inside longer ones; near duplicates
within one conversation or one evaluation set; whether a prompt fits the engine's context, which the engine's refusal
tells (gate of the responses).

python scripts/validate_prompts.py --help
"""

import argparse
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pandas as pd

from pilotfish import cli, files, manifest, tables
from pilotfish.overlap import Comparison

CHUNK = 1000  # rows checked, and held, at a time


def main() -> None:
    arguments = _arguments()
    comparison, rows = Comparison(cli.spec_of(arguments)["setting"]), {}
    for path, add in ((arguments.evaluation, comparison.add_evaluation), (arguments.train, comparison.add_training)):
        for row, prompt in enumerate(_checked(path)):
            add(path, row, prompt)
            rows[path] = row + 1
    comparison.refuse(arguments.train, arguments.max_near_duplicates)
    statistics = comparison.statistics()
    manifest.write(
        arguments.manifest,
        schema="prompts",
        paths=[arguments.train, arguments.evaluation],
        rows=rows,
        spec=arguments.spec,
        code=arguments.code,
        statistics={**{path.stem: count for path, count in rows.items()}, **statistics},
    )
    logging.info("%s prompts: %s", sum(rows.values()), statistics)


def _arguments() -> argparse.Namespace:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--train", "prompts to train on")
    cli.path_argument(made, "--evaluation", "prompts of the evaluation set")
    made.add_argument(
        "--max-near-duplicates", type=float, required=True, help="share of training prompts that may be near duplicates"
    )
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _checked(path: Path) -> Iterator[dict]:
    """The rows of a file, checked against the schema."""
    found, start = files.iterate_jsonl(path), 0
    while chunk := list(islice(found, CHUNK)):
        tables.check(pd.DataFrame(chunk, index=range(start, start + len(chunk))), tables.PROMPTS, path)
        start += len(chunk)
        yield from chunk


if __name__ == "__main__":
    cli.run(main)
