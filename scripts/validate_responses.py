# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's responses: every prompt answered or accounted for, text and reasoning true to the token ids.

Checks: prompts = responses kept + rows left out, row by row and in order, each with its reason (left_out.jsonl);
token ids in the vocabulary, an end token at the end of what stopped; text and reasoning equal to what the ids
decode to; wrapper tokens by id (one open, one close, in order; who opens, the template or the model); the mode,
thinking or not, equal to the training split's; shares of answers that were cut, loop, repeat or are flawed.
Does not check: whether an answer is right or good, nor whether the prompt's ids follow from its text: they are
what the engine saw, and the gates of hidden states and evaluation compare with that.

python scripts/validate_responses.py --help
"""

import json
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path

import pandas as pd

from pilotfish import cli, files, manifest, responses, tables
from pilotfish.errors import UserError

BATCH = 500  # rows in memory at a time


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    reference = manifest.read(arguments.reference, "responses")["statistics"] if arguments.reference else None
    decode = responses.detokeniser(arguments.target.parent / "model", spec["trust_remote_code"])
    review = responses.Review(facts, {**spec, **json.loads(arguments.limits)}, decode)
    counts = dict.fromkeys(arguments.responses, 0)
    left_out = arguments.manifest.parent / "left_out.jsonl"
    files.write_jsonl(left_out, _left_out(arguments, facts, review, counts))
    review.verdict(str(arguments.manifest.parent), reference)
    manifest.write(
        arguments.manifest,
        schema="responses",
        paths=[*arguments.responses, left_out],
        rows=counts,
        spec=arguments.spec,
        code=arguments.code,
        statistics=review.statistics(),
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--prompts", "prompts of the split")
    cli.path_argument(made, "--responses", "responses, one JSONL a part, in order", many=True)
    made.add_argument(
        "--limits", required=True, help="JSON: max_truncated, max_loops, max_flawed, as shares of answers"
    )
    made.add_argument("--reference", type=Path, help="manifest of the responses to train on, for another split")
    cli.path_argument(made, "--manifest", "manifest to write; left_out.jsonl goes beside it")
    return made.parse_args()


def _left_out(arguments, facts: dict, review: responses.Review, counts: dict[Path, int]) -> Iterator[dict]:
    """Every row that is not kept, with its reason, while all rows go through the schemas and the review."""
    prompts = files.iterate_jsonl(arguments.prompts)
    answered = tables.responses(facts["vocab_size"], facts["end_token_ids"])
    for path in arguments.responses:
        rows = files.iterate_jsonl(path)
        while batch := list(islice(rows, BATCH)):
            first = sum(counts.values())
            _check_order(path, first, list(islice(prompts, len(batch))), batch)
            for schema, some in (
                (answered, [row for row in batch if row["error"] is None]),
                (tables.REFUSED, [row for row in batch if row["error"] is not None]),
            ):
                if some:
                    tables.check(pd.DataFrame(some).set_index("row", drop=False), schema, path)
            for row in batch:
                if reason := review.take(row):
                    yield {"row": row["row"], "id": row["id"], "reason": reason}
            counts[path] += len(batch)
    if (unanswered := next(prompts, None)) is not None:
        raise UserError(
            f"{arguments.responses[-1]}: ends after {sum(counts.values())} rows, and prompt {unanswered['id']!r} and "
            "those after it have no response; delete it and run again"
        )


def _check_order(path: Path, first: int, prompts: list[dict], batch: list[dict]) -> None:
    for number, (prompt, response) in enumerate(zip_longest(prompts, batch), first):
        if prompt is None:
            raise UserError(f"{path}: row {number} answers no prompt: there are only {number}; delete it and run again")
        if response.get("row") != number or response.get("id") != prompt["id"]:
            raise UserError(
                f"{path}: row {number} answers id {response.get('id')!r}, row {response.get('row')}, where the prompt "
                f"is {prompt['id']!r}; rows are missing or out of order, so delete the responses and run again"
            )


if __name__ == "__main__":
    cli.run(main)
