# SPDX-License-Identifier: Apache-2.0
"""Gate of a rehearsal: the chain from stored states to the engine is whole, before a long training relies on it.

Checks: one row, learnt by heart with the training's own data path, forward and loss, exported and served, comes back
in full blocks (at least four rounds, each accepting k), round by round as the replay of that export; the constants of
training, config.json and the engine's own view are equal; and by probes on two packed documents: every declared layer
reaches the projection, the label layer does not, noise on the conditioning leaves the labels bit-equal, no future
token or state moves a past logit, packed documents and blocks do not see each other, inputs, labels and mask line up so
that the supervised (input, label) pairs are those of serving, and the loss is the one asked for.
Does not check: whether the long training learns (the drafter's gate), or the stored states themselves (the gate of
the hidden states). The probes run on the CPU: of a GPU's own attention only the row learnt by heart tells.

python scripts/validate_rehearsal.py --help
"""

import os
from itertools import islice

from safetensors.torch import load_file

from pilotfish import agreement, cli, files, heads, layers, manifest, probes, rehearsal_checks, samples, shards, tensors
from pilotfish.rehearsal import ROWS

FILES = ("config.json", "model.safetensors", "constants.json", "served.json")


def main() -> None:
    arguments = _arguments()
    # A gate leases no GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    wanted = [*layers.conditioning_layers(spec["capture_layers"], facts, spec["algorithm"]), facts["layers"]]
    reader = shards.ShardReader(shards.verified_indexes(arguments.states), wanted)
    rows = list(islice(samples.load(arguments.samples), ROWS))
    served = files.read_json(arguments.rehearsal / "served.json")
    excerpt = rehearsal_checks.stored_excerpt(served, rows, reader, arguments.rehearsal / "served.json")
    model, k = arguments.target.parent / "model", spec["speculative_tokens"]
    probe = probes.of_rows(spec, model, load_file(arguments.vocabulary), rows, reader)
    found = tensors.Faults(arguments.rehearsal)
    for fault in (
        *rehearsal_checks.learning_faults(served),
        *rehearsal_checks.round_faults(served, excerpt, arguments.rehearsal, model, k),
        *rehearsal_checks.constants_faults(served, arguments.rehearsal, k),
        *agreement.target_faults(served["engine"], model, facts),
        *probe.faults(heads.Head(model)),
    ):
        found.add(fault)
    found.refuse(rehearsal_checks.CURE)
    manifest.write(
        arguments.manifest,
        schema="rehearsal",
        paths=[arguments.rehearsal / name for name in FILES],
        spec=arguments.spec,
        code=arguments.code,
        statistics={
            "row": served["row"],
            "tokens": len(served["tokens"]),
            "steps": len(served["training"]),
            "per_step_accepted": served["per_step_accepted"],
        },
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--vocabulary", "vocabulary map")
    cli.path_argument(made, "--samples", "training samples")
    cli.path_argument(made, "--states", "manifest of their hidden states")
    cli.path_argument(made, "--rehearsal", "folder to check")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


if __name__ == "__main__":
    cli.run(main)
