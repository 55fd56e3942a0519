# SPDX-License-Identifier: Apache-2.0
"""Write the README's generated tables: the gates, from their docstrings, and the fault matrix, from the tests.

PYTHONPATH=scripts:tests python docs/make_tables.py [--check]
"""

import ast
import re
import sys
from pathlib import Path

from faults import FAULTS, FLOW, GROUPS
from test_faults import CLEAN_NOTE  # importing it registers every fault

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
PARTS = re.compile(
    r"Gate of (?P<of>.*?)\n\nChecks: (?P<checks>.*?)\nDoes not check: (?P<not>.*?)\n\npython ", re.DOTALL
)

# What stands in a pattern, and how it is shown; in this order.
SHOWN = (
    (r"\(\.\*\\n\)[+*]|\(\?s:\.\*\)|\(\?s\)|\.[*+]\??|\\S\+", "..."),
    (r"-\?|(\\n|\n) \+|\\n", " "),
    (r"\\d\+?|\[0-9\]\+?", "N"),
)


def gate_parts(name: str) -> dict[str, str]:
    """What a gate's docstring says of it: `of`, `checks` and `not`; ValueError if a part is missing."""
    path = REPOSITORY / "scripts" / f"{name}.py"
    found = PARTS.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    if not found:
        raise ValueError(f"{path}: its docstring needs `Gate of`, `Checks:` and `Does not check:`")
    return {key: " ".join(text.split()) for key, text in found.groupdict().items()}


def gates_table() -> list[str]:
    """One row a gate, in the order of the flow."""
    lines = ["| gate | what it checks | what it does not |", "|---|---|---|"]
    for name in FLOW:
        parts = gate_parts(name)
        lines.append(f"| `{name}`: {parts['of']} | {_cell(parts['checks'])} | {_cell(parts['not'])} |")
    return lines


def faults_table() -> list[str]:
    """One row a fault, in the order of the groups."""
    lines = ["| fault | refused by | with a message like |", "|---|---|---|"]
    for group in GROUPS:
        lines.append(f"| **{group}** | | |")
        for fault in (each for each in FAULTS if each.group == group):
            lines.append(f"| {_cell(fault.name)} | `{fault.gate}` | {_cell(readable(fault.says))} |")
    return [*lines, "", CLEAN_NOTE]


def readable(pattern: str) -> str:
    """A message's pattern as a person would read it: N for a number, ... for anything."""
    text = pattern.removeprefix("^").removesuffix("$")
    for shape, shown in SHOWN:
        text = re.sub(shape, shown, text)
    text = re.sub(r"\\(.)", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"(\s*\.{3,}\s*)+", " ... ", text)).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def fill(readme: str, name: str, lines: list[str]) -> str:
    """The README with the lines between the markers of `name` replaced."""
    start, end = f"<!-- {name}: made by docs/make_tables.py -->", f"<!-- end of {name} -->"
    before, found, rest = readme.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{README}: the markers {start} and {end} are missing")
    return before + start + "\n" + "\n".join(lines) + "\n" + end + after


def main() -> int:
    """Rewrite the README, or with --check only compare; 1 if it was out of date."""
    old = README.read_text(encoding="utf-8")
    new = fill(fill(old, "gates", gates_table()), "faults", faults_table())
    if "--check" not in sys.argv:
        README.write_text(new, encoding="utf-8")
        return 0
    if new != old:
        print("README.md: its tables are out of date; run: make tables", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
