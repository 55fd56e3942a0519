# SPDX-License-Identifier: Apache-2.0
"""Gate of a vocabulary map: offsets and mask agree, forced tokens are in, it was counted on the present data.

Checks: arange + d2t = nonzero(t2d), strictly rising; end, special, thinking and tool tokens are in; the frequency
table equals one counted anew on the generated tokens of the present training samples (hash in the manifest), and
the chosen tokens are its most frequent ones; coverage of both splits, of reasoning and of answers; the ceiling on
tau that coverage implies on the held-out responses.
Does not check: whether that coverage is enough; the report shows it, with the ceiling, beside the measured tau.

python scripts/validate_vocabulary.py --help
"""

import numpy as np
from safetensors.numpy import load_file

from pilotfish import cli, manifest, samples, vocabulary
from pilotfish.drafter_settings import MOST_DRAFTED
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
    train = vocabulary.generated_counts(samples.load(arguments.train_samples), facts["vocab_size"])
    for fault in vocabulary.faults(held, train, vocabulary.forced_tokens(facts)):
        raise UserError(f"{arguments.map}: {fault}; delete it and run `map_vocabulary` again")
    manifest.write(
        arguments.manifest,
        schema="vocabulary",
        paths=[arguments.map],
        spec=arguments.spec,
        code=arguments.code,
        statistics=_statistics(arguments, held, train, facts),
    )


def _statistics(arguments, held: dict, train: np.ndarray, facts: dict) -> dict:
    heldout = samples.load(arguments.heldout_samples)
    coverage = {"coverage_train": vocabulary.coverage(train, held["t2d"])}
    by_kind = vocabulary.counts_by_kind(heldout, facts["vocab_size"], facts["wrapper"])
    coverage["coverage_heldout"] = vocabulary.coverage(sum(by_kind.values()), held["t2d"])
    for kind, counts in by_kind.items():
        if counts.any():
            coverage[f"coverage_heldout_{kind}"] = vocabulary.coverage(counts, held["t2d"])
    # Of every k that a drafter may have: one that comes later changes nothing of this.
    ceilings = vocabulary.tau_ceilings(heldout, held["t2d"], range(1, MOST_DRAFTED + 1))
    return {
        "draft_vocab_size": len(held["d2t"]),
        "distinct_generated": int(np.count_nonzero(train)),
        "frequency_sha256": vocabulary.frequency_digest(train),
        **{name: round(value, 6) for name, value in coverage.items()},
        # Rounds that run past a response count for nothing: of a k beyond all of them there are none.
        "tau_ceiling_heldout": {str(k): round(tau, 4) for k, tau in ceilings.items() if tau == tau},
    }


if __name__ == "__main__":
    cli.run(main)
