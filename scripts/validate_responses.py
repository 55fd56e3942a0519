# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's responses: every prompt answered or accounted for, ids in the vocabulary, ends right.

python scripts/validate_responses.py --help
"""

from collections import Counter

import pandas as pd

from pilotfish import cli, files, manifest, tables
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--prompts", "prompts of the split")
    cli.path_argument(made, "--responses", "responses, one JSONL a part, in order", many=True)
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    asked = files.read_jsonl(arguments.prompts)
    answered, counts = [], {}
    for path in arguments.responses:
        rows = files.read_jsonl(path)
        counts[path] = len(rows)
        good = [row for row in rows if row["error"] is None]
        if good:
            frame = pd.DataFrame(good).set_index("row", drop=False)
            tables.check(frame, tables.responses(facts["vocab_size"], facts["end_token_ids"]), path)
        answered += rows
    _check_complete(asked, answered, arguments.responses[0])
    manifest.write(
        arguments.manifest,
        schema="responses",
        paths=arguments.responses,
        rows=counts,
        spec=arguments.spec,
        code=arguments.code,
        statistics=_statistics(answered),
    )


def _check_complete(asked: list[dict], answered: list[dict], path) -> None:
    """Input = ok + failed, row by row: the same ids in the same order."""
    if len(asked) != len(answered):
        raise UserError(f"{path}: {len(asked)} prompts but {len(answered)} responses; delete it and run again")
    for number, (prompt, response) in enumerate(zip(asked, answered, strict=True)):
        if response["row"] != number or response["id"] != prompt["id"]:
            raise UserError(
                f"{path}: row {number} answers id {response['id']!r}, row {response['row']}, where the prompt "
                f"is {prompt['id']!r}; the order is broken, so delete the responses and run again"
            )


def _statistics(answered: list[dict]) -> dict:
    good = [row for row in answered if row["error"] is None]
    return {
        "rows": len(answered),
        "ok": len(good),
        "failed": len(answered) - len(good),
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in good),
        "response_tokens": sum(len(row["token_ids"]) for row in good),
        "with_reasoning": sum(bool(row["reasoning"]) for row in good),
        "finish_reasons": dict(Counter(row["finish_reason"] for row in good)),
    }


if __name__ == "__main__":
    cli.run(main)
