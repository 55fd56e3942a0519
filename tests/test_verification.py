# SPDX-License-Identifier: Apache-2.0
"""A finished run is read again byte by byte, and what is damaged is taken away so that it is remade."""

from pathlib import Path

import pytest

from helpers import captured_folder, flip_bit, random_ids
from pilotfish import files, manifest, repairs, seals, shards, verification
from pilotfish.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two artifacts with their manifests, captured shards, and a report."""
    for name in ("prompts", "samples"):
        (tmp_path / name).mkdir()
        files.write_text(tmp_path / name / "data.jsonl", f'{{"of": "{name}"}}\n')
        manifest.write(
            tmp_path / name / "manifest.json",
            schema=name, paths=[tmp_path / name / "data.jsonl"], spec="{}", code="c", statistics={},
        )  # fmt: skip
    captured_folder(tmp_path / "responses" / "part.captured", {row: random_ids(5, row) for row in range(3)})
    seals.write_markdown(tmp_path / "report.md", "# Report\n")
    return tmp_path


def test_a_sound_run_is_read_whole(run: Path):
    found = verification.inspect(run)
    assert (found.damage, found.sound, found.unvouched) == ([], 3, [])
    shard = next(run.rglob("*.safetensors"))
    assert found.bytes_read == shard.stat().st_size + sum(p.stat().st_size for p in run.rglob("data.jsonl"))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip_bit, "other bytes than manifest.json vouches for"),
        (Path.unlink, "missing"),
        (lambda path: path.write_bytes(b""), "0 bytes where manifest.json says"),
    ],
    ids=["a flipped bit", "lost", "emptied"],
)
def test_damage_is_named_and_taken_away_with_its_manifest_alone(run: Path, damage, fault: str):
    damage(run / "samples" / "data.jsonl")
    found = verification.inspect(run)
    (only,) = found.damage
    assert only.file == run / "samples" / "data.jsonl"
    assert fault in only.fault
    verification.take_away(run, found.damage)
    assert list((run / "samples").iterdir()) == []
    assert len(list((run / "prompts").iterdir())) == 2
    assert repairs.read(run) == ["samples/manifest.json"]


def test_a_damaged_by_product_goes_and_its_index_keeps_the_others(run: Path):
    part = run / "responses" / "part.captured"
    next(part.glob("*.safetensors")).unlink()
    captured_folder(part, {row: random_ids(5, row) for row in range(70)})
    first, second = sorted(path.name for path in part.glob("*.safetensors"))
    flip_bit(part / first)
    found = verification.inspect(run)
    assert [(each.file, each.manifest) for each in found.damage] == [(part / first, part / "index.json")]
    verification.take_away(run, found.damage)
    assert [entry["file"] for entry in files.read_json(part / "index.json")["shards"]] == [second]
    assert verification.inspect(run).damage == []
    assert not (run / repairs.DAMAGED).exists()


@pytest.mark.parametrize("damage", [Path.unlink, flip_bit], ids=["lost", "a flipped bit"])
def test_by_products_whose_index_is_damaged_are_given_up(run: Path, damage):
    index = run / "responses" / "part.captured" / "index.json"
    damage(index)
    found = verification.inspect(run)
    assert [each.file for each in found.damage] == [index]
    verification.take_away(run, found.damage)
    assert list(index.parent.iterdir()) == []


@pytest.mark.parametrize("damage", [flip_bit, lambda path: path.write_bytes(path.read_bytes() + b" ")])
@pytest.mark.parametrize("name", ["report.md", "samples/manifest.json", "states/kept.json"])
def test_an_edit_of_what_nothing_vouches_for_is_seen_by_its_seal(run: Path, name: str, damage):
    seals.write_json(run / "states" / shards.KEPT, {"shards": []})
    assert verification.inspect(run).damage == []
    damage(run / name)
    assert [(each.file, each.manifest) for each in verification.inspect(run).damage] == [(run / name, run / name)]


def test_a_manifest_without_a_seal_is_told_and_what_it_vouches_for_is_still_compared(run: Path):
    path = run / "samples" / "manifest.json"
    files.write_json(path, {name: value for name, value in files.read_json(path).items() if name != seals.SEAL})
    flip_bit(path.parent / "data.jsonl")
    assert [each.file.name for each in verification.inspect(run).damage] == ["manifest.json", "data.jsonl"]


def test_a_lost_manifest_of_a_finished_run_is_damage_and_a_folder_that_is_gone_is_not(run: Path):
    wanted = [run / "samples" / "manifest.json", run / "states" / "manifest.json"]
    wanted[0].unlink()
    assert [each.file for each in verification.inspect(run, wanted).damage] == [wanted[0]]
    (run / "report.md").unlink()  # a run that is under way
    assert verification.inspect(run, wanted).damage == []


def test_a_broken_manifest_is_damage(run: Path):
    (run / "prompts" / "manifest.json").write_text("{", encoding="utf-8")
    (damage,) = verification.inspect(run).damage
    assert damage.file == damage.manifest == run / "prompts" / "manifest.json"


def test_files_that_nothing_vouches_for_are_told(run: Path):
    files.write_text(run / "samples" / "mine.txt", "notes")
    files.write_text(run / "samples" / "data.jsonl.work" / "c0de" / "rows.jsonl", "{}\n")  # unfinished, and no one's
    assert verification.inspect(run).unvouched == ["samples/mine.txt"]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="no manifest in it"):
        verification.inspect(tmp_path)
