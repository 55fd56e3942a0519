# SPDX-License-Identifier: Apache-2.0
"""Faults of the prompts: in the file that they come from, and between the splits."""

import json
from collections.abc import Callable
from pathlib import Path

from faults import Scene, fault
from pilotfish import files

SOURCE = Path("results/tiny-target/prompts.jsonl")
TRAIN, HELDOUT = "prompts/train.jsonl", "prompts/heldout.jsonl"
FROM_TRAIN = r"train\.jsonl, row 5 \(id 'tiny-\d+'\) "
OF_HELDOUT = r"heldout\.jsonl, row \d+ \(id 'tiny-\d+'\)"


def longest_heldout(scene: Scene) -> list[dict]:
    """Messages of the held-out prompt whose only turn is longest."""
    single = [row["messages"] for row in files.read_jsonl(scene.path(HELDOUT)) if len(row["messages"]) == 1]
    return max(single, key=lambda messages: len(messages[0]["content"].split()))


def train_on(scene: Scene, messages: list[dict]) -> None:
    """Put these messages into row 5 of the training prompts, in a conversation of their own."""

    def change(rows: list[dict]) -> None:
        rows[5] |= {"messages": messages, "conversation": "another"}

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "multi-turn rows of one conversation on both sides of the split",
    "validate_prompts",
    FROM_TRAIN + "shares its conversation with .*" + OF_HELDOUT + ".*delete both files and run again",
)
def _(scene: Scene) -> None:
    answered = files.read_jsonl(scene.path(HELDOUT))[2]
    more = [{"role": "assistant", "content": "done ."}, {"role": "user", "content": "now add 3 and 4 ."}]

    def change(rows: list[dict]) -> None:
        rows[5] |= {"messages": answered["messages"] + more, "conversation": answered["conversation"]}

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "evaluation prompt among the training prompts",
    "validate_prompts",
    FROM_TRAIN + "repeats the text of .*" + OF_HELDOUT + "; remove one of the two",
)
def _(scene: Scene) -> None:
    train_on(scene, longest_heldout(scene))


@fault(
    "Data",
    "near copy of an evaluation prompt among the training prompts",
    "validate_prompts",
    FROM_TRAIN + "nearly repeats .*" + OF_HELDOUT + ": 8[0-9]% of .*; remove one of the two",
)
def _(scene: Scene) -> None:
    text = longest_heldout(scene)[0]["content"]
    train_on(scene, [{"role": "user", "content": f"{text.upper()}  Please!"}])


@fault(
    "Data",
    "a prompt repeated",
    "validate_prompts",
    FROM_TRAIN + r"repeats the text of .*train\.jsonl, row 4 \(id 'tiny-\d+'\); remove one of the two",
)
def _(scene: Scene) -> None:
    train_on(scene, files.read_jsonl(scene.path(TRAIN))[4]["messages"])


def source_fault(name: str, says: str) -> Callable:
    """Register a fault of the source's bytes, which the collecting job must refuse."""

    def register(change: Callable[[list[bytes]], bytes]) -> None:
        @fault("Data", name, "collect_prompts", says)
        def _(scene: Scene) -> None:
            SOURCE.write_bytes(change(SOURCE.read_bytes().splitlines(keepends=True)))
            scene.run("collect_prompts")

    return register


def with_line(lines: list[bytes], line: bytes) -> bytes:
    """The file with this as its third line."""
    return b"".join([*lines[:2], line + b"\n", *lines[3:]])


def prompt(content: str) -> bytes:
    return json.dumps({"id": "another", "messages": [{"role": "user", "content": content}]}).encode()


@source_fault("invalid UTF-8", r"prompts\.jsonl, line 3: not UTF-8 .*re-save the file as UTF-8")
def _(lines: list[bytes]) -> bytes:
    return with_line(lines, prompt("caf?").replace(b"?", b"\xe9"))


@source_fault("a lone surrogate", r"prompts\.jsonl, line 3: half of a surrogate pair .*mend or remove the line")
def _(lines: list[bytes]) -> bytes:
    return with_line(lines, prompt("half an emoji \ud83d"))


@source_fault(
    "a 2 MB line",
    r"prompts\.jsonl, line 3: 2,000,000 bytes .*too many for engine\.max_model_len = 256 .*shorten or remove",
)
def _(lines: list[bytes]) -> bytes:
    return with_line(lines, prompt("ab " * 666_666 + "ab"))


@source_fault("a truncated last line", r"prompts\.jsonl, line 176: not valid JSON .*copy the whole file again")
def _(lines: list[bytes]) -> bytes:
    return b"".join(lines)[:-9]


@source_fault("BOM", r"prompts\.jsonl, line 1: starts with a byte order mark; re-save the file as UTF-8 without")
def _(lines: list[bytes]) -> bytes:
    return b"\xef\xbb\xbf" + b"".join(lines)


@source_fault("an empty file", r"prompts\.jsonl: no prompts in it; each row needs")
def _(lines: list[bytes]) -> bytes:
    return b"".join(lines[:0])


@fault("Data", "CRLF", "collect_prompts", "^read as LF: the same prompts$")
def _(scene: Scene) -> str:
    before = scene.path(TRAIN).read_bytes()
    SOURCE.write_bytes(SOURCE.read_bytes().replace(b"\n", b"\r\n"))
    scene.run("collect_prompts")
    return f"read as LF: {'the same' if scene.path(TRAIN).read_bytes() == before else 'other'} prompts"
