# SPDX-License-Identifier: Apache-2.0
"""Where a job keeps its unfinished work, so that a rerun of the same work finds it."""

import hashlib
from pathlib import Path


def folder(output: Path, spec: str, code: str) -> Path:
    """`<output>.work/<digest of spec and code>`: undeclared, since Snakemake deletes declared outputs."""
    key = hashlib.sha256(f"{spec}\n{code}".encode()).hexdigest()[:16]
    return output.with_name(f"{output.name}.work") / key
