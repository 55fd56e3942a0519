#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Snakemake runs this in the new conda environment, from the working directory.
set -euo pipefail
python -m pip install --no-deps -r envs/gpu.txt
python envs/check.py envs/gpu.txt
