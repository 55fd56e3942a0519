# SPDX-License-Identifier: Apache-2.0
"""Faults of responses, samples and the vocabulary map."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from faults import Scene, fault
from helpers import plan
from pilotfish import files, samples, vocabulary

TRAIN = "responses/train/00000-of-00002.jsonl"
HELDOUT = "responses/heldout/00001-of-00002.jsonl"
MAP = "vocabulary/256/map.safetensors"


def wrapper(scene: Scene) -> tuple[int, int]:
    """Ids of the tokens that open and close the tiny target's reasoning."""
    facts = files.read_json(scene.path("target/manifest.json"))["statistics"]
    return facts["wrapper"]["open"], facts["wrapper"]["close"]


def decode(scene: Scene, ids: list[int]) -> str:
    """Text of token ids, as the engine would write it."""
    return Tokenizer.from_file(str(scene.path("target/model/tokenizer.json"))).decode(ids, skip_special_tokens=True)


@fault(
    "Data",
    "wrapper tokens dropped when reasoning and answer are joined",
    "validate_responses",
    r"row 3 \(id tiny-\d+\): the reasoning reads .* where its token ids say ''\n.*delete these responses and run again",
)
def _(scene: Scene) -> None:
    tokens = wrapper(scene)

    def change(rows: list[dict]) -> None:
        rows[3]["token_ids"] = [token for token in rows[3]["token_ids"] if token not in tokens]

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "answer text null because the reasoning was cut at max_tokens",
    "validate_responses",
    r"of 112 answers were cut at max_tokens, more than responses\.max_truncated = 0\.5 allows.*\n"
    r"  row 0 .*cut after \d+ tokens inside the reasoning(?s:.*)raise responses\.max_tokens",
)
def _(scene: Scene) -> None:
    _, close = wrapper(scene)

    def change(rows: list[dict]) -> None:
        for row in rows:
            ids = row["token_ids"][: row["token_ids"].index(close)]
            row |= {"token_ids": ids, "finish_reason": "length", "text": None, "reasoning": decode(scene, ids[1:])}

    for part in range(2):
        scene.edit_rows(f"responses/train/{part:05d}-of-00002.jsonl", change)


@fault(
    "Data",
    "half a reasoning trace leaks into the answer",
    "validate_responses",
    r"row 5 .*: the reasoning reads .* where its token ids say .*\n.*text and the exact ids must agree",
)
def _(scene: Scene) -> None:
    def change(rows: list[dict]) -> None:
        half = len(rows[5]["reasoning"]) // 2
        rows[5]["text"] = rows[5]["reasoning"][half:] + rows[5]["text"]
        rows[5]["reasoning"] = rows[5]["reasoning"][:half]

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "template's own `<think>` supervised",
    "validate_responses",
    r"answers are flawed(?s:.*)row 0 .*an opening token though the template has opened the reasoning(?s:.*)template",
)
def _(scene: Scene) -> None:
    opening, _ = wrapper(scene)

    def change(rows: list[dict]) -> None:
        for row in rows:
            row["prompt_token_ids"].append(opening)

    for part in range(2):
        scene.edit_rows(f"responses/train/{part:05d}-of-00002.jsonl", change)


@fault(
    "Data",
    "reasoning opened now by the template, now by the target",
    "validate_responses",
    r"reasoning is opened by the model in row 0 and template in row 2; the chat template changed",
)
def _(scene: Scene) -> None:
    def change(rows: list[dict]) -> None:
        rows[2]["prompt_token_ids"].append(rows[2]["token_ids"].pop(0))

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "held-out answers without the reasoning that the training answers have",
    "validate_responses",
    r"responses/heldout: .*flawed(?s:.*)row 24 .*: no reasoning, though target\.reasoning_parser is set",
)
def _(scene: Scene) -> None:
    _, close = wrapper(scene)

    def change(rows: list[dict]) -> None:
        for row in rows:
            row["token_ids"] = row["token_ids"][row["token_ids"].index(close) + 1 :]
            row["reasoning"] = None

    scene.edit_rows(HELDOUT, change)


@fault(
    "Data",
    "rows silently skipped",
    "validate_responses",
    r"00000-of-00002\.jsonl: row 7 answers id 'tiny-\d+', row 8, where the prompt is .*delete the responses",
)
def _(scene: Scene) -> None:
    scene.edit_rows(TRAIN, lambda rows: rows[:7] + rows[8:])


@fault(
    "Data",
    "the last rows missing",
    "validate_responses",
    r"ends after 110 rows, and prompt 'tiny-\d+' and those after it have no response; delete it and run again",
)
def _(scene: Scene) -> None:
    scene.edit_rows("responses/train/00001-of-00002.jsonl", lambda rows: rows[:-2])


@fault(
    "Data",
    "row order permuted between prompts and responses",
    "validate_responses",
    r"row 10 answers id 'tiny-\d+', row 10, where the prompt is 'tiny-\d+'; rows are missing or out of order",
)
def _(scene: Scene) -> None:
    def change(rows: list[dict]) -> None:
        rows[10], rows[11] = {**rows[11], "row": 10}, {**rows[10], "row": 11}

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "other model's tokenizer",
    "validate_responses",
    r"row 0 .*: the reasoning reads .* where its token ids say .*(?s:.*)with the parser and tokenizer of this target",
)
def _(scene: Scene) -> None:
    facts = files.read_json(scene.path("target/manifest.json"))["statistics"]
    special = {*facts["forced_token_ids"], *facts["end_token_ids"]}

    def change(rows: list[dict]) -> None:
        for row in rows:
            row["token_ids"] = [i if i in special else (i + 31) % 400 for i in row["token_ids"]]

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "token ids of a larger vocabulary",
    "validate_responses",
    r"row 4, token_ids: token ids must be some, and lie in 0\.\.\d+: was another model's tokenizer used\?",
)
def _(scene: Scene) -> None:
    def change(rows: list[dict]) -> None:
        rows[4]["token_ids"][2] = 50_000

    scene.edit_rows(TRAIN, change)


@fault(
    "Data",
    "reasoning parser of another family",
    "respond",
    r"canary: rows \[0, 1, 2\] came back without reasoning, though target\.reasoning_parser is 'deepseek_v3'\. Use the",
)
def _(scene: Scene) -> None:
    """The real engine answers; its parser takes the whole of it for the answer."""
    (job,) = (
        j
        for j in plan(scene.root)
        if j.rule == "respond" and j.wildcards == {"split": "heldout", "part": "00000-of-00002"}
    )
    spec = json.loads(job.line[job.line.index("--spec") + 1])
    output = Path(job.line[job.line.index("--output") + 1])
    output.unlink()
    scene.run("respond", ["--spec", json.dumps({**spec, "reasoning_parser": "deepseek_v3"})], **job.wildcards)


MASK = r"samples/train/samples\.arrow: .*\n.*row 6.*the loss mask must be 1 exactly on the response's tokens"


def mask_fault(name: str, says: str = MASK):
    """Register a fault that changes the loss mask of training row 6, given the mask and the prompt's length."""

    def register(change) -> None:
        def inject(scene: Scene) -> None:
            def edit(rows: list[dict]) -> None:
                rows[6]["loss_mask"] = change(rows[6]["loss_mask"], rows[6]["prompt_length"])

            scene.edit_samples("train", edit)

        fault("Masks", name, "validate_samples", says)(inject)

    return register


@mask_fault("all zero", r"samples\.arrow: .*failed(?s:.*)row 6, loss_mask: the loss mask must not be all zero")
def _(mask: list[bool], _: int) -> list[bool]:
    return [False] * len(mask)


@mask_fault("all one")
def _(mask: list[bool], _: int) -> list[bool]:
    return [True] * len(mask)


@mask_fault("shifted by one to the right")
def _(mask: list[bool], _: int) -> list[bool]:
    return [False, *mask[:-1]]


@mask_fault("shifted by one to the left")
def _(mask: list[bool], _: int) -> list[bool]:
    return [*mask[1:], True]


@mask_fault("includes the prompt")
def _(mask: list[bool], prompt_length: int) -> list[bool]:
    return [i >= prompt_length - 5 for i in range(len(mask))]


@mask_fault("misses the reasoning")
def _(mask: list[bool], prompt_length: int) -> list[bool]:
    return [i >= prompt_length + 12 for i in range(len(mask))]


@fault(
    "Masks",
    "the shift that training applies is off by one",
    "validate_samples",
    r"samples\.arrow, row 0: training would supervise \d+ \(input, label\) positions where serving uses \d+",
)
def _(scene: Scene) -> None:
    scene.monkeypatch.setattr(samples, "serving_mask", lambda mask: mask[1:])


def map_fault(name: str, says: str):
    """Register a fault that changes the map's tensors, given the scene and the tensors."""

    def register(change) -> None:
        def inject(scene: Scene) -> None:
            path = scene.path(MAP)
            tensors = {key: value.copy() for key, value in load_file(path).items()}
            change(scene, tensors)
            save_file(tensors, path)

        fault("Map", name, "validate_vocabulary", says)(inject)

    return register


@map_fault(
    "stale map for new data",
    r"map\.safetensors: its frequency table .* is not that of the present training responses .*counted on other data"
    r".*run `map_vocabulary` again",
)
def _(scene: Scene, tensors: dict[str, np.ndarray]) -> None:
    half = samples.load(scene.path("samples/train/samples.arrow")).select(range(40))
    tensors["counts"] = vocabulary.generated_counts(half, len(tensors["counts"]))


@map_fault("counts on all tokens", r"its frequency table .*counted on other data, or on other tokens")
def _(scene: Scene, tensors: dict[str, np.ndarray]) -> None:
    every = samples.load(scene.path("samples/train/samples.arrow"))
    whole = ({**sample, "prompt_length": 0} for sample in every)
    tensors["counts"] = vocabulary.generated_counts(whole, len(tensors["counts"]))


@map_fault(
    "frequency order instead of sorted", r"arange \+ d2t is not where t2d is true \(ids do not rise\): d2t must be"
)
def _(_: Scene, tensors: dict[str, np.ndarray]) -> None:
    ids = np.flatnonzero(tensors["t2d"])
    by_frequency = ids[np.argsort(-tensors["counts"][ids], kind="stable")]
    tensors["d2t"] = by_frequency - np.arange(len(ids))


@map_fault("absolute ids instead of offsets", r"\(d2t holds absolute ids\): d2t must be offsets of rising target ids")
def _(_: Scene, tensors: dict[str, np.ndarray]) -> None:
    tensors["d2t"] = np.flatnonzero(tensors["t2d"])


@map_fault("end token missing", r"end, special, thinking or tool tokens \[\d+\] are not in the draft vocabulary")
def _(scene: Scene, tensors: dict[str, np.ndarray]) -> None:
    (end,) = files.read_json(scene.path("target/manifest.json"))["statistics"]["end_token_ids"]
    chosen = set(np.flatnonzero(tensors["t2d"]).tolist()) - {end}
    spare = next(i for i in range(len(tensors["t2d"])) if i not in chosen and i != end)
    tensors["d2t"], tensors["t2d"] = vocabulary.maps(np.array(sorted({*chosen, spare})), len(tensors["t2d"]))


@map_fault("rare tokens instead of the frequent ones", r"its tokens are not the most frequent ones of the training")
def _(scene: Scene, tensors: dict[str, np.ndarray]) -> None:
    facts = files.read_json(scene.path("target/manifest.json"))["statistics"]
    chosen = vocabulary.choose(-tensors["counts"], len(tensors["d2t"]), vocabulary.forced_tokens(facts))
    tensors["d2t"], tensors["t2d"] = vocabulary.maps(chosen, len(tensors["t2d"]))
