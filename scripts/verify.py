# SPDX-License-Identifier: Apache-2.0
"""Read every byte of a run again, say what is damaged, and take it away so that the next run rebuilds just that.

python scripts/verify.py --spec '{}' --results results/default
"""

import logging
from pathlib import Path

from pilotfish import cli, verification
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--results", "the run's results")
    made.add_argument("--manifests", type=Path, nargs="*", default=[], help="those that a finished run has")
    arguments = made.parse_args()
    found = verification.inspect(arguments.results, arguments.manifests)
    logging.info("%d files, %.1f MB read and sound", found.sound, found.bytes_read / 1e6)
    if found.unvouched:
        logging.info("no manifest vouches for: %s", ", ".join(found.unvouched))
    if found.damage:
        verification.take_away(arguments.results, found.damage)
        lines = "\n".join(f"  {each.file}: {each.fault}" for each in found.damage)
        raise UserError(
            f"{arguments.results}: {len(found.damage)} file(s) damaged or lost:\n{lines}\n"
            "They and their manifests were removed: the next run rebuilds just them, and the one after it what then "
            "differs"
        )


if __name__ == "__main__":
    cli.run(main)
