# SPDX-License-Identifier: Apache-2.0
"""Gate of a drafter's evaluation: the engine served the trained drafter, and what it measured agrees with all else.

Checks: the constants of training, of the export and of the engine's own view are equal (of a published drafter those
that it was adopted with), k and the target the declared ones; and on each set, at each concurrency: counters add up
with every request, times with every chunk and answer; the prompts' ids and the thinking mode are those of the data;
at least 96% of the served rounds are the replay's and tau is within 0.01 (from 2,800 rounds on; of fewer rounds those
that noise may flip weigh more), over the text that both share; where a greedy text parts from the baseline's at the
same concurrency, the target's logits there are as good as equal. Beside that stands how often, and how far, the
baseline parts from itself.
Does not check: speed, which is measured and judged by nobody; a departure behind an earlier one from the stored
response, where no state is known, is counted only.

python scripts/validate_evaluation.py --help
"""

from functools import cache
from pathlib import Path

import pandas as pd

from pilotfish import agreement, cli, constants, files, heads, manifest, rounds, speed, stored, tables, tensors
from pilotfish.errors import UserError

CURE = "what was served is not believed: mend the cause, delete the file and run again"


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    k = spec["speculative_tokens"]
    facts = manifest.read(arguments.target, "target")["statistics"]
    baseline, served = (files.read_json(path) for path in (arguments.baseline, arguments.served))
    model = arguments.target.parent / "model"
    rows = _stored_rows(arguments, spec["sets"], facts["layers"], model)
    mode = manifest.read(arguments.responses, "responses")["statistics"]["mode"]
    for path, measured, drafted in ((arguments.baseline, baseline, 0), (arguments.served, served, k)):
        answers = _checked_answers(path, measured["sets"], spec, facts["vocab_size"], drafted)
        found = tensors.Faults(path)
        for fault in agreement.target_faults(measured["engine"], model, facts):
            found.add(fault)
        for name, given in answers.items():
            for fault in agreement.data_faults(given, rows[name].prompts, mode, facts):
                found.add(f"{name}: {fault}")
        found.refuse(CURE)
    found = tensors.Faults(arguments.served)
    for fault in agreement.engine_faults(served["engine"], _trained(arguments, spec["kind"]), k, arguments.served):
        found.add(fault)
    found.refuse(CURE)
    sets = {}
    for path in arguments.replays:
        name = path.parent.name
        replayed = {row["row"]: row["rounds"] for row in files.read_json(path)["rows"]}
        sets[name], faults = _levels(baseline["sets"][name], served["sets"][name], rows[name], replayed, spec)
        for fault in faults:
            found.add(f"{name}, {fault}")
    found.refuse(CURE)
    manifest.write(
        arguments.manifest,
        schema="evaluation",
        paths=[arguments.baseline, arguments.served, *arguments.replays],
        spec=arguments.spec,
        code=arguments.code,
        statistics={"sets": sets},
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--drafter", "manifest of the drafter, its checkpoint beside it, or of the reference")
    made.add_argument("--export", type=Path, help="manifest of the drafter's export; a reference has none")
    cli.path_argument(made, "--responses", "manifest of the training split's responses")
    cli.path_argument(made, "--samples", "samples of each set; the folder has the set's name", many=True)
    cli.path_argument(made, "--states", "manifests of their hidden states; the folder has the set's name", many=True)
    cli.path_argument(made, "--baseline", "measurements without a drafter")
    cli.path_argument(made, "--served", "measurements with the drafter")
    cli.path_argument(made, "--replays", "the drafter's replay of each set; the folder has the set's name", many=True)
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _stored_rows(arguments, sets: dict[str, int], layer: int, model: Path) -> dict[str, stored.StoredRows]:
    """What is stored of each set's rows that were served."""
    states = {path.parent.name: path for path in arguments.states}
    head = cache(lambda: heads.Head(model))
    return {
        name: stored.StoredRows(path, states[name], layer, head, range(sets[name]))
        for path in arguments.samples
        for name in [path.parent.name]
    }


def _checked_answers(path: Path, sets: dict, spec: dict, vocab_size: int, drafted: int) -> dict[str, list[dict]]:
    """All answers of one server by set, once its tables are right and complete."""
    due = {(name, str(level)) for name in spec["sets"] for level in spec["concurrency"]}
    if {(name, level) for name, levels in sets.items() for level in levels} != due:
        raise UserError(f"{path}: other sets or levels than {sorted(due)}; delete it and run again")
    tables.check(speed.levels(sets), tables.LEVELS, path)
    schema, answers = tables.answers(vocab_size, drafted), {name: [] for name in sets}
    for name, level in sorted(due):
        given, prompts = sets[name][level]["answers"], spec["sets"][name]
        rows = [answer["row"] for answer in given]
        if rows != list(range(prompts)):
            raise UserError(f"{path}, {name}, concurrency {level}: not the answers to the first {prompts} prompts")
        index = [f"{row} of {name} at concurrency {level}" for row in rows]
        tables.check(pd.DataFrame(given, index=index), schema, path)
        answers[name] += given
    return answers


def _trained(arguments, kind: str) -> constants.Constants:
    """The constants of training, which the export must share; of a reference those of its adoption."""
    if kind == "reference":
        adopted = manifest.read(arguments.drafter, "reference")["statistics"]["constants"]
        return constants.read(adopted, arguments.drafter)
    path = arguments.drafter.parent / "checkpoint" / constants.FILE
    trained = constants.read(files.read_json(path), path)
    stated = manifest.read(arguments.export, "export")["statistics"]["constants"]
    for difference in constants.differences(constants.read(stated, arguments.export), trained):
        raise UserError(f"{arguments.export}: {difference} as trained; delete the export and run again")
    return trained


def _levels(baseline: dict, served: dict, rows: stored.StoredRows, replayed: dict, spec: dict) -> tuple[dict, list]:
    """Statistics of each concurrency of one set, and what speaks against them."""
    k, levels, found = spec["speculative_tokens"], {}, []
    first = baseline[str(spec["concurrency"][0])]["answers"]
    for level in map(str, spec["concurrency"]):
        measured, plain = served[level], baseline[level]
        answers = measured["answers"]
        parity = agreement.parity(answers, rows.responses, replayed, k)
        gaps, text = rows.judged(answers, plain["answers"])
        faults = agreement.counter_faults(measured, k)
        every = (*faults, agreement.parity_fault(parity), agreement.gap_fault(gaps))
        found += [f"concurrency {level}: {fault}" for fault in every if fault]
        levels[level] = {
            "summary": None if faults else rounds.summarise([a["per_step_accepted"] for a in answers], k),
            **{key: measured[key] for key in ("tokens_per_second", "time_per_output_token_ms")},
            **{f"baseline_{key}": plain[key] for key in ("tokens_per_second", "time_per_output_token_ms")},
            **speed.speedup(measured["chunks"], plain["chunks"]),
            "chunks": len(measured["chunks"]),
            "prompts": len(answers),
            "identical_to_baseline": agreement.identical(answers, plain["answers"]),
            "baseline_identical_to_its_first_level": agreement.identical(plain["answers"], first),
            "text_against_baseline": text,
            "baseline_against_its_first_level": rows.judged(plain["answers"], first)[1],
            "parity": parity,
        }
    return levels, found


if __name__ == "__main__":
    cli.run(main)
