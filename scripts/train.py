# SPDX-License-Identifier: Apache-2.0
"""Train one drafter on samples and their hidden states; resumes from its last checkpoint.

python scripts/train.py --help
"""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from pilotfish import cli, files, gpus, layers, manifest, shards, work
from pilotfish.progress import Heartbeat


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    with Heartbeat(arguments.heartbeat, "train", 0, "steps") as heartbeat:
        heartbeat.stage("waiting for GPUs")
        with gpus.lease(arguments.gpus):
            heartbeat.stage("reading the samples")
            _train(arguments, spec, heartbeat)


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--vocabulary", "vocabulary map; its manifest lies beside it")
    for split in ("train", "heldout"):
        cli.path_argument(made, f"--{split}-samples", "samples, Arrow; their manifest lies beside them")
        cli.path_argument(made, f"--{split}-states", "manifest of their hidden states")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    cli.path_argument(made, "--output", "folder for the checkpoint, its log and what it started from")
    cli.heartbeat_argument(made)
    return made.parse_args()


def _train(arguments, spec: dict, heartbeat: Heartbeat) -> None:
    from pilotfish import drafter_checks, training

    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.vocabulary.parent / "manifest.json", "vocabulary")
    chosen = layers.conditioning_layers(spec["capture_layers"], facts, spec["algorithm"])
    target = arguments.target.parent / "model"
    model = training.build_drafter(spec, target, chosen, load_file(arguments.vocabulary))
    wanted = [*chosen, facts["layers"]]
    reader = shards.ShardReader(shards.verified_indexes(arguments.heldout_states), chosen)
    data = [arguments.vocabulary, arguments.train_samples, arguments.heldout_samples]
    inputs = [arguments.target, *(path.parent / "manifest.json" for path in data)]
    inputs += [arguments.train_states, arguments.heldout_states]
    unfinished = work.take(arguments.output, arguments.spec, arguments.code, inputs)
    log = training.train(
        model,
        spec,
        _dataset(arguments.train_samples, arguments.train_states, wanted, spec),
        _dataset(arguments.heldout_samples, arguments.heldout_states, wanted, spec),
        lambda folder: drafter_checks.replayed(
            folder, target, arguments.heldout_samples, reader, spec["speculative_tokens"]
        )[0],
        unfinished,
        heartbeat,
    )
    heartbeat.stage("writing the checkpoint")
    finished = unfinished / "finished"
    training.export(model, finished)
    files.link(log, finished / "training_log.jsonl")
    files.link(unfinished / training.START, finished / training.START)
    files.publish_folder(finished, arguments.output)
    shutil.rmtree(unfinished.parent)


def _dataset(samples: Path, states: Path, wanted: list[int], spec: dict):
    from pilotfish import algorithms, transfer

    manifest.read(samples.parent / "manifest.json", "samples")
    transferred = transfer.ShardTransfer(shards.verified_indexes(states), wanted)
    return transfer.SampleDataset(samples, transferred, spec["tokens_per_batch"], algorithms.of(spec))


if __name__ == "__main__":
    cli.run(main)
