# SPDX-License-Identifier: Apache-2.0
"""Write the report of a run.

python scripts/report.py --help
"""

from pilotfish import cli, report, seals


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--results", "the run's results")
    cli.path_argument(made, "--benchmarks", "Snakemake's benchmarks of the run")
    cli.path_argument(made, "--plan", "what the run was planned to cost, JSON; need not be there")
    cli.path_argument(made, "--output", "Markdown to write")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    folders = (arguments.results, arguments.benchmarks, arguments.plan)
    text = report.compose(*folders, spec["run"], spec["evaluated"], spec["sets"])
    seals.write_markdown(arguments.output, text)


if __name__ == "__main__":
    cli.run(main)
