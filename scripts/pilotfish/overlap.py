# SPDX-License-Identifier: Apache-2.0
"""Prompts that say the same: repeats, near duplicates, and evaluation prompts among the training prompts."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rensa import RMinHash, RMinHashDeduplicator

from pilotfish import prompts
from pilotfish.errors import UserError

SHOWN = 5  # rows listed in an error
WORD = re.compile(r"\w+(?:[.'-]\w+)*|[-+*/%^=<>&|~]+")  # `os.path.join`, `don't` and `==` are one word each
SHINGLE = 3  # words in a run, for near duplicates
NEAR = 0.8  # Jaccard index of a near duplicate; short questions of one pattern reach 0.71
PHRASE = 13  # words in a run, for containment; at 8, two questions about different code shared 62% of their runs
SHORTEST = 8  # words; of a shorter prompt, being a part of another means nothing
CONTAINED = 0.5  # share of an evaluation prompt's phrases in one training prompt; unrelated ones reached 0.33
SLOTS, BANDS = 128, 16  # of a sketch


def words(text: str) -> list[str]:
    """The words and operators of a text, without regard to case, other punctuation and white space."""
    return WORD.findall(text.casefold()) or text.split()


def runs(found: list[str], length: int) -> set[str]:
    """Every run of `length` words; the whole text where it is shorter."""
    return {" ".join(found[start : start + length]) for start in range(max(1, len(found) - length + 1))}


class Match(NamedTuple):
    """How much of an evaluation prompt was found, 0 to 1, and the prompt's place in the order of adding."""

    share: float
    number: int


class _Postings:
    """Which texts hold a run of words."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._holders: dict[str, list[int]] = defaultdict(list)

    def add(self, found: set[str]) -> None:
        for run in found:
            self._holders[run].append(len(self.sizes))
        self.sizes.append(len(found))

    def shared(self, found: set[str]) -> Counter[int]:
        """How many of these runs each text holds; texts that hold none are left out."""
        return Counter(number for run in found for number in self._holders.get(run, ()))


class EvaluationPrompts:
    """Evaluation prompts, against which training prompts are compared one by one.

    Memory grows with the evaluation prompts (about 100 bytes a word and kind of run), not with the training ones.
    """

    def __init__(self) -> None:
        self._shingles, self._phrases = _Postings(), _Postings()
        self._lengths: set[int] = set()

    def add(self, text: str) -> None:
        """Index one evaluation prompt."""
        found = words(text)
        self._shingles.add(runs(found, SHINGLE))
        length = min(PHRASE, len(found))
        if length >= SHORTEST:
            self._lengths.add(length)
        self._phrases.add(runs(found, length) if length >= SHORTEST else set())

    def nearest(self, text: str) -> Match:
        """The evaluation prompt with the largest Jaccard index (shared runs over all runs of both)."""
        found = runs(words(text), SHINGLE)
        sizes = self._shingles.sizes
        shared = self._shingles.shared(found).items()
        return _largest(Match(count / (sizes[number] + len(found) - count), number) for number, count in shared)

    def most_contained(self, text: str) -> Match:
        """The evaluation prompt of whose phrases the largest share is in the text.

        Word 13-grams are those of the contamination analysis of GPT-3 (arXiv:2005.14165, appendix C).
        """
        found = words(text)
        phrases = {run for length in self._lengths if length <= len(found) for run in runs(found, length)}
        sizes = self._phrases.sizes
        return _largest(Match(count / sizes[number], number) for number, count in self._phrases.shared(phrases).items())


def _largest(matches: Iterable[Match]) -> Match:
    return max(matches, key=lambda match: (match.share, -match.number), default=Match(0.0, 0))


class NearDuplicates:
    """Finds texts that nearly repeat an earlier one, by MinHash sketches and locality-sensitive hashing.

    The Jaccard index is estimated, with a standard error of 0.035 at 0.8, so this is for counting. A pair of
    index s is compared with the chance 1 - (1 - s^8)^16 (Leskovec et al., Mining of Massive Datasets, section
    3.4): 0.95 at 0.8, 0.9999 at 0.9. Holds about 2 KB for each text that repeats none, whatever its length.
    """

    def __init__(self) -> None:
        self._index = RMinHashDeduplicator(threshold=NEAR, num_perm=SLOTS, use_lsh=True, num_bands=BANDS, seed=0)

    def earlier(self, number: int, text: str) -> int | None:
        """The first text added before that this one nearly repeats; if there is none, it is added as `number`."""
        sketch = RMinHash(num_perm=SLOTS, seed=0)
        sketch.update(runs(words(text), SHINGLE))
        if found := self._index.get_duplicates(sketch):
            return min(map(int, found))
        self._index.add(str(number), sketch)
        return None


class Place(NamedTuple):
    """Where a prompt stands; rows count from 0."""

    path: Path
    row: int
    id: str

    def __str__(self) -> str:
        return f"{self.path}, row {self.row} (id {self.id!r})"


class Comparison:
    """Compares a run's prompts, one by one: first those to evaluate on, then those to train on.

    Both sides were split from prompts.sources, unless `setting` names the evaluation set that has a source
    of its own: then ids and conversations of the two sides have nothing to do with each other, only texts have.
    Holds no text of the training prompts, but about 3 KB for each: its place under its id, conversation and
    text, and its sketch.
    """

    def __init__(self, setting: str | None = None) -> None:
        self._setting = setting
        self._seen: dict[tuple[object, ...], Place] = {}
        self._evaluated: list[Place] = []
        self._evaluation, self._near = EvaluationPrompts(), NearDuplicates()
        self._faults, self._shown = 0, []
        self._trained, self._nearly = 0, Counter[int]()
        self._jaccard = self._contained = 0.0  # the largest found

    def add_evaluation(self, path: Path, row: int, prompt: dict) -> None:
        """Take in a prompt to evaluate on."""
        place = Place(path, row, prompt["id"])
        self._note(place, self._repeated(place, prompt))
        if self._setting is None:
            self._seen.setdefault(("conversation", _digest(prompts.conversation_key(prompt))), place)
        self._evaluation.add(prompts.user_text(prompt))
        self._evaluated.append(place)

    def add_training(self, path: Path, row: int, prompt: dict) -> None:
        """Take in a prompt to train on, after all evaluation prompts."""
        place, text = Place(path, row, prompt["id"]), prompts.user_text(prompt)
        self._trained += 1
        conversation = self._seen.setdefault(("conversation", _digest(prompts.conversation_key(prompt))), place)
        self._note(
            place,
            self._parted(place, conversation) or self._repeated(place, prompt) or self._contaminated(place, text),
        )
        if conversation is place and (first := self._near.earlier(row, text)) is not None:
            self._nearly[first] += 1

    def refuse(self, train: Path, max_near_duplicates: float) -> None:
        """Raise a UserError with the first faults found, or when near duplicates are more than this share."""
        if self._faults:
            more = f"\n  and {self._faults - SHOWN} more" if self._faults > SHOWN else ""
            listed = "\n".join(f"  {line}" for line in self._shown)
            raise UserError(f"{self._faults} prompt(s) stand twice, or on both sides of the split:\n{listed}{more}")
        nearly = sum(self._nearly.values())
        if nearly > max_near_duplicates * self._trained:
            worst = ", ".join(f"row {row} ({count} times)" for row, count in self._nearly.most_common(SHOWN))
            raise UserError(
                f"{train}: {nearly} of {self._trained} prompts nearly repeat an earlier one, most often {worst}; "
                "remove some from prompts.sources, give those that belong together the same "
                f"`conversation`, or raise prompts.max_near_duplicates ({max_near_duplicates})"
            )

    def statistics(self) -> dict:
        """Near duplicates among the training prompts, and the most that one has of an evaluation prompt."""
        return {
            "near_duplicates": sum(self._nearly.values()),
            "largest_jaccard": round(self._jaccard, 4),
            "largest_containment": round(self._contained, 4),
        }

    def _note(self, place: Place, fault: str | None) -> None:
        if fault:
            self._faults += 1
            if len(self._shown) < SHOWN:
                self._shown.append(f"{place} {fault}")

    def _repeated(self, place: Place, prompt: dict) -> str | None:
        """Whether a prompt has the id or text of an earlier one."""
        source = place.path if self._setting else None
        keys = ((("id", source, prompt["id"]), "has the id"), (("text", _fingerprint(prompt)), "repeats the text"))
        for key, says in keys:
            other = self._seen.setdefault(key, place)
            if other is not place:
                return f"{says} of {other}; {self._cure(place, other)}"
        return None

    def _cure(self, place: Place, other: Place) -> str:
        """What to remove from which source, where a prompt says what an earlier one says."""
        if self._setting and place.path != other.path:
            return "remove the former from prompts.sources"
        source = f"{self._setting}.source" if self._setting and not self._trained else "prompts.sources"
        return f"remove one of the two from {source}"

    def _parted(self, place: Place, first: Place) -> str | None:
        if first.path == place.path:
            return None
        return (
            f"shares its conversation with {first}, and what is evaluated on must not be trained on; delete both "
            "files and run again to split them anew"
        )

    def _contaminated(self, place: Place, text: str) -> str | None:
        """Whether a training text is nearly an evaluation prompt, or contains much of one."""
        nearest, quoted = self._evaluation.nearest(text), self._evaluation.most_contained(text)
        self._jaccard = max(self._jaccard, nearest.share)
        self._contained = max(self._contained, quoted.share)
        if nearest.share >= NEAR:
            other = self._evaluated[nearest.number]
            found = f"nearly repeats {other}: {nearest.share:.0%} of their runs of {SHINGLE} words are the same"
        elif quoted.share >= CONTAINED:
            other = self._evaluated[quoted.number]
            found = f"quotes {other}: {quoted.share:.0%} of its runs of words are there"
        else:
            return None
        together = "" if self._setting else ", or give both the same `conversation`"
        return f"{found}; {self._cure(place, other)}{together}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def _fingerprint(prompt: dict) -> bytes:
    """Equal for prompts whose turns differ in nothing but white space."""
    turns = [f"{message['role']}: {_said(message)}" for message in prompt["messages"]]
    return _digest("\n".join([*turns, *(json.dumps(tool, sort_keys=True) for tool in prompt.get("tools") or ())]))


def _said(message: dict) -> str:
    calls = message.get("tool_calls")
    return " ".join((message.get("content") or "").split()) + (json.dumps(calls, sort_keys=True) if calls else "")
