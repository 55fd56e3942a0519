# SPDX-License-Identifier: Apache-2.0
"""A manifest says what was verified, the same everywhere, and notices what changed since."""

import hashlib
from pathlib import Path

import pytest

from pilotfish import files, manifest, seals
from pilotfish.errors import UserError


def write(folder: Path, backwards: bool = False) -> Path:
    """A manifest over two files, one of them in a folder below."""
    data = [folder / "data.jsonl", folder / "part" / "shard.bin"]
    for file in data:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"abc")
    path = folder / "manifest.json"
    manifest.write(
        path,
        schema="samples",
        paths=reversed(data) if backwards else data,
        spec="{}",
        code="c0de",
        statistics={"rows": 3},
        rows={data[0]: 3},
    )
    return path


def test_a_manifest_records_what_the_gate_saw(tmp_path: Path):
    found = manifest.read(write(tmp_path), "samples")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    assert found["files"] == {
        "data.jsonl": {"sha256": sha256, "size": 3, "rows": 3},
        "part/shard.bin": {"sha256": sha256, "size": 3},
    }
    assert (found["spec"], found["code"], found["statistics"]) == ("{}", "c0de", {"rows": 3})


def test_identical_data_give_identical_bytes_wherever_they_lie(tmp_path: Path):
    here, there = write(tmp_path / "here"), write(tmp_path / "there", backwards=True)
    assert here.read_bytes() == there.read_bytes()
    assert str(tmp_path) not in here.read_text(encoding="utf-8")


def test_other_data_of_the_same_size_give_another_manifest(tmp_path: Path):
    before = write(tmp_path).read_bytes()
    (tmp_path / "data.jsonl").write_bytes(b"abd")
    manifest.write(
        tmp_path / "manifest.json",
        schema="samples",
        paths=[tmp_path / "data.jsonl"],
        spec="{}",
        code="c0de",
        statistics={"rows": 3},
    )
    assert (tmp_path / "manifest.json").read_bytes() != before


@pytest.mark.parametrize("name", ["data.jsonl", "part/shard.bin"])
def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path, name: str):
    path = write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{tmp_path / name}: missing, .* delete {path}"):
        manifest.read(path, "samples")


@pytest.mark.parametrize("data", [b"abcd", b"ab", b""])
def test_a_file_of_another_size_is_an_error_that_names_both_sizes(tmp_path: Path, data: bytes):
    path = write(tmp_path)
    (tmp_path / "part/shard.bin").write_bytes(data)
    with pytest.raises(UserError, match=f"shard.bin: {len(data)} bytes where {path} vouches for 3"):
        manifest.read(path, "samples")


def test_a_manifest_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="a 'samples' manifest where 'target' is needed"):
        manifest.read(write(tmp_path), "target")


def test_a_manifest_that_was_edited_is_refused_though_it_reads_well(tmp_path: Path):
    path = write(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"rows": 3', '"rows": 4'), encoding="utf-8")
    with pytest.raises(UserError, match=f"{path}: other bytes than were written .* delete it"):
        manifest.read(path, "samples")


def test_a_manifest_of_an_older_version_has_no_seal_and_is_read(tmp_path: Path):
    path = write(tmp_path)
    kept = {name: value for name, value in files.read_json(path).items() if name != seals.SEAL}
    files.write_json(path, kept)
    assert manifest.read(path, "samples") == kept


def test_a_manifest_that_is_not_there_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(UserError, match=str(tmp_path / "manifest.json")):
        manifest.read(tmp_path / "manifest.json", "target")


def test_a_manifest_never_vouches_for_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        manifest.write(
            tmp_path / "manifest.json", schema="x", paths=[tmp_path / "no"], spec="{}", code="", statistics={}
        )
    assert not list(tmp_path.iterdir())


def test_versions_are_those_of_the_installed_packages_only():
    found = manifest.package_versions(["pytest", "no-such-package-anywhere"])
    assert found == {"pytest": pytest.__version__}


def test_the_manifest_knows_the_versions_that_shape_artifacts(tmp_path: Path):
    assert files.read_json(write(tmp_path))["packages"] == manifest.package_versions()
    assert {"torch", "transformers"} <= set(manifest.package_versions())
