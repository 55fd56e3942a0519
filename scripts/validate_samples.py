# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's samples: prompt ids and response ids byte for byte, mask exactly on the response.

python scripts/validate_samples.py --help
"""

import pandas as pd

from pilotfish import cli, files, manifest, samples, tables
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--responses", "responses, one JSONL a part, in order", many=True)
    cli.path_argument(made, "--samples", "samples to check")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    found = samples.load(arguments.samples)
    answered = [r for path in arguments.responses for r in files.read_jsonl(path) if r["error"] is None]
    if len(found) != len(answered):
        raise UserError(f"{arguments.samples}: {len(found)} samples for {len(answered)} responses")
    lengths = []
    schema = tables.samples(facts["vocab_size"])
    for start in range(0, len(found), BATCH):
        batch = pd.DataFrame(found[start : start + BATCH])
        tables.check(batch.set_index(batch.index + start), schema, arguments.samples)
        for row, ids, response in zip(batch["row"], batch["input_ids"], answered[start:], strict=False):
            if list(ids) != response["prompt_token_ids"] + response["token_ids"]:
                raise UserError(f"{arguments.samples}, row {row}: token ids differ from the response's")
            lengths.append(len(ids))
    manifest.write(
        arguments.manifest,
        schema="samples",
        paths=[arguments.samples],
        rows={arguments.samples: len(found)},
        spec=arguments.spec,
        code=arguments.code,
        statistics={"rows": len(found), "tokens": sum(lengths), "longest": max(lengths)},
    )


BATCH = 1000  # samples held in memory at a time

if __name__ == "__main__":
    cli.run(main)
