# SPDX-License-Identifier: Apache-2.0
"""Replay a drafter on the stored held-out responses: its exact tau, with neither a server nor a target.

python scripts/replay.py --help
"""

import logging
from pathlib import Path

import torch

from pilotfish import cli, files, layers, manifest, replay, samples, shards


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.drafter, "drafter")
    manifest.read(arguments.samples.parent / "manifest.json", "samples")
    wanted = layers.conditioning_layers(spec["capture_layers"], facts)
    reader = shards.ShardReader(shards.verified_indexes(arguments.states), wanted)
    drafter = replay.Eagle3Drafter(arguments.drafter.parent / "checkpoint")
    rounds = _rounds(drafter, reader, arguments.samples, spec["speculative_tokens"])
    summary = replay.summarise([rounds[row] for row in sorted(rounds)], spec["speculative_tokens"])
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


def _rounds(drafter, reader: shards.ShardReader, path: Path, k: int) -> dict[int, list[replay.Round]]:
    """Rounds of every response of at least two tokens, by row; a batch of rows is in memory at a time."""
    every = samples.load(path)
    rounds: dict[int, list[replay.Round]] = {}
    for start in range(0, len(every), replay.ROWS_PER_BATCH):
        numbers, batch = [], []
        for sample in every.select(range(start, min(start + replay.ROWS_PER_BATCH, len(every)))):
            n_out = len(sample["input_ids"]) - sample["prompt_length"]
            if n_out < 2:
                rounds[sample["row"]] = []  # the only token came from prefill, which is no round
                continue
            numbers.append(sample["row"])
            states = reader.read(sample["row"]).hidden_states
            tokens = torch.tensor(sample["input_ids"])
            batch.append(replay.ReplayRow(tokens, states, sample["prompt_length"], n_out))
        for row, stored, table in zip(
            numbers, batch, replay.acceptance_table(drafter, batch, k) if batch else [], strict=True
        ):
            rounds[row] = replay.walk(table, stored.n_stored)
    return rounds


if __name__ == "__main__":
    cli.run(main)
