# SPDX-License-Identifier: Apache-2.0
"""Markdown that reads well as plain text too."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table, padded to read well as plain text; columns after the first `left` are right-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = [("-" * width) if column < left else ("-" * (width - 1) + ":") for column, width in enumerate(widths)]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]
