# SPDX-License-Identifier: Apache-2.0
"""Rehearse a training: learn one row by heart with the real code, export the drafter, and serve it that row.

python scripts/rehearse.py --help
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from pilotfish import (
    cli,
    constants,
    engine,
    export,
    files,
    gpus,
    heads,
    layers,
    manifest,
    progress,
    samples,
    shards,
    work,
)


def main() -> None:
    arguments = _arguments()
    job = f"rehearse {arguments.output.parent.name}"
    with progress.Heartbeat(arguments.heartbeat, job, 1, "rows") as beat, gpus.lease(arguments.gpus):
        beat.advance(0)
        _rehearse(arguments, cli.spec_of(arguments), beat)
        beat.advance(1)


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--vocabulary", "vocabulary map; its manifest lies beside it")
    cli.path_argument(made, "--samples", "training samples, Arrow; their manifest lies beside them")
    cli.path_argument(made, "--states", "manifest of their hidden states")
    made.add_argument("--engine", required=True, help="JSON of the engine settings")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    cli.path_argument(made, "--output", "folder for the exported drafter and what was served")
    cli.path_argument(made, "--engine-log", "vLLM's own log")
    cli.heartbeat_argument(made)
    return made.parse_args()


def _rehearse(arguments, spec: dict, beat: progress.Heartbeat) -> None:
    from pilotfish import rehearsal

    facts = manifest.read(arguments.target, "target")["statistics"]
    for path, schema in ((arguments.vocabulary, "vocabulary"), (arguments.samples, "samples")):
        manifest.read(path.parent / "manifest.json", schema)
    chosen = layers.conditioning_layers(spec["capture_layers"], facts, spec["algorithm"])
    maps, target = load_file(arguments.vocabulary), arguments.target.parent / "model"
    reader = shards.ShardReader(shards.verified_indexes(arguments.states), [*chosen, facts["layers"]])
    k = spec["speculative_tokens"]
    excerpt = rehearsal.choose(samples.load(arguments.samples), reader, heads.Head(target), maps["t2d"], k)
    inputs = [arguments.target, *(path.parent / "manifest.json" for path in (arguments.vocabulary, arguments.samples))]
    unfinished = work.take(arguments.output, arguments.spec, arguments.code, [*inputs, arguments.states])
    finished = unfinished / "finished"
    beat.stage("learning a row by heart")
    log = _train(spec, target, chosen, maps, excerpt, unfinished)
    export.write(unfinished / "checkpoint", finished, export.target_name(arguments.target, facts))
    files.link(unfinished / "checkpoint" / constants.FILE, finished / constants.FILE)
    options = json.loads(arguments.engine)
    line = engine.arguments(options, model=target, trust_remote_code=spec["trust_remote_code"], capture=False)
    line += engine.drafter_arguments(finished, k)
    beat.stage("starting the engine", engine.start_limit(options))
    with engine.Engine(line, options, arguments.engine_log) as server:
        answer = rehearsal.ask(server, excerpt, options["stall_timeout"])
        view = server.view()
    stretch = {"row": excerpt.row, "prompt_length": excerpt.prompt_length, "tokens": excerpt.response}
    files.write_json(finished / "served.json", {**stretch, **answer, "training": log, "engine": view})
    files.publish_folder(finished, arguments.output)
    shutil.rmtree(unfinished.parent)


def _train(spec: dict, target: Path, chosen: list[int], maps: dict, excerpt, unfinished: Path) -> list[dict]:
    """Learn the excerpt by heart and write the checkpoint; nothing of it is left in memory."""
    from pilotfish import rehearsal, training

    model = training.build_drafter(spec, target, chosen, maps)
    log = rehearsal.memorise(model, excerpt, spec, unfinished)
    training.export(model, unfinished / "checkpoint")
    del model
    torch.cuda.empty_cache()  # the engine wants the memory
    return log


if __name__ == "__main__":
    cli.run(main)
