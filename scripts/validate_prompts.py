# SPDX-License-Identifier: Apache-2.0
"""Gate of the prompts: schema, unique ids, and no conversation on both sides of the split.

python scripts/validate_prompts.py --spec '{}' --splits train.jsonl heldout.jsonl --manifest manifest.json
"""

import pandas as pd

from pilotfish import cli, files, manifest, prompts, tables
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--splits", "prompts of each split", many=True)
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    seen: dict[str, tuple] = {}
    rows = {}
    for path in arguments.splits:
        found = files.read_jsonl(path)
        tables.check(pd.DataFrame(found), tables.PROMPTS, path)
        rows[path] = len(found)
        for number, prompt in enumerate(found):
            for key in (f"id {prompt['id']!r}", prompts.conversation_key(prompt)):
                other = seen.setdefault(key, (path, number))
                if other[0] != path:
                    raise UserError(
                        f"{path}, row {number}: shares {key[:60]} with row {other[1]} of {other[0]}; "
                        "held-out prompts must not be trained on, so delete both files and run again"
                    )
    manifest.write(
        arguments.manifest,
        schema="prompts",
        paths=arguments.splits,
        rows=rows,
        spec=arguments.spec,
        code=arguments.code,
        statistics={path.stem: count for path, count in rows.items()},
    )


if __name__ == "__main__":
    cli.run(main)
