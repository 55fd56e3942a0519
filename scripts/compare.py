# SPDX-License-Identifier: Apache-2.0
"""Two or more runs side by side: settings that differ, data, tau, speed, the gates' figures, cost; read from disk.

python scripts/compare.py RUN RUN [RUN ...]
"""

import argparse
from pathlib import Path

from pilotfish import cli, comparing


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="*", metavar="RUN", help="names of runs, two or more")
    print(comparing.compose(Path(), made.parse_args().runs), end="")


if __name__ == "__main__":
    cli.run(main)
