# SPDX-License-Identifier: Apache-2.0
"""Replay a drafter on a set's stored responses: its exact tau, as a chain and as DDTrees, with no server or target.

python scripts/replay.py --help
"""

import logging

from pilotfish import cli, ddtree, files, layers, manifest, replay, samples, shards
from pilotfish.errors import UserError
from pilotfish.rounds import summarise


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, spec["kind"])
    manifest.read(arguments.samples.parent / "manifest.json", "samples")
    wanted = layers.conditioning_layers(spec["capture_layers"], facts, spec["algorithm"])
    reader = shards.ShardReader(shards.verified_indexes(arguments.states), wanted)
    drafter = replay.open_drafter(arguments.checkpoint, arguments.target.parent / "model")
    if drafter.capture_layers != wanted:
        raise UserError(f"{arguments.checkpoint}: layers {drafter.capture_layers}, where {wanted} are configured")
    every, k, budgets = samples.load(arguments.samples), spec["speculative_tokens"], spec["tree_budgets"]
    if budgets:
        chain, *trees = replay.replay_trees(drafter, reader, every, k, budgets)
    else:
        chain, trees = replay.replay_samples(drafter, reader, every, k), []
    summary = summarise([chain[row] for row in sorted(chain)], k)
    result = {
        "drafter": spec["name"],
        "summary": summary,
        "rows": [{"row": row, "rounds": [list(each) for each in chain[row]]} for row in sorted(chain)],
        "trees": [
            ddtree.summary([tree[row] for row in sorted(tree)], budget, min(budget, len(drafter.target_ids_V)), k)
            for budget, tree in zip(budgets, trees, strict=True)
        ],
    }
    files.write_json(arguments.output, result)
    logging.info(
        "tau %.4f over %d rounds of %d responses", summary["tau_micro_incl_bonus"], summary["rounds"], summary["rows"]
    )
    for each in result["trees"]:
        logging.info("DDTree of %d nodes: tau %.4f", each["budget"], each["summary"]["tau_micro_incl_bonus"])


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--drafter", "the manifest of a drafter, or of a reference, as `kind` in the spec says")
    cli.path_argument(made, "--checkpoint", "its folder, in speculators' format")
    cli.path_argument(made, "--samples", "samples of the set; their manifest lies beside them")
    cli.path_argument(made, "--states", "manifest of their hidden states")
    cli.path_argument(made, "--output", "JSON to write: summary, the rounds of each row, and the trees")
    return made.parse_args()


if __name__ == "__main__":
    cli.run(main)
