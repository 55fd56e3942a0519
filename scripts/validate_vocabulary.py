# SPDX-License-Identifier: Apache-2.0
"""Gate of a vocabulary map: offsets and mask agree, special tokens are in, coverage on both splits.

python scripts/validate_vocabulary.py --help
"""

import numpy as np
from safetensors.numpy import load_file

from pilotfish import cli, manifest, samples, vocabulary
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--train-samples", "samples whose tokens were counted")
    cli.path_argument(made, "--heldout-samples", "samples for the held-out coverage")
    cli.path_argument(made, "--map", "map to check")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    held = load_file(arguments.map)
    train, heldout = (
        vocabulary.generated_counts(samples.load(path), facts["vocab_size"])
        for path in (arguments.train_samples, arguments.heldout_samples)
    )
    always = sorted({*facts["end_token_ids"], *facts["special_token_ids"]})
    for fault in _faults(held, train, always, facts["vocab_size"]):
        raise UserError(f"{arguments.map}: {fault}; delete it and run again")
    manifest.write(
        arguments.manifest,
        schema="vocabulary",
        paths=[arguments.map],
        spec=arguments.spec,
        code=arguments.code,
        statistics={
            "draft_vocab_size": len(held["d2t"]),
            "distinct_generated": int(np.count_nonzero(train)),
            "coverage_train": round(vocabulary.coverage(train, held["t2d"]), 6),
            "coverage_heldout": round(vocabulary.coverage(heldout, held["t2d"]), 6),
        },
    )


def _faults(held: dict, train: np.ndarray, always: list[int], vocab_size: int):
    d2t, t2d = held["d2t"], held["t2d"]
    ids = np.arange(len(d2t)) + d2t
    if t2d.shape != (vocab_size,) or not np.array_equal(ids, np.flatnonzero(t2d)):
        yield "arange + d2t is not where t2d is true: d2t must be offsets of sorted ids"
    if not np.array_equal(held["counts"], train):
        yield "it was counted on other samples than the present ones"
    if missing := [token for token in always if not t2d[token]]:
        yield f"end or special tokens {missing} are not in the draft vocabulary"


if __name__ == "__main__":
    cli.run(main)
