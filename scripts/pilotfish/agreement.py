# SPDX-License-Identifier: Apache-2.0
"""What served measurements must agree with: themselves, what was trained, the baseline's text, and the replay."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish import constants, reasoning, rounds
from pilotfish.constants import Constants

ROUNDS_EQUAL_MIN = 0.96  # a right replay shares 97.8% of its rounds with the engine, a wrong one 79.6%
TAU_DIFFERENCE_MAX = 0.01
FLIPPED = 0.022  # share of a right replay's rounds that noise turns into others, over 2,800 of them (SPECS, section 7)
# Where greedy texts part, noise has chosen between two tokens: how far the lesser of them may lie below the likeliest,
# in standard deviations of the target's logits there. bf16 gave 0.10 at most (SmolLM2-135M, 20 places); at a random
# place the second token lies further below the first than this in three of four.
GAP_MAX = 0.25
SHOWN = 5  # rows listed in an error


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two responses share from the start."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


def identical(left: Sequence[dict], right: Sequence[dict]) -> int:
    """Rows whose token ids are the same in two sets of answers to the same prompts."""
    return sum(a["token_ids"] == b["token_ids"] for a, b in zip(left, right, strict=True))


def parity(answers: Sequence[dict], stored: Mapping[int, list[int]], replayed: Mapping[int, list], k: int) -> dict:
    """Served rounds against replayed ones, over the tokens that both responses share.

    The stored response came from a bigger batch, whose arithmetic differs in the last bits, so greedy
    texts part now and then. Up to there a round depends on shared tokens alone; a round counts if its
    bonus token is shared, on both sides, and the rest are left out.
    """
    served, ours = [], []
    for answer in (answer for answer in answers if answer["row"] in stored):
        shared = common_prefix(answer["token_ids"], stored[answer["row"]])
        served.append(rounds.within(rounds.rounds_of(answer["per_step_accepted"]), shared))
        ours.append(rounds.within([rounds.Round(*each) for each in replayed[answer["row"]]], shared))
    equal, total = rounds.compare_rounds(ours, served)
    count = sum(len(answer["per_step_accepted"]) for answer in answers)
    result = {"rounds_compared": total, "rounds_equal": equal, "rounds_served": count, "tau_difference": None}
    if total and any(ours):
        taus = [rounds.summarise(side, k)["tau_micro_incl_bonus"] for side in (served, ours)]
        result |= {"tau_served": taus[0], "tau_replay": taus[1], "tau_difference": taus[0] - taus[1]}
    return result


def parity_fault(found: dict) -> str | None:
    """What a `parity` says against the engine or the replay; None within the limits."""
    if not found["rounds_compared"]:
        return "no served round can be compared with the replay; raise evaluation.sets.NAME.prompts"
    share, apart = found["rounds_equal"] / found["rounds_compared"], found["tau_difference"]
    least, allowed = share_needed(found["rounds_compared"]), tau_difference_allowed(found["rounds_compared"])
    if share >= least and apart is not None and abs(apart) <= allowed:
        return None
    return (
        f"{share:.1%} of {found['rounds_compared']} rounds equal the replay's (at least {least:.1%} "
        f"needed), tau differs by {'an unknown amount' if apart is None else f'{apart:.4f}'} (at most {allowed:.4f}): "
        "the engine and the training disagree on the drafter's forward; compare their versions with envs/"
    )


def _flipped_at_most(compared: int) -> float:
    """Of so many rounds, those that noise may flip: their mean, and three standard deviations (a Poisson number's)."""
    mean = FLIPPED * compared
    return mean + 3 * mean**0.5


def share_needed(compared: int) -> float:
    """The share of so many rounds that must be the replay's: ROUNDS_EQUAL_MIN, but of few a flip or two less."""
    return min(ROUNDS_EQUAL_MIN, 1 - _flipped_at_most(compared) / compared)


def tau_difference_allowed(compared: int) -> float:
    """By how much tau may differ over so many rounds: TAU_DIFFERENCE_MAX, but more where a few flips weigh more.

    A flipped round is a token or so longer or shorter; n of them make three times the root of n at most.
    """
    return max(TAU_DIFFERENCE_MAX, 3 * _flipped_at_most(compared) ** 0.5 / compared)


def counter_faults(measured: dict, k: int) -> list[str]:
    """What is inconsistent among the counters and the requests of one measurement with a drafter of k tokens."""
    count, found = measured["counters"], []
    per_position = count["accepted_per_position"]
    per_request = [answer["per_step_accepted"] for answer in measured["answers"]]
    if count["accepted"] > count["drafted"]:
        found.append(f"{count['accepted']} tokens accepted, only {count['drafted']} drafted")
    if count["drafted"] > k * count["rounds"]:
        found.append(f"{count['drafted']} tokens drafted in {count['rounds']} rounds of at most {k}")
    if count["rounds"] == 0:
        found.append("the engine drafted nothing; was the drafter loaded?")
    if sorted(per_position, reverse=True) != per_position:
        found.append(f"accepted per position {per_position} does not fall")
    if len(per_position) != k or sum(per_position) != count["accepted"]:
        found.append(f"accepted per position {per_position} is not {count['accepted']} tokens at {k} positions")
    if count["rounds"] != sum(map(len, per_request)) or count["accepted"] != sum(map(sum, per_request)):
        found.append("the engine's counters and its requests disagree; was another client using it? serve again")
    return found


def engine_faults(view: dict, trained: Constants, k: int, where: Path) -> Iterator[str]:
    """What the engine's own view of its drafter says against the constants of training, and the declared k."""
    if view["drafter"] is None:
        yield "the engine served without a drafter; serve again"
        return
    for difference in constants.differences(constants.read(view["drafter"], where), trained):
        yield f"the engine saw {difference} as trained; export and serve again with the engine of envs/"
    if (served := view["speculative"]["num_speculative_tokens"]) != k:
        yield f"the engine drafted {served} tokens a round, not {k} as declared; serve again"


def target_faults(view: dict, model: Path, facts: Mapping) -> Iterator[str]:
    """Whether the engine's own view of its target is the target in the folder `model`, with these facts."""
    seen = view["target"]
    if Path(seen["model"]).resolve() != model.resolve():
        yield f"the engine served {seen['model']}, not {model}; serve again"
    for name in ("layers", "hidden_size", "vocab_size"):
        if seen[name] != facts[name]:
            yield f"the engine saw {name} {seen[name]}, not the target's {facts[name]}; serve again"


def data_faults(
    answers: Sequence[dict], prompts: Mapping[int, list[int]], trained_mode: str, facts: Mapping
) -> Iterator[str]:
    """Whether answers are of another thinking mode than the training data's, or to other prompt ids than stored."""
    thinking, modes = facts["thinking_token_ids"], Counter()
    for answer in answers:
        asked, told = answer["prompt_token_ids"], answer["token_ids"]
        modes[reasoning.mode(asked, reasoning.split(asked, told, facts["wrapper"]), thinking)] += 1
    served_mode = max(modes, key=lambda mode: (modes[mode], mode))
    if served_mode != trained_mode:
        yield (
            f"the answers are {served_mode!r}, those trained on {trained_mode!r} (answers by mode: {dict(modes)}): "
            "serve with the responses.chat_template_kwargs of the training data"
        )
    differing = sorted(
        {a["row"] for a in answers if a["prompt_token_ids"] != prompts.get(a["row"], a["prompt_token_ids"])}
    )
    if differing:
        yield (
            f"rows {differing[:SHOWN]}: the served prompt's tokens differ from the stored sample's; the chat "
            "template or its arguments changed in between, so generate the responses again"
        )


@dataclass(frozen=True)
class Departure:
    """Where two greedy answers to one prompt part: `position` in the response, and the token of each side."""

    row: int
    position: int
    tokens: tuple[int, int]
    comparable: bool  # the tokens before are the stored response's too, whose state there is known


def departures(left: Sequence[dict], right: Sequence[dict], stored: Mapping[int, Sequence[int]]) -> list[Departure]:
    """Where the answers of two measurements part, a row each; `stored` are the responses whose states are known."""
    found = []
    for a, b in zip(left, right, strict=True):
        if a["token_ids"] == b["token_ids"]:
            continue
        shared = common_prefix(a["token_ids"], b["token_ids"])
        # One text may be the other's beginning: then there is no second token.
        tokens = tuple((each["token_ids"][shared:] or [-1])[0] for each in (a, b))
        response = stored.get(a["row"], [])
        comparable = min(tokens) >= 0 and shared < len(response)
        comparable = comparable and common_prefix(a["token_ids"], response) >= shared
        found.append(Departure(a["row"], shared, tokens, comparable))
    return found


def gap_fault(gaps: Sequence[tuple[Departure, float]]) -> str | None:
    """Departures that arithmetic noise does not explain, named by row and token; None within the limit."""
    large = [(each, gap) for each, gap in gaps if gap > GAP_MAX]
    if not large:
        return None
    rows = "; ".join(
        f"row {each.row}, response token {each.position}: {each.tokens[0]} where the baseline has {each.tokens[1]}, "
        f"{gap:.2f} apart"
        for each, gap in large[:SHOWN]
    )
    return (
        f"the engine with the drafter does not give the target's text ({len(large)} rows; logits in standard "
        f"deviations, at most {GAP_MAX}): {rows}; it verifies drafts wrongly, so serve again with the engine of envs/"
    )
