# SPDX-License-Identifier: Apache-2.0
"""All drafters on all sets in one table each: tau, and speed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pilotfish.markdown import table

if TYPE_CHECKING:
    from pilotfish.report import Evaluated

DEFINITION = (
    "tau is `tau_micro_incl_bonus`: 1 + accepted / rounds, all rounds of a set together, so that a round without "
    "an accepted token counts 1; greedy. Served: what the engine counted, at its first concurrency. Replay: the same "
    "rounds worked out from the stored responses of the whole set, with a 95% bootstrap interval over its responses. "
    "chain-k drafts k tokens. DDTree-n drafts a tree of n nodes, the root not counted, from the n likeliest tokens at "
    "each of k depths; the engine serves chains, so it is replayed only."
)


def tables(found: Sequence["Evaluated"], sets: Sequence[str]) -> list[str]:
    """tau of each drafter as chain and as trees, and its speed-up, a column a set; none first."""
    lines = ["## Drafters on each set: tau", ""]
    rows = [["none", *("1" for _ in sets)]]
    for each in found:
        rows.append([f"{each.name}, chain-{each.k}", *(_tau(each, name) for name in sets)])
        for number, tree in enumerate(each.replays[sets[0]]["trees"]):
            replays = [each.replays[name]["trees"][number]["summary"] for name in sets]
            rows.append([f"{each.name}, DDTree-{tree['budget']}", *(f"- ({replayed(replay)})" for replay in replays)])
    lines += [*table(["drafter", *(f"{name}: served (replay)" for name in sets)], rows), "", DEFINITION, ""]
    levels = [(name, level) for name in sets for level in found[0].sets[name]]
    rows = [[each.name, *(speed(each.sets[name][level]) for name, level in levels)] for each in found]
    first = found[0].sets
    plain = [f"{first[name][level]['baseline_tokens_per_second']:.1f} tok/s" for name, level in levels]
    lines += ["## Drafters on each set: speed", ""]
    header = ["drafter", *(f"{name}, concurrency {level}" for name, level in levels)]
    lines += [*table(header, [["none", *plain], *rows]), "", SPEED]
    return lines


SPEED = (
    "Tokens/s over those of the same engine without a drafter, under the same flags and on the same prompts, with a "
    "95% bootstrap interval over chunks of prompts that both served right after one another."
)


def _tau(each: "Evaluated", name: str) -> str:
    served = next(iter(each.sets[name].values()))["summary"]["tau_micro_incl_bonus"]
    return f"{served:.3f} ({replayed(each.replays[name]['summary'])})"


def replayed(summary: dict) -> str:
    """Tau of a replay with its interval."""
    low, high = summary["tau_micro_interval_95"]
    return f"{summary['tau_micro_incl_bonus']:.3f}, {low:.2f} to {high:.2f}"


def speed(level: dict) -> str:
    """Speed-up of a served level with its interval, if it has one."""
    interval = level["speedup_interval_95"]
    return f"{level['speedup']:.2f}x" + ("" if interval is None else " ({:.2f} to {:.2f})".format(*interval))
