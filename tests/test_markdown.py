# SPDX-License-Identifier: Apache-2.0
"""Tables read well as plain text."""

from pilotfish.markdown import table


def test_a_table_is_aligned_as_plain_text():
    assert table(["name", "n"], [["a", 1], ["longer name", 12345]]) == [
        "| name        |     n |",
        "| ----------- | ----: |",
        "| a           |     1 |",
        "| longer name | 12345 |",
    ]


def test_a_table_without_rows_still_has_its_header():
    assert table(["", "x"], []) == ["|     |   x |", "| --- | --: |"]
