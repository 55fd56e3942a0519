# SPDX-License-Identifier: Apache-2.0
"""Digests of what a rule depends on: the code its script can reach, and its spec."""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent


def spec_json(spec: dict) -> str:
    """Canonical JSON of a spec: sorted keys, no spaces, so equal specs are equal strings."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def work_key(spec: str, code: str) -> str:
    """Name of a job's folder of unfinished work: 16 hex digits of spec and code together."""
    return hashlib.sha256(f"{spec}\n{code}".encode()).hexdigest()[:16]


def code_digest(script: Path) -> str:
    """sha256 over the script and every `pilotfish` module that it imports, directly or not.

    Comments, docstrings and layout do not count: each file enters as its syntax tree without them, so
    that a comment reruns nothing and a helper's fix reruns exactly the rules that can reach the helper.
    """
    closure = _closure(script.resolve())
    lines = [f"{path.relative_to(SCRIPTS)} {_file_digest(path)}" for path in sorted(closure)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _closure(script: Path) -> set[Path]:
    seen: set[Path] = set()
    queue = [script]
    while queue:
        path = queue.pop()
        if path not in seen:
            seen.add(path)
            queue.extend(_imported_files(path))
    return seen


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _imported_files(path: Path) -> tuple[Path, ...]:
    """Files below `scripts/` that the file imports; other packages are pinned by the environment."""
    names: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            raise ValueError(f"{path}: relative imports are not followed; write `from pilotfish import ...`")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # The engine imports the KV connector by name, not by an import statement.
            if node.value.startswith("pilotfish."):
                names.add(node.value)
    files = []
    for name in names:
        file = SCRIPTS / (name.replace(".", "/") + ".py")
        if name.split(".")[0] == "pilotfish" and file.is_file():
            files.append(file)
    return tuple(sorted(files))


@cache
def _file_digest(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
