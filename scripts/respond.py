# SPDX-License-Identifier: Apache-2.0
"""Let the target answer one part of the prompts; greedy ones have their hidden states captured in the same pass.

python scripts/respond.py --help
"""

import asyncio
import json
import logging
import shutil
from pathlib import Path

from pilotfish import (
    cli,
    disk,
    engine,
    files,
    generation,
    given,
    gpus,
    layers,
    manifest,
    progress,
    prompts,
    reuse,
    shards,
    turns,
    work,
)
from pilotfish.errors import UserError
from pilotfish.journal import Journal

CANARIES = 3  # a target may answer a row without thinking; that several do is a fault


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    facts = manifest.read(arguments.target, "target")["statistics"]
    rows = files.read_jsonl(arguments.prompts)
    # vLLM 0.32 captures by way of speculative decoding, which on the CPU makes nonsense of sampled text.
    sampled = spec["sampling"]["temperature"] > 0 and "answer" not in rows[0]
    asked = [] if sampled else layers.layers_to_capture(json.loads(arguments.capture_layers), facts)
    part = prompts.part_rows(len(rows), arguments.part)
    unfinished = work.take(arguments.output, arguments.spec, arguments.code, [arguments.target, arguments.prompts])
    journal = Journal(unfinished, part, asked)
    stamps = {row: {"id": rows[row]["id"], "sampling": _sampling(spec, row)} for row in part}
    questions = {row: reuse.question(rows[row], stamp["sampling"]) for row, stamp in stamps.items()}
    origin = reuse.origin(arguments.target, spec, arguments.code)
    earlier = sorted(arguments.captured.parent.glob(f"*{arguments.captured.suffix}/{shards.INDEX}"))
    if known := reuse.adopt(journal, earlier, questions, lambda row, kept: {**kept, "row": row, **stamps[row]}, origin):
        logging.info("%d rows ask what an earlier run has answered, with the same settings and code", known)
    job = f"respond {arguments.prompts.stem} {arguments.part}"
    with progress.Heartbeat(arguments.heartbeat, job, len(part), "rows") as beat:
        if journal.done:
            logging.info("%d of %d rows are already done", len(journal.done), len(part))
        beat.advance(len(journal.done), journal.tokens)
        if len(journal.done) < len(part):
            with gpus.lease(arguments.gpus):
                _respond(arguments, spec, facts, rows, part, journal, beat)
        journal.pack_all()
        _publish(arguments, journal, len(part), questions, origin)
    shutil.rmtree(unfinished.parent)


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--prompts", "prompts of the whole split")
    made.add_argument("--part", default="00000-of-00001", help="the rows to do, e.g. 00003-of-00016")
    made.add_argument("--engine", required=True, help="JSON of the engine settings")
    made.add_argument("--capture-layers", required=True, help="JSON list: each drafter's layers, or null")
    made.add_argument("--gpus", type=int, default=0, help="GPUs to lease; 0 on a CPU")
    made.add_argument("--max-failed", type=int, default=0, help="rows that may be refused")
    cli.path_argument(made, "--output", "responses of the part, JSONL")
    cli.path_argument(made, "--captured", "folder for the shards captured while generating")
    cli.path_argument(made, "--engine-log", "vLLM's own log")
    cli.heartbeat_argument(made)
    return made.parse_args()


def _respond(arguments, spec: dict, facts: dict, rows: list[dict], part: range, journal: Journal, beat) -> None:
    options, model = json.loads(arguments.engine), arguments.target.parent / "model"
    line = engine.arguments(
        options,
        model=model,
        trust_remote_code=spec["trust_remote_code"],
        capture=bool(journal.layers),
        reasoning_parser=spec["reasoning_parser"],
    )
    if journal.layers:
        line += engine.capture_arguments(journal.layers, journal.incoming)

    keep = given.Keeper(model, spec, facts, options["max_model_len"]) if "answer" in rows[0] else None

    def attempt() -> None:
        if all(row in journal.done for row in part):
            return
        beat.stage("starting the engine", engine.start_limit(options))
        with engine.Engine(line, options, arguments.engine_log) as server:
            beat.stage("answering")
            asyncio.run(_bulk(server, options, spec, rows, part, journal, beat, keep))

    engine.restarting(options["restarts"], attempt)


async def _bulk(
    server, options: dict, spec: dict, rows: list[dict], part: range, journal: Journal, beat, keep: given.Keeper | None
) -> None:
    """Answer the rows that are not done; with `keep` their data's answers take the place of the target's."""
    missing = [row for row in part if row not in journal.done]
    api = generation.client(server)
    transfer = {"include_output_tokens": True} if journal.layers else None

    async def ask(messages: list[dict], row: int, back: int) -> str:
        answer = await generation.chat(api, messages, _sampling(spec, row - back), transfer, rows[row].get("tools"))
        return answer["choices"][0]["message"]["content"] or ""

    texts = {row: None if done["error"] else done["text"] or "" for row, done in journal.done.items()}
    earlier = turns.Answers({row: rows[row] for row in part}, ask, texts)

    async def attempt(row: int) -> None:
        disk.check_room(journal.folder, 0)
        sampling = _sampling(spec, row)
        try:
            if keep:
                made, answer = await keep.row(api, server, row, rows[row], sampling, capture=bool(journal.layers))
            else:
                messages, tools = await earlier.messages(row), rows[row].get("tools")
                answer = await generation.chat(api, messages, sampling, transfer, tools)
                made = generation.response_row(row, rows[row], answer, sampling)
        except (generation.RowRefused, turns.EarlierRefused) as error:
            logging.warning("row %d (%s) was refused: %s", row, rows[row]["id"], error)
            journal.finish(generation.failed_row(row, rows[row], str(error)), "")
            earlier.finished(row, None)
            return
        name = ""
        if journal.layers:
            states, ids = Path(answer["kv_transfer_params"]["hidden_states_path"]), made["prompt_token_ids"]
            await generation.take_states(states, (ids + made["token_ids"])[:-1], len(journal.layers))
            name = states.name
        journal.finish(made, name)
        earlier.finished(row, made["text"] or "")

    async def do_row(row: int) -> None:
        await generation.with_retries(row, lambda: attempt(row), server)
        beat.advance(len(journal.done), journal.tokens)

    async def run(some: list[int], at_once: int) -> None:
        await generation.run_rows(server, some, do_row, at_once=at_once, stall_timeout=options["stall_timeout"])

    asked = await _canary(missing, run, journal, spec["reasoning_parser"])
    await run(missing[asked:], options["max_num_seqs"])


async def _canary(missing: list[int], run, journal: Journal, reasoning_parser: str | None) -> int:
    """Put a row, or a few, through every check before the bulk is asked for; returns how many were done.

    With a reasoning parser one of them must come back with its reasoning told from its answer.
    """
    for number, row in enumerate(missing[:CANARIES], 1):
        await run([row], 1)
        done = journal.done[row]
        if done["reasoning"] or not reasoning_parser:
            tokens, letters = len(done["token_ids"] or []), len(done["reasoning"] or "")
            logging.info(
                "canary: row %d gave %d tokens%s, %d letters of reasoning",
                row, tokens, " with states that match" if journal.layers else "", letters,
            )  # fmt: skip
            return number
    raise UserError(
        f"canary: rows {missing[:CANARIES]} came back without reasoning, though target.reasoning_parser is "
        f"{reasoning_parser!r}. Use the parser of the target's family, turn thinking on with "
        "responses.chat_template_kwargs, or leave the parser out to train without reasoning"
    )


def _sampling(spec: dict, row: int) -> dict:
    return {**spec["sampling"], "seed": spec["seed"] + row}


def _publish(arguments, journal: Journal, expected: int, questions: dict[int, str], origin: str) -> None:
    rows = journal.rows()
    failed = [row for row in rows if row["error"]]
    if len(failed) > arguments.max_failed:
        first = failed[0]
        raise UserError(
            f"{len(failed)} of {expected} rows were refused, first row {first['row']} (id {first['id']}): "
            f"{first['error']}. Mend these prompts, or allow the loss with responses.max_failed; "
            "the finished rows are kept"
        )
    journal.write_index(**{reuse.KEY: reuse.write(journal.captured, rows, questions, origin)})
    files.publish_folder(journal.captured, arguments.captured)
    files.write_jsonl(arguments.output, rows)
    logging.info("%d rows, %d refused, %d tokens", len(rows), len(failed), sum(len(r["token_ids"] or []) for r in rows))


if __name__ == "__main__":
    cli.run(main)
