# SPDX-License-Identifier: Apache-2.0
"""Room on the disk."""

import pytest

from pilotfish import disk
from pilotfish.errors import UserError


def test_free_bytes_are_told_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert disk.free_bytes(tmp_path / "results" / "run" / "file") > 0


def test_there_is_room_down_to_the_reserve_and_not_below(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda path: disk.RESERVE + 100)
    disk.check_room(tmp_path, 100)
    with pytest.raises(UserError):
        disk.check_room(tmp_path, 101)


def test_the_refusal_names_the_path_the_numbers_and_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda path: 7_000_000_000)
    with pytest.raises(UserError, match=r"828 GB .* 1\.1 GB .* 7\.0 GB are free.*finished work is kept") as refused:
        disk.check_room(tmp_path / "states", 828_000_000_000)
    assert str(tmp_path / "states") in str(refused.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (4_200_000, "4.2 MB"), (828e9, "828 GB"), (999_999_999, "1.0 GB"),
     (124e12, "124 TB"), (3e18, "3000 PB")],
)  # fmt: skip
def test_amounts_read_as_people_write_them(count, text):
    assert disk.amount(count) == text
