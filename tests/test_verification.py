# SPDX-License-Identifier: Apache-2.0
"""A finished run is read again byte by byte, and what is damaged is taken away so that it is remade."""

from pathlib import Path

import pytest

from helpers import captured_folder, flip_bit, random_ids
from pilotfish import files, manifest, verification
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
    files.write_text(tmp_path / "report.md", "# Report\n")
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
    assert verification.read_damaged(run) == ["samples/manifest.json"]


def test_a_damaged_shard_takes_its_index_along(run: Path):
    flip_bit(next(run.rglob("*.safetensors")))
    found = verification.inspect(run)
    assert [damage.manifest.name for damage in found.damage] == ["index.json"]
    verification.take_away(run, found.damage)
    assert list((run / "responses" / "part.captured").iterdir()) == []


def test_a_broken_manifest_is_damage(run: Path):
    (run / "prompts" / "manifest.json").write_text("{", encoding="utf-8")
    (damage,) = verification.inspect(run).damage
    assert damage.file == damage.manifest == run / "prompts" / "manifest.json"


def test_files_that_nothing_vouches_for_are_told(run: Path):
    files.write_text(run / "samples" / "mine.txt", "notes")
    assert verification.inspect(run).unvouched == ["samples/mine.txt"]


def test_a_folder_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="no manifest in it"):
        verification.inspect(tmp_path)
