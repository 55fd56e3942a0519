# SPDX-License-Identifier: Apache-2.0
"""Digests of what a rule depends on: the code its script can reach, and its spec."""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path


def spec_json(spec: dict | list) -> str:
    """Canonical JSON of a spec: sorted keys, no spaces, so equal specs are equal strings."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def code_digest(script: Path) -> str:
    """sha256 over the script and every `pilotfish` module that it imports, directly or not.

    Comments, docstrings and layout do not count: each file enters as its syntax tree without them, so
    that a comment reruns nothing and a helper's fix reruns exactly the rules that can reach the helper.
    """
    closure = _closure(script.resolve())
    lines = [f"{path.relative_to(script.resolve().parent)} {_file_digest(path)}" for path in sorted(closure)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _closure(script: Path) -> set[Path]:
    seen: set[Path] = set()
    queue = [script]
    while queue:
        path = queue.pop()
        if path not in seen:
            seen.add(path)
            queue.extend(_imported_files(path, script.parent))
    return seen


@cache
def _imported_files(path: Path, scripts: Path) -> tuple[Path, ...]:
    """Files below the folder `scripts` that the file imports; other packages are pinned by the environment."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            raise ValueError(f"{path}: relative imports are not followed; write `from pilotfish import ...`")
        elif isinstance(node, ast.Constant) and str(node.value).startswith("pilotfish."):
            # The engine imports the KV connector by name, not by an import statement.
            names.add(node.value)
    files = []
    for name in names:
        file = scripts / (name.replace(".", "/") + ".py")
        if name.split(".")[0] == "pilotfish" and file.is_file():
            files.append(file)
    return tuple(sorted(files))


@cache
def _file_digest(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
