# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run.

python scripts/report.py --help
"""

from pilotfish import cli, files, report


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--results", "the run's results")
    cli.path_argument(made, "--benchmarks", "Snakemake's benchmarks of the run")
    cli.path_argument(made, "--output", "Markdown to write")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    text = report.compose(arguments.results, arguments.benchmarks, spec["run"], spec["evaluated"], spec["sets"])
    files.write_text(arguments.output, text)


if __name__ == "__main__":
    cli.run(main)
