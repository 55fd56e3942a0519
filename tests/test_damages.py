# SPDX-License-Identifier: Apache-2.0
"""A damage to any file of a finished run is found by `verify`, and the next run rebuilds that part alone."""

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import copy_workflow
from helpers import execute, plan
from pilotfish import repairs, shards, verification

SEED = 0
RUN = Path("results") / "tiny"
AREAS = (
    "target", "prompts", "responses", "samples", "vocabulary", "hidden_states", "drafters", "export", "evaluation",
    verification.REPORT,
)  # fmt: skip
Job = tuple[str, frozenset]  # a rule and its wildcards


def flipped(content: bytes, draw: random.Random) -> bytes:
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def emptied(content: bytes, draw: random.Random) -> bytes:
    return b""


def appended(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice([b"\n", b"\0", b"{}\n", draw.randbytes(9)])


def edited(content: bytes, draw: random.Random) -> bytes:
    """One digit is another, as someone types it: the text stays what it was, JSON included."""
    place = draw.choice([found.start() for found in re.finditer(rb"[1-9](?=\d)", content)])
    other = draw.choice([digit for digit in b"123456789" if digit != content[place]])
    return content[:place] + bytes([other]) + content[place + 1 :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    change.__name__: change for change in (flipped, cut, emptied, appended, edited)
}


def possible(path: Path) -> list[str]:
    """Kinds of damage that are one to this file, `deleted` among them."""
    content = path.read_bytes()
    if not content:
        return ["appended", "deleted"]
    kinds = ["flipped", "cut", "emptied", "appended"]
    if path.suffix in (".json", ".jsonl", ".md") and re.search(rb"[1-9]\d", content):
        kinds.append("edited")
    # A report that is not there, and a list that only spares work later, are made or missed without a word.
    return kinds if path.name in (verification.REPORT, shards.KEPT) else [*kinds, "deleted"]


def job(rule: str, **wildcards: str) -> Job:
    return rule, frozenset(wildcards.items())


def rebuilt(name: str, drafters: list[str]) -> set[Job]:
    """The jobs that remake a file of the run, and the gates that vouch for it: by where it lies."""
    area, *places, file = name.split("/") if "/" in name else [name, name]
    is_gate = file == verification.MANIFEST
    made: set[Job] = set()
    if area == "target":
        return {job("prepare_target")}
    if area == verification.REPORT:
        return {job("report")}
    if area == "prompts":
        if is_gate:
            return {job("validate_prompts", split=places[0])}
        split = file.removesuffix(".jsonl")
        made = {job("collect_evaluation_set", split=split) if split == "fresh" else job("collect_prompts")}
        return made | {job("validate_prompts", split=each) for each in ("heldout", "fresh") if split in ("train", each)}
    if area == "responses":
        if any(place.endswith(verification.CAPTURED) for place in places):
            return set()  # their copies are among the hidden states
        if re.fullmatch(r"\d{5}-of-\d{5}\.jsonl", file):
            made = {job("respond", split=places[0], part=file.removesuffix(".jsonl"))}
        return made | {job("validate_responses", split=places[0])}
    if area == "samples":
        return (set() if is_gate else {job("assemble_samples", split=places[0])}) | {
            job("validate_samples", split=places[0])
        }
    if area == "vocabulary":
        return (set() if is_gate else {job("map_vocabulary", size=places[0])}) | {
            job("validate_vocabulary", size=places[0])
        }
    if area == "hidden_states":
        if file == shards.KEPT:
            return set()
        made = set() if is_gate else {job("capture", split=places[0], part=places[1])}
        return made | {job("validate_hidden_states", split=places[0])}
    if area == "evaluation":
        return rebuilt_evaluation(places, file, drafters)
    maker, gate = {
        ("drafters", True): ("rehearse", "validate_rehearsal"),
        ("drafters", False): ("train", "validate_drafter"),
        ("export", False): ("export", "validate_export"),
    }[area, places[-1] == "rehearsal"]
    return (set() if is_gate else {job(maker, drafter=places[0])}) | {job(gate, drafter=places[0])}


def rebuilt_evaluation(places: list[str], file: str, drafters: list[str]) -> set[Job]:
    server, *split = places
    made = {job("serve")} if file == "served.json" else set()
    if split:
        made = {job("replay", drafter=server, split=split[0])}
    judged = drafters if server == "baseline" else [server]
    return made | {job("validate_evaluation", drafter=each) for each in judged}


class Bench:
    """A finished run that is damaged and restored over and over; `root` holds a copy of the workflow."""

    def __init__(self, root: Path, sound: Path):
        self.root, self.sound, self.results = root, sound, root / RUN
        self.gates = [
            root / output for each in plan(root) for output in each.output if output.endswith(verification.MANIFEST)
        ]
        self.drafters = sorted({each.wildcards["drafter"] for each in plan(root) if each.rule == "train"})

    def restore(self) -> None:
        """The run as it was, by links: a file must be replaced, not written to."""
        shutil.rmtree(self.results, ignore_errors=True)
        shutil.copytree(self.sound, self.results, symlinks=True, copy_function=link)

    def damage(self, name: str, kind: str, draw: random.Random) -> None:
        path = self.results / name
        content = path.read_bytes()
        path.unlink()
        if kind != "deleted":
            path.write_bytes(CHANGES[kind](content, draw))

    def inspect(self) -> verification.Findings:
        return verification.inspect(self.results, self.gates)

    def to_run(self) -> set[Job]:
        """The jobs that the next run would do."""
        dag = execute(self.root, self.root / "config" / "tiny.yaml", "dryrun", forceall=False)
        jobs = (each for each in dag.jobs if dag.needrun(each) and each.rule.name != "all")
        return {job(each.rule.name, **dict(each.wildcards_dict or {})) for each in jobs}

    def names(self) -> list[str]:
        """Every file of the run, relative to its folder."""
        return sorted(
            path.relative_to(self.sound).as_posix()
            for path in self.sound.rglob("*")
            if path.is_file() and path.name != repairs.DAMAGED
        )


def link(source: str, destination: str) -> None:
    os.link(source, destination, follow_symlinks=False)


@pytest.fixture(scope="module")
def bench(tiny_run: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The tiny run's files as the present workflow's, believed to be up to date."""
    root = copy_workflow(tmp_path_factory.mktemp("damages") / "work")
    shutil.copytree(tiny_run[0] / "results", root / "results", symlinks=True)
    execute(root, root / "config" / "tiny.yaml", "touch", forceall=True)
    (root / RUN).rename(root / "sound")
    return Bench(root, root / "sound")


@pytest.fixture(autouse=True)
def _sound(bench: Bench) -> None:
    bench.restore()


def test_there_are_a_hundred_damages_and_more_and_one_of_each_kind(bench: Bench):
    drawn = [chosen(bench, name)[0] for name in bench.names()]
    assert len(drawn) >= 100
    assert set(drawn) == {*CHANGES, "deleted"}


def chosen(bench: Bench, name: str) -> tuple[str, random.Random]:
    """The kind of damage that a file gets, and what decides where: both follow from the seed and the name."""
    draw = random.Random(f"{SEED} {name}")
    return draw.choice(possible(bench.sound / name)), draw


def test_the_run_is_sound_before(bench: Bench):
    found = bench.inspect()
    assert (found.damage, found.unvouched) == ([], [])
    assert bench.to_run() == set()


@pytest.mark.parametrize("area", AREAS)
def test_each_file_s_damage_is_found_and_that_part_alone_is_rebuilt(bench: Bench, area: str):
    names = [name for name in bench.names() if name.split("/")[0] == area]
    assert names
    for name in names:
        bench.restore()
        kind, draw = chosen(bench, name)
        bench.damage(name, kind, draw)
        found = bench.inspect()
        assert {each.file for each in found.damage} == {bench.results / name}, f"{name}, {kind}"
        verification.take_away(bench.results, found.damage)
        assert bench.to_run() == rebuilt(name, bench.drafters), f"{name}, {kind}"
        assert bench.inspect().damage == [] or bench.to_run(), f"{name}, {kind}: found again, and nothing mends it"


def test_a_damage_to_bytes_that_have_two_names_is_found_under_both(bench: Bench):
    """A disk's fault lies in the bytes: respond's by-products and the hidden states are the same ones."""
    name = next(name for name in bench.names() if re.match("hidden_states/heldout/.*safetensors", name))
    part, file = Path(name).parent.name, Path(name).name
    twin = f"responses/heldout/{part}.captured/{file}"
    for each in (name, twin):
        bench.damage(each, "flipped", random.Random(SEED))
    found = bench.inspect()
    assert {each.file for each in found.damage} == {bench.results / name, bench.results / twin}
    verification.take_away(bench.results, found.damage)
    assert bench.to_run() == rebuilt(name, bench.drafters)
    assert not list((bench.results / twin).parent.glob("*.safetensors"))


def test_of_several_damages_the_earliest_is_rebuilt_first_so_that_nothing_between_them_runs_again(bench: Bench):
    draw = random.Random(SEED)
    names = ["samples/train/samples.arrow", "samples/fresh/manifest.json", "evaluation/eagle3/served.json"]
    for name in names:
        bench.damage(name, "flipped", draw)
    found = bench.inspect()
    assert {each.file for each in found.damage} == {bench.results / name for name in names}
    verification.take_away(bench.results, found.damage)
    assert bench.to_run() == set.union(*(rebuilt(name, bench.drafters) for name in names[:2]))


def test_a_folder_that_was_given_up_for_room_is_no_damage(bench: Bench):
    shutil.rmtree(bench.results / "hidden_states" / "train")
    for folder in bench.results.glob("responses/*/*.captured"):
        shutil.rmtree(folder)
    assert bench.inspect().damage == []
    assert bench.to_run() == set()
