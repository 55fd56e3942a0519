# SPDX-License-Identifier: Apache-2.0
"""Answers of an earlier run: what has been asked, with the same settings and code, is not asked again.

Among the by-products of `respond` lies a copy of its answers, each with a digest of what it answers. Snakemake takes a
changed prompt file for a reason to answer all of it anew; only the prompts that are new in it need an engine.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file

from pilotfish import digest, disk, files, shards, work
from pilotfish.errors import UserError
from pilotfish.journal import Journal

logger = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"  # in the folder of captured shards
KEY = "answers"  # of the entry that its index has of them


def origin(target: Path, spec: Mapping, code: str) -> str:
    """Digest of what all answers of a job come from: the target's manifest, the engine's numerics, the code."""
    return work.origin(target, spec, code, without=("seed", "sampling"))


def question(prompt: Mapping, sampling: Mapping) -> str:
    """Digest of what one answer comes from beside its `origin`: a greedy one depends on no seed."""
    chosen = {name: value for name, value in sampling.items() if name != "seed" or sampling["temperature"] > 0}
    asked = [prompt["messages"], prompt.get("tools"), prompt.get("answer"), chosen]
    return hashlib.sha256(digest.spec_json(asked).encode()).hexdigest()


def write(folder: Path, rows: Iterable[dict], questions: Mapping[int, str], origin: str) -> dict:
    """Keep answers in a folder of shards; returns what its index lists of them. `origin` is of target and code."""
    path = folder / ANSWERS
    files.write_jsonl(path, ({**row, "question": questions[row["row"]]} for row in rows if row["error"] is None))
    return {"file": ANSWERS, "size": path.stat().st_size, "sha256": files.sha256_file(path), "origin": origin}


def adopt(
    journal: Journal,
    indexes: Iterable[Path],
    questions: Mapping[int, str],
    stamped: Callable[[int, dict], dict],
    origin: str,
) -> int:
    """Take over answers, with their states where the journal keeps some; returns how many rows that were.

    `indexes` are index.json of folders of captured shards; `questions` has what each row of the part asks; `stamped`
    makes an old answer the answer of a row. What is damaged, or of another origin, is left alone.
    """
    before = len(journal.done)
    for index in indexes:
        if all(row in journal.done for row in questions):
            break
        try:
            _take_over(journal, index, questions, stamped, origin)
        except (UserError, OSError, KeyError) as error:  # another part's job may be replacing its folder just now
            logger.info("%s: no more answers are taken from it (%s)", index.parent, error)
    return len(journal.done) - before


def _take_over(
    journal: Journal, index: Path, questions: Mapping[int, str], stamped: Callable[[int, dict], dict], origin: str
) -> None:
    listed = shards.read_index(index)
    told = listed.get(KEY, {})
    if told.get("origin") != origin or not set(journal.layers) <= set(listed["capture_layers"]):
        return
    if files.sha256_file(index.parent / ANSWERS) != told["sha256"]:
        raise UserError(f"{ANSWERS} is damaged")
    answers = {row["row"]: row for row in files.iterate_jsonl(index.parent / ANSWERS)}
    asked_by = {row: answer.pop("question") for row, answer in answers.items()}
    sound = set(answers)
    if journal.layers:
        same = [row for row, asked in questions.items() if asked_by.get(row) == asked and row not in journal.done]
        sound = _take_shards(journal, index, listed, {row: stamped(row, answers[row]) for row in same})
    by_question = {asked_by[row]: answers[row] for row in sound if row in answers}
    reader = shards.ShardReader([index], journal.layers) if journal.layers else None
    for row, asked in questions.items():
        if row in journal.done or asked not in by_question:
            continue
        disk.check_room(journal.folder, 0)
        answer, name = by_question[asked], ""
        if reader:
            states, name = reader.read(answer["row"]), f"kept-{row}.safetensors"
            tensors = {"token_ids": states.token_ids, "hidden_states": states.hidden_states.contiguous()}
            save_file(tensors, journal.incoming / name)
        journal.finish(stamped(row, answer), name)


def _take_shards(journal: Journal, index: Path, listed: dict, unchanged: Mapping[int, dict]) -> set[int]:
    """Link the shards whose rows are all `unchanged`, with their answers; returns the rows of all sound shards."""
    sound = set[int]()
    for entry in listed["shards"]:
        path = index.parent / entry["file"]
        if not path.is_file() or files.sha256_file(path) != entry["sha256"]:
            continue
        sound.update(entry["rows"])
        if all(row in unchanged for row in entry["rows"]):
            journal.take_shard(path, entry, [unchanged[row] for row in entry["rows"]])
    return sound
