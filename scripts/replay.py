# SPDX-License-Identifier: Apache-2.0
"""Replay a drafter on the stored held-out responses: its exact tau, with neither a server nor a target.

python scripts/replay.py --help
"""

import logging

from pilotfish import cli, files, layers, manifest, replay, samples, shards
from pilotfish.rounds import summarise


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, "drafter")
    manifest.read(arguments.samples.parent / "manifest.json", "samples")
    wanted = layers.conditioning_layers(spec["capture_layers"], facts)
    reader = shards.ShardReader(shards.verified_indexes(arguments.states), wanted)
    drafter = replay.Eagle3Drafter(arguments.drafter.parent / "checkpoint")
    rounds = replay.replay_samples(drafter, reader, samples.load(arguments.samples), spec["speculative_tokens"])
    summary = summarise([rounds[row] for row in sorted(rounds)], spec["speculative_tokens"])
    rows = [{"row": row, "rounds": [list(each) for each in rounds[row]]} for row in sorted(rounds)]
    files.write_json(arguments.output, {"drafter": spec["name"], "summary": summary, "rows": rows})
    logging.info(
        "tau %.4f over %d rounds of %d held-out responses",
        summary["tau_micro_incl_bonus"], summary["rounds"], summary["rows"],
    )  # fmt: skip


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--drafter", "the drafter's manifest; its checkpoint lies beside it")
    cli.path_argument(made, "--samples", "held-out samples; their manifest lies beside them")
    cli.path_argument(made, "--states", "manifest of their hidden states")
    cli.path_argument(made, "--output", "JSON to write: summary, and the rounds of each row")
    return made.parse_args()


if __name__ == "__main__":
    cli.run(main)
