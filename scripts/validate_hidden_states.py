# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's hidden states: the declared layers of the right tokens, as the target computes them.

Checks: each shard's checksum, read from the disk, rows and layers as its index lists them; each declared layer of
each sample's row in one shard and no other; token ids equal, shape and type as declared, no NaN, infinity or zero
vector, norms within a factor of the split's, no two rows alike; a few rows recomputed with transformers, where the
declared layer must match best, well ahead of its neighbours and of the state after the final norm; at up to eight
positions of every response, that norm and head make the recorded token of the last state, and that without the norm
they do worse.
Does not check: the lower layers of rows that are not recomputed, beyond finiteness and norms; the engine's numerics
below a relative error of 0.1. What training makes of the states is for the rehearsal's and the drafter's gates.

python scripts/validate_hidden_states.py --help
"""

import torch

from pilotfish import answers, cli, golden, gpus, layers, manifest, samples, shards, states


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    wanted = layers.layers_to_capture(spec["capture_layers"], facts)
    checksums = {}
    for index in arguments.indexes:
        checksums.update(shards.verify(index))
    reader = shards.ShardReader(arguments.indexes, wanted, open_shards=2)
    with gpus.lease(arguments.gpus):
        statistics = _check(arguments, spec, reader, facts["hidden_size"])
    manifest.write(
        arguments.manifest,
        schema="hidden_states",
        paths=[*arguments.indexes, *checksums],
        checksums=checksums,
        spec=arguments.spec,
        code=arguments.code,
        statistics={"capture_layers": wanted, **statistics},
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--samples", "samples of the split")
    cli.path_argument(made, "--indexes", "index.json of each part", many=True)
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _check(arguments, spec: dict, reader: shards.ShardReader, hidden_size: int) -> dict:
    folder, dtype = arguments.manifest.parent, getattr(torch, spec["dtype"])
    model = arguments.target.parent / "model"
    reference = golden.Golden(model, dtype, spec["trust_remote_code"], gpu=arguments.gpus > 0)
    review = states.Review(folder, reader, hidden_size, dtype)
    layer_probe = golden.LayerProbe(reference, reader.layers)
    answer_probe = answers.AnswerProbe(reference, spec["temperature"], folder)
    every = samples.load(arguments.samples)
    recomputed = golden.probe_rows(len(every), len(arguments.indexes))
    for number, sample in enumerate(every):
        if (held := review.take(sample)) is None:
            continue
        place, ids = reader.place(sample["row"]), sample["input_ids"]
        if number in recomputed:
            layer_probe.take(place, ids[:-1], held.hidden_states)
        answer_probe.take(place, ids, sample["prompt_length"], held.hidden_states[:, -1])
    review.refuse()
    layer_probe.refuse(folder)
    answer_probe.refuse()
    return {**review.statistics(), "recomputed": layer_probe.statistics(), "answers": answer_probe.statistics()}


if __name__ == "__main__":
    cli.run(main)
