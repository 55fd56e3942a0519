# SPDX-License-Identifier: Apache-2.0
"""Hidden states of one part: adopt what `respond` and earlier captures left, and capture the layers still missing.

python scripts/capture.py --help
"""

import asyncio
import json
import logging
import shutil

from pilotfish import (
    adoption,
    cli,
    engine,
    gpus,
    layers,
    manifest,
    progress,
    prompts,
    samples,
    shards,
    work,
)


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    manifest.read(arguments.manifest, "samples")
    wanted = layers.layers_to_capture(spec["capture_layers"], facts)
    every = samples.load(arguments.samples)
    part = prompts.part_rows(spec["rows"], arguments.part)
    mine = {row: number for number, row in enumerate(every["row"]) if row in part}
    ids = {row: every[number]["input_ids"] for row, number in mine.items()}
    # The ids of what was captured are compared with the samples in any case.
    unfinished = work.take(arguments.output, arguments.spec, arguments.code, [arguments.target])
    made = adoption.Adoption(unfinished, wanted, ids)
    made.adopt(arguments.captured / shards.INDEX)
    origin = work.origin(arguments.target, spec, arguments.code, without=("capture_layers",))
    made.adopt(arguments.output / shards.KEPT, origin)
    job = f"capture {arguments.samples.parent.name} {arguments.part}"
    with progress.Heartbeat(arguments.heartbeat, job, len(ids), "rows") as beat:
        beat.advance(*made.finished())
        if missing := made.missing():
            logging.info("%d of %d rows lack layers: %s are captured", len(missing), len(ids), made.missing_layers())
            with gpus.lease(arguments.gpus):
                _capture(arguments, spec, made, beat)
        made.publish(arguments.output, origin)
    shutil.rmtree(unfinished.parent)


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--manifest", "manifest of the split's samples")
    cli.path_argument(made, "--samples", "samples of the split")
    made.add_argument("--part", default="00000-of-00001", help="the rows to do, e.g. 00003-of-00016")
    made.add_argument("--engine", required=True, help="JSON of the engine settings")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    cli.path_argument(made, "--captured", "folder of shards that `respond` captured")
    cli.path_argument(made, "--output", "folder for the part's shards and index.json; what lies there is kept")
    cli.path_argument(made, "--engine-log", "vLLM's own log")
    cli.heartbeat_argument(made)
    return made.parse_args()


def _capture(arguments, spec: dict, made: adoption.Adoption, beat: progress.Heartbeat) -> None:
    options = json.loads(arguments.engine)
    model = arguments.target.parent / "model"
    plain = engine.arguments(options, model=model, trust_remote_code=spec["trust_remote_code"], capture=True)

    def attempt() -> None:
        if not (layers_left := made.missing_layers()):
            return
        beat.stage("starting the engine", engine.start_limit(options))
        line = plain + engine.capture_arguments(layers_left, made.incoming)
        with engine.Engine(line, options, arguments.engine_log) as server:
            beat.stage("capturing")
            asyncio.run(made.capture_missing(server, options, beat))

    engine.restarting(options["restarts"], attempt)


if __name__ == "__main__":
    cli.run(main)
