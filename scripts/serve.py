# SPDX-License-Identifier: Apache-2.0
"""Serve the evaluation prompts with vLLM, without a drafter (the baseline) and with each, by turns, and measure.

python scripts/serve.py --help
"""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

from pilotfish import cli, engine, evaluation, files, gpus, manifest, progress, work


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    manifest.read(arguments.target, "target")
    sets = {path.stem: files.read_jsonl(path)[: spec["sets"][path.stem]] for path in arguments.prompts}
    lines = _lines(arguments, spec, json.loads(arguments.engine))
    groups = [list(lines)] if spec["together"] else [[name] for name in lines]
    inputs = [arguments.target, *arguments.prompts, *arguments.drafters, *arguments.references]
    unfinished = work.take(arguments.outputs[0], arguments.spec, arguments.code, inputs)
    answers = sum(map(len, sets.values())) * len(spec["concurrency"]) * len(lines)
    found = {}
    with progress.Heartbeat(arguments.heartbeat, "serve", answers, "answers") as beat:
        kept = evaluation.Measurements(unfinished / "measured.jsonl", beat)
        with gpus.lease(arguments.gpus) as held:
            for group in groups:
                found |= _measured(arguments, spec, sets, {name: lines[name] for name in group}, held, kept, beat)
        for path in arguments.outputs:
            files.write_json(path, found[path.parent.name])
    shutil.rmtree(unfinished.parent)


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--prompts", "prompts of each evaluation set; the file has the set's name", many=True)
    cli.path_argument(made, "--drafters", "manifests of exports; the folder has the server's name", many=True)
    made.add_argument(
        "--references", type=Path, nargs="*", default=[], help="manifests of references; the folder has the name"
    )
    made.add_argument("--engine", required=True, help="JSON of the engine settings")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease for all engines; 0 on a CPU")
    cli.path_argument(made, "--outputs", "JSON to write for each server; the folder has its name", many=True)
    cli.path_argument(made, "--engine-logs", "folder for vLLM's own logs")
    cli.heartbeat_argument(made)
    return made.parse_args()


def _lines(arguments, spec: dict, options: dict) -> dict[str, list[str]]:
    """vLLM's command line of each server: the same flags, and its drafter."""
    plain = engine.arguments(
        options,
        model=arguments.target.parent / "model",
        trust_remote_code=spec["trust_remote_code"],
        capture=False,
        reasoning_parser=spec["reasoning_parser"],
    )
    lines = {"baseline": plain + evaluation.TIMING_ARGUMENTS}
    for schema, paths in (("export", arguments.drafters), ("reference", arguments.references)):
        for path in paths:
            manifest.read(path, schema)
            name = path.parent.name
            lines[name] = lines["baseline"] + engine.drafter_arguments(path.parent, spec["servers"][name])
    return lines


def _measured(arguments, spec: dict, sets: dict, lines: dict, held: list[str], kept, beat) -> dict[str, dict]:
    """What servers that run at once have measured, and what each engine says of itself."""
    options = json.loads(arguments.engine)
    rest = evaluation.SPIN_SECONDS if len(lines) > 1 and not held else 0
    session = evaluation.Session(spec["sampling"], options["stall_timeout"], rest)

    def attempt() -> dict[str, dict]:
        with ExitStack() as running:
            engines = {}
            beat.stage(f"starting {', '.join(lines)}", len(lines) * engine.start_limit(options))
            # One after the other: while it starts, an engine takes the most memory, and every core.
            for number, (name, devices) in enumerate(zip(lines, gpus.shares(held, len(lines)), strict=True)):
                own = {**options, "port": options["port"] and options["port"] + number}
                with gpus.show(devices):
                    server = engine.Engine(lines[name], own, arguments.engine_logs / f"{name}.engine.log")
                    engines[name] = running.enter_context(server)
            beat.stage("measuring")
            evaluation.measure_all(engines, sets, spec["concurrency"], session, kept)
            return {name: server.view() for name, server in engines.items()}

    views = engine.restarting(options["restarts"], attempt)
    return {name: _served(name, spec, sets, lines, views[name], kept) for name in lines}


def _served(name: str, spec: dict, sets: dict, lines: dict, view: dict, kept) -> dict:
    levels = spec["concurrency"]
    return {
        "server": name,
        "sampling": spec["sampling"],
        "arguments": lines[name],
        "engine": view,
        "sets": {chosen: {str(level): kept.of(lines, chosen, level)[name] for level in levels} for chosen in sets},
    }


if __name__ == "__main__":
    cli.run(main)
