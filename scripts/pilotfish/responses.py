# SPDX-License-Identifier: Apache-2.0
"""Judging a split's answers one at a time: text against token ids, reasoning, ends, loops and repeats."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pilotfish import reasoning
from pilotfish.errors import UserError

LOOP_PERIOD = 64  # tokens; longer cycles are not looked for
LOOP_CYCLES = 3  # times that a cycle must come for it to be one
LOOP_TOKENS = 48  # of an answer's end that must be cycles, so that a short list is no loop
REPEAT_TOKENS = 16  # shorter answers may well be equal
SHOWN = 5  # rows listed in an error
UNFINISHED = "\ufffd"  # a character whose bytes the end of the answer has cut

Decode = Callable[[Sequence[int]], str]


def detokeniser(folder: Path, trust_remote_code: bool) -> Decode:
    """A function from token ids to text without special tokens, as vLLM writes it, for the tokenizer in `folder`."""
    fast = folder / "tokenizer.json"
    if fast.is_file():
        from tokenizers import Tokenizer  # transformers takes 4 s to import

        tokenizer = Tokenizer.from_file(str(fast))
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return lambda ids: slow.decode(list(ids), skip_special_tokens=True)


def loop_length(ids: Sequence[int]) -> int:
    """Tokens at the end of an answer that only repeat a cycle of at most LOOP_PERIOD tokens; 0 without a loop."""
    array, longest = np.asarray(ids), 0
    for period in range(1, min(LOOP_PERIOD, len(array) // LOOP_CYCLES) + 1):
        different = np.flatnonzero(array[period:] != array[:-period])
        length = len(array) - (different[-1] + 1 if len(different) else 0)
        if length >= LOOP_CYCLES * period:
            longest = max(longest, int(length))
    return longest if longest >= LOOP_TOKENS else 0


class Review:
    """Takes a split's rows in order, says which to leave out and why, and refuses at the end what is too much.

    `facts` are the target's; `policy` holds `truncated`, `max_truncated`, `max_loops` and `max_flawed`. What is
    kept in memory are counts, a few rows to name, and a hash of each answer (about 60 bytes).
    """

    def __init__(self, facts: dict, policy: dict, decode: Decode):
        self.parser, self.wrapper = facts["reasoning_parser"], facts["wrapper"]
        self.thinking = set(facts["thinking_token_ids"])
        self.policy, self.decode = policy, decode
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.owners: dict[str, int] = {}  # who opens the reasoning, and the first row where they did
        self.modes: Counter[str] = Counter()
        self._seen: dict[bytes, int] = {}
        self._wrong: list[str] = []
        self._named: dict[str, list[str]] = {"truncated": [], "loops": [], "flawed": []}

    def take(self, row: dict) -> str | None:
        """Judge one row; the reason to leave it out, or None to keep it."""
        self.counts["rows"] += 1
        if row["error"] is not None:
            return self._leave_out("failed", f"refused by the engine: {row['error']}")
        span = reasoning.split(row["prompt_token_ids"], row["token_ids"], self.wrapper)
        self.counts["answered"] += 1
        self.ends[row["finish_reason"]] += 1
        self.tokens["prompt_tokens"] += len(row["prompt_token_ids"])
        self.tokens["response_tokens"] += len(row["token_ids"])
        self.tokens["reasoning_tokens"] += span.end - span.start
        self._note_mode(row, span)
        if wrong := self._mismatch(row, span):
            self._name(self._wrong, row, wrong)
        truncated = row["finish_reason"] == "length"
        if truncated:
            self.counts["truncated"] += 1
            self.counts["cut_in_reasoning"] += not span.closed
            inside = " inside the reasoning" if not span.closed else ""
            self._name(self._named["truncated"], row, f"cut after {len(row['token_ids'])} tokens{inside}")
        if truncated and (length := loop_length(row["token_ids"])):
            self.counts["loops"] += 1
            self._name(self._named["loops"], row, f"its last {length} tokens only repeat")
        if flaw := self._flaw(row, span):
            self.counts["flawed"] += 1
            self._name(self._named["flawed"], row, flaw)
            return self._leave_out("flawed", flaw)
        if truncated and self.policy["truncated"] == "drop":
            return self._leave_out("truncated", f"cut after {len(row['token_ids'])} tokens")
        return None

    def _leave_out(self, kind: str, reason: str) -> str:
        self.left_out[kind] += 1
        return reason

    @staticmethod
    def _name(named: list[str], row: dict, text: str) -> None:
        if len(named) < SHOWN:
            named.append(f"  row {row['row']} (id {row['id']}): {text}")

    def _note_mode(self, row: dict, span: reasoning.Span) -> None:
        if span.owner != "none":
            self.owners.setdefault(span.owner, row["row"])
        self.modes[reasoning.mode(row["prompt_token_ids"], span, self.thinking)] += 1

    def _mismatch(self, row: dict, span: reasoning.Span) -> str | None:
        """What vLLM wrote as text and reasoning against what the ids say: never the model's fault."""
        ids = row["token_ids"]
        if self.wrapper is None and self.parser:  # where the parts lie in the ids only this parser knows
            lost = [part for part in (row["text"], row["reasoning"]) if (part or "").strip() not in self.decode(ids)]
            return f"{short(lost[0])} is not in what its token ids say" if lost else None
        if self.wrapper is None:
            if found := self.thinking.intersection(ids):
                return f"token {min(found)} wraps reasoning, but target.reasoning_parser is not set; set it"
            return self._differs("the answer", row["text"], ids)
        if span.fault:
            return None  # how a broken wrapper is parsed is the parser's own affair; the row is left out
        thought = ids[span.start : span.end] if span.owner != "none" else []
        return self._differs("the reasoning", row["reasoning"], thought) or self._differs(
            "the answer", row["text"], ids[span.answer :]
        )

    def _differs(self, what: str, text: str | None, ids: Sequence[int]) -> str | None:
        """Whether a text is not what its ids decode to; white space at its ends is the parser's choice."""
        said, decoded = ((each or "").strip().rstrip(UNFINISHED).strip() for each in (text, self.decode(ids)))
        if said == decoded:
            return None
        return f"{what} reads {short(said)} where its token ids say {short(decoded)}"

    def _flaw(self, row: dict, span: reasoning.Span) -> str | None:
        """Why a row is not fit to train on, though what came back is what the model said."""
        stopped = row["finish_reason"] == "stop"
        if span.fault:
            return f"broken reasoning: {span.fault}"
        if self.parser and not (row["reasoning"] or "").strip():
            return "no reasoning, though target.reasoning_parser is set (leave it out to train without thinking)"
        if stopped and not span.closed:
            return "the reasoning is never closed"
        if stopped and not (row["text"] or "").strip():
            return "the answer is empty"
        if len(row["token_ids"]) >= REPEAT_TOKENS:
            key = hashlib.blake2b(np.asarray(row["token_ids"]).tobytes(), digest_size=8).digest()
            if (first := self._seen.setdefault(key, row["row"])) != row["row"]:
                return f"the same answer as row {first}'s"
        return None

    def mode(self) -> str:
        """The mode of most answers: `thinking`, `closed by the template` or `plain`."""
        return max(self.modes, key=lambda mode: (self.modes[mode], mode), default="plain")

    def statistics(self) -> dict:
        """Counts for the manifest; rows = kept + the sum of left_out."""
        return {
            "rows": self.counts["rows"],
            "ok": self.counts["answered"],
            "failed": self.left_out["failed"],
            "kept": self.counts["rows"] - self.left_out.total(),
            "left_out": dict(self.left_out),
            "finish_reasons": dict(self.ends),
            **{name: self.tokens[name] for name in ("prompt_tokens", "response_tokens", "reasoning_tokens")},
            **{name: self.counts[name] for name in ("truncated", "cut_in_reasoning", "loops", "flawed")},
            "mode": self.mode(),
            "modes": dict(self.modes),
            "reasoning_opened_by": sorted(self.owners),
        }

    def verdict(self, where: str, reference: dict | None) -> None:
        """Raise UserError for mismatches, mixed owners or modes, and shares above the policy's limits.

        `reference` are the statistics of the split to train on, whose mode this one must share.
        """
        again = "delete these responses and run again"
        if self._wrong:
            cure = f"the text and the exact ids must agree; {again}, with the parser and tokenizer of this target"
            raise UserError(f"{where}: text that is not its token ids' (first rows):\n{_lines(self._wrong)}\n{cure}")
        if len(self.owners) > 1:
            rows = " and ".join(f"{owner} in row {row}" for owner, row in sorted(self.owners.items()))
            raise UserError(f"{where}: reasoning is opened by the {rows}; the chat template changed, so {again}")
        answered = max(self.counts["answered"], 1)
        for name, limit, cure in LIMITS:
            if self.counts[name] > self.policy[limit] * answered:
                raise UserError(
                    f"{where}: {self.counts[name]} of {answered} answers {CALLED[name]}, more than responses.{limit} "
                    f"= {self.policy[limit]:g} allows (first rows):\n{_lines(self._named[name])}\n{cure}"
                )
        if reference and reference["mode"] != self.mode():
            raise UserError(
                f"{where}: the answers are {self.mode()!r}, those to train on {reference['mode']!r} "
                f"(rows by mode: {dict(self.modes)}); use the same responses.chat_template_kwargs for both and {again}"
            )


CALLED = {"truncated": "were cut at max_tokens", "loops": "end in a loop", "flawed": "are flawed"}
LIMITS = (  # flaws first: they explain the others
    ("flawed", "max_flawed", "mend the target's template or parser settings, or raise the limit"),
    ("truncated", "max_truncated", "raise responses.max_tokens, or the limit"),
    ("loops", "max_loops", "raise responses.temperature, or the limit if the target is like that"),
)


def short(text: str) -> str:
    """A text as it stands in an error: its start and its end where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:30]}...{text[-25:]}")


def _lines(named: Sequence[str]) -> str:
    return "\n".join(named)
