#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Snakemake runs this in the new conda environment, from the working directory.
set -euo pipefail
torch=$(grep "^torch==" envs/cpu.txt)
python -m pip install --no-deps "$torch" ||
    python -m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
python -m pip install --no-deps -r envs/cpu.txt
python envs/check.py envs/cpu.txt
