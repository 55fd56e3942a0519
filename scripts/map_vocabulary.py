# SPDX-License-Identifier: Apache-2.0
"""Choose the draft vocabulary from the tokens that the target generated for training.

python scripts/map_vocabulary.py --spec '{"draft_vocab_size": 4096}' --target T/manifest.json \\
    --manifest S/manifest.json --samples S/samples.arrow --output map.safetensors
"""

import logging

import numpy as np
from safetensors.numpy import save_file

from pilotfish import cli, files, manifest, samples, vocabulary


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--manifest", "manifest of the training samples")
    cli.path_argument(made, "--samples", "training samples")
    cli.path_argument(made, "--output", "safetensors file with d2t, t2d and counts")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.manifest, "samples")
    counts = vocabulary.generated_counts(samples.load(arguments.samples), facts["vocab_size"])
    forced = vocabulary.forced_tokens(facts)
    size = cli.spec_of(arguments)["draft_vocab_size"] or facts["vocab_size"]
    chosen = vocabulary.choose(counts, size, forced)
    d2t, t2d = vocabulary.maps(chosen, facts["vocab_size"])
    with files.replacing(arguments.output) as temporary:
        save_file({"d2t": d2t, "t2d": t2d, "counts": counts}, temporary)
    logging.info(
        "%d of %d generated tokens are distinct; the draft vocabulary covers %.2f%%",
        np.count_nonzero(counts), counts.sum(), 100 * vocabulary.coverage(counts, t2d),
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
