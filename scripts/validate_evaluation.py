# SPDX-License-Identifier: Apache-2.0
"""Gate of a drafter's evaluation: counters add up, outputs compared, served rounds equal the replayed ones.

python scripts/validate_evaluation.py --help
"""

from pilotfish import cli, evaluation, files, manifest, samples
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--baseline", "measurements without a drafter")
    cli.path_argument(made, "--served", "measurements with the drafter")
    cli.path_argument(made, "--replay", "the drafter's replay")
    cli.path_argument(made, "--samples", "held-out samples")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    k = cli.spec_of(arguments)["speculative_tokens"]
    baseline = files.read_json(arguments.baseline)["concurrency"]
    served = files.read_json(arguments.served)["concurrency"]
    stored = {s["row"]: s["input_ids"][s["prompt_length"] :] for s in samples.load(arguments.samples)}
    replayed = {row["row"]: row["rounds"] for row in files.read_json(arguments.replay)["rows"]}
    first = next(iter(baseline.values()))["answers"]
    levels = {}
    for level, measured in served.items():
        where = f"{arguments.served}, concurrency {level}"
        for fault in evaluation.counter_faults(measured, where):
            raise UserError(fault)
        agreement = evaluation.parity(measured["answers"], stored, replayed, k)
        _check_parity(agreement, where)
        levels[level] = _level(measured, baseline[level], first, agreement, k)
    manifest.write(
        arguments.manifest,
        schema="evaluation",
        paths=[arguments.served],
        spec=arguments.spec,
        code=arguments.code,
        statistics=levels,
    )


def _check_parity(found: dict, where: str) -> None:
    if not found["rounds_compared"]:
        raise UserError(f"{where}: no served round can be compared with the replay; raise evaluation.prompts")
    share = found["rounds_equal"] / found["rounds_compared"]
    apart = found["tau_difference"]
    if share < evaluation.ROUNDS_EQUAL_MIN or apart is None or abs(apart) > evaluation.TAU_DIFFERENCE_MAX:
        raise UserError(
            f"{where}: {share:.1%} of {found['rounds_compared']} rounds equal the replay's (at least "
            f"{evaluation.ROUNDS_EQUAL_MIN:.0%} needed), tau differs by {apart} (at most "
            f"{evaluation.TAU_DIFFERENCE_MAX}): the engine and the training disagree on the drafter's forward"
        )


def _level(measured: dict, baseline: dict, first: list[dict], agreement: dict, k: int) -> dict:
    summary = evaluation.replay.summarise([a["per_step_accepted"] for a in measured["answers"]], k)
    return {
        "summary": summary,
        "tokens_per_second": measured["tokens_per_second"],
        "baseline_tokens_per_second": baseline["tokens_per_second"],
        "speedup": round(measured["tokens_per_second"] / baseline["tokens_per_second"], 4),
        "prompts": len(measured["answers"]),
        "identical_to_baseline": evaluation.identical(measured["answers"], baseline["answers"]),
        "baseline_identical_to_its_first_level": evaluation.identical(baseline["answers"], first),
        "parity": agreement,
    }


if __name__ == "__main__":
    cli.run(main)
