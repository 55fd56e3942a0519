# SPDX-License-Identifier: Apache-2.0
"""Gate of a drafter's evaluation: the engine served the trained drafter, and what it measured agrees with all else.

Checks: the constants of training, of the export and of the engine's own view are equal, k and the target the declared
ones; counters add up with every request; the prompts' ids and the thinking mode are those of the data; at least 96%
of the served rounds are the replay's and tau is within 0.01 (over 2,800 rounds; noise makes more of fewer), over the
text that both share; where a greedy text parts from the baseline's at the same concurrency, the target's logits there
are as good as equal. Beside that stands how often, and how far, the baseline parts from itself.
Does not check: speed, which is measured and judged by nobody; a departure behind an earlier one from the stored
response, where no state is known, is counted only.

python scripts/validate_evaluation.py --help
"""

from pathlib import Path

import pandas as pd

from pilotfish import agreement, cli, constants, files, manifest, rounds, stored, tables, tensors
from pilotfish.errors import UserError

CURE = "what was served is not believed: mend the cause, delete the file and run again"


def main() -> None:
    arguments = _arguments()
    spec = cli.spec_of(arguments)
    k = spec["speculative_tokens"]
    facts = manifest.read(arguments.target, "target")["statistics"]
    baseline, served = (files.read_json(path) for path in (arguments.baseline, arguments.served))
    model, prompts = arguments.target.parent / "model", range(spec["prompts"])
    rows = stored.StoredRows(arguments.samples, arguments.states, facts["layers"], model, prompts)
    mode = manifest.read(arguments.responses, "responses")["statistics"]["mode"]
    for path, measured, drafted in ((arguments.baseline, baseline, 0), (arguments.served, served, k)):
        answers = _checked_answers(path, measured["concurrency"], spec, facts["vocab_size"], drafted)
        found = tensors.Faults(path)
        for fault in (
            *agreement.target_faults(measured["engine"], model, facts),
            *agreement.data_faults(answers, rows.prompts, mode, facts),
        ):
            found.add(fault)
        found.refuse(CURE)
    found = tensors.Faults(arguments.served)
    for fault in agreement.engine_faults(served["engine"], _trained(arguments), k, arguments.served):
        found.add(fault)
    found.refuse(CURE)
    replayed = {row["row"]: row["rounds"] for row in files.read_json(arguments.replay)["rows"]}
    levels = _levels(baseline["concurrency"], served["concurrency"], rows, replayed, k, found)
    found.refuse(CURE)
    manifest.write(
        arguments.manifest,
        schema="evaluation",
        paths=[arguments.baseline, arguments.served, arguments.replay],
        spec=arguments.spec,
        code=arguments.code,
        statistics=levels,
    )


def _arguments():
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest; its model folder lies beside it")
    cli.path_argument(made, "--drafter", "the drafter's manifest; its checkpoint lies beside it")
    cli.path_argument(made, "--export", "the export's manifest")
    cli.path_argument(made, "--responses", "manifest of the training split's responses")
    cli.path_argument(made, "--samples", "held-out samples")
    cli.path_argument(made, "--states", "manifest of their hidden states")
    cli.path_argument(made, "--baseline", "measurements without a drafter")
    cli.path_argument(made, "--served", "measurements with the drafter")
    cli.path_argument(made, "--replay", "the drafter's replay")
    cli.path_argument(made, "--manifest", "manifest to write")
    return made.parse_args()


def _checked_answers(path: Path, concurrency: dict, spec: dict, vocab_size: int, drafted: int) -> list[dict]:
    """All answers of one server, once its tables are right and complete."""
    if set(concurrency) != {str(level) for level in spec["concurrency"]}:
        raise UserError(f"{path}: levels {sorted(concurrency)}, not {spec['concurrency']}; delete it and run again")
    tables.check(tables.levels(concurrency), tables.LEVELS, path)
    schema, answers = tables.answers(vocab_size, drafted), []
    for level, measured in concurrency.items():
        rows = [answer["row"] for answer in measured["answers"]]
        if rows != list(range(spec["prompts"])):
            raise UserError(f"{path}, concurrency {level}: not the answers to the first {spec['prompts']} prompts")
        tables.check(pd.DataFrame(measured["answers"], index=rows), schema, path)
        answers += measured["answers"]
    return answers


def _trained(arguments) -> constants.Constants:
    """The constants of training, which the export must share."""
    path = arguments.drafter.parent / "checkpoint" / constants.FILE
    trained = constants.read(files.read_json(path), path)
    stated = manifest.read(arguments.export, "export")["statistics"]["constants"]
    for difference in constants.differences(constants.read(stated, arguments.export), trained):
        raise UserError(f"{arguments.export}: {difference} as trained; delete the export and run again")
    return trained


def _levels(baseline: dict, served: dict, rows: stored.StoredRows, replayed: dict, k: int, found) -> dict:
    """Statistics of each concurrency; what speaks against a level is added to `found`."""
    first, levels = next(iter(baseline.values()))["answers"], {}
    for level, measured in served.items():
        answers, plain = measured["answers"], baseline[level]["answers"]
        parity = agreement.parity(answers, rows.responses, replayed, k)
        gaps, text = rows.judged(answers, plain)
        faults = agreement.counter_faults(measured, k)
        for fault in (*faults, agreement.parity_fault(parity), agreement.gap_fault(gaps)):
            if fault:
                found.add(f"concurrency {level}: {fault}")
        speed, plain_speed = measured["tokens_per_second"], baseline[level]["tokens_per_second"]
        levels[level] = {
            "summary": None if faults else rounds.summarise([a["per_step_accepted"] for a in answers], k),
            "tokens_per_second": speed,
            "baseline_tokens_per_second": plain_speed,
            "speedup": round(speed / plain_speed, 4),
            "prompts": len(answers),
            "identical_to_baseline": agreement.identical(answers, plain),
            "baseline_identical_to_its_first_level": agreement.identical(plain, first),
            "text_against_baseline": text,
            "baseline_against_its_first_level": rows.judged(plain, first)[1],
            "parity": parity,
        }
    return levels


if __name__ == "__main__":
    cli.run(main)
