# SPDX-License-Identifier: Apache-2.0
"""The library behind the workflow's scripts; knows nothing of Snakemake or argparse."""
