# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's samples: prompt ids and response ids byte for byte, mask exactly on what serving uses.

Checks: one sample for each response that its gate kept, in order; ids = prompt ids + response ids, byte for byte;
the loss mask is 1 on the response and nowhere else; lengths; by enumeration, row by row, that the (input, label)
pairs which training supervises are those which serving uses.
Does not check: the shift inside the training library, which the rehearsal's gate looks at with real states.

python scripts/validate_samples.py --help
"""

from collections.abc import Iterator
from itertools import islice

import pandas as pd

from pilotfish import cli, manifest, samples, tables
from pilotfish.errors import UserError

BATCH = 500  # samples in memory at a time


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--manifest-of-responses", "manifest of the responses; left_out.jsonl lies beside it")
    cli.path_argument(made, "--responses", "responses, one JSONL a part, in order", many=True)
    cli.path_argument(made, "--samples", "samples to check")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    kept = manifest.read(arguments.manifest_of_responses, "responses")["statistics"]["kept"]
    left_out = arguments.manifest_of_responses.parent / "left_out.jsonl"
    responses = samples.kept_rows(arguments.responses, left_out)
    found = samples.load(arguments.samples)
    if len(found) != kept:
        raise UserError(f"{arguments.samples}: {len(found)} samples for {kept} responses; delete it and run again")
    statistics = _check(arguments.samples, found, responses, facts["vocab_size"])
    manifest.write(
        arguments.manifest,
        schema="samples",
        paths=[arguments.samples],
        rows={arguments.samples: len(found)},
        spec=arguments.spec,
        code=arguments.code,
        statistics=statistics,
    )


def _check(path, found, responses: Iterator[dict], vocab_size: int) -> dict:
    schema = tables.samples(vocab_size)
    tokens = longest = pairs = 0
    for start in range(0, len(found), BATCH):
        rows = found[start : start + BATCH]
        # Frames first: a column of the wrong kind would make nonsense of the rest.
        tables.check(pd.DataFrame(rows, index=rows["row"]), schema, path)
        batch = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
        for sample, response in zip(batch, islice(responses, len(batch)), strict=True):
            if fault := _fault(sample, response):
                raise UserError(f"{path}, row {sample['row']}: {fault}; delete it and run `assemble_samples` again")
            pairs += sample["seq_len"] - sample["prompt_length"]
            tokens += len(sample["input_ids"])
            longest = max(longest, len(sample["input_ids"]))
    return {"rows": len(found), "tokens": tokens, "longest": longest, "supervised_pairs": pairs}


def _fault(sample: dict, response: dict) -> str | None:
    """What is wrong with one sample, or None."""
    if (sample["row"], sample["id"]) != (response["row"], response["id"]):
        return f"it is in the place of row {response['row']} (id {response['id']})"
    if sample["input_ids"] != response["prompt_token_ids"] + response["token_ids"]:
        return "its token ids are not the response's: prompt ids, then response ids"
    trained = samples.trained_pairs(sample["loss_mask"])
    served = samples.served_pairs(len(response["prompt_token_ids"]), len(sample["input_ids"]))
    if trained != served:
        extra, missing = sorted(set(trained) - set(served)), sorted(set(served) - set(trained))
        return (
            f"training would supervise {len(trained)} (input, label) positions where serving uses {len(served)}: "
            f"extra {extra[:3]}, missing {missing[:3]}"
        )
    return None


if __name__ == "__main__":
    cli.run(main)
