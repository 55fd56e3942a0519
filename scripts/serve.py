# SPDX-License-Identifier: Apache-2.0
"""Serve the held-out prompts with vLLM, with a drafter or (the baseline) without, and measure.

python scripts/serve.py --help
"""

import json
from pathlib import Path

from pilotfish import cli, engine, evaluation, files, gpus, manifest


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    manifest.read(arguments.target, "target")
    prompts = files.read_jsonl(arguments.prompts)[: spec["prompts"]]
    options = json.loads(arguments.engine)
    model = arguments.target.parent / "model"
    line = engine.arguments(
        options,
        model=model,
        trust_remote_code=spec["trust_remote_code"],
        capture=False,
        reasoning_parser=spec["reasoning_parser"],
    )
    if arguments.drafter:
        manifest.read(arguments.drafter / "manifest.json", "export")
        line += engine.drafter_arguments(arguments.drafter, spec["speculative_tokens"])
    with gpus.lease(arguments.gpus), engine.Engine(line, options, arguments.engine_log) as server:
        measured = evaluation.measure_all(
            server, prompts, spec["sampling"], spec["concurrency"], options["stall_timeout"]
        )
        view = server.view()
    files.write_json(
        arguments.output,
        {
            "server": spec["server"],
            "sampling": spec["sampling"],
            "arguments": line,
            "engine": view,
            "concurrency": measured,
        },
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--prompts", "held-out prompts")
    made.add_argument(
        "--drafter", type=Path, help="exported drafter, its manifest in it; without it the baseline is served"
    )
    made.add_argument("--engine", required=True, help="JSON of the engine settings")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    cli.path_argument(made, "--output", "JSON to write")
    cli.path_argument(made, "--engine-log", "vLLM's own log")
    return made.parse_args()


if __name__ == "__main__":
    cli.run(main)
