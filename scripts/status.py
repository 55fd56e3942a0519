# SPDX-License-Identifier: Apache-2.0
"""What runs are doing, on one page read from disk alone, so that it works beside the run and on another node.

python scripts/status.py [RUN ...] [--watch]
"""

import argparse
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pilotfish import cli, status, status_page

REDRAW = 2  # seconds
PIPE_WIDTH = 80  # columns, where no terminal says


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="*", metavar="RUN", help="names of runs; all that there are without")
    made.add_argument("--watch", action="store_true", help=f"draw the page anew every {REDRAW} s, until Ctrl-C")
    arguments = made.parse_args()
    root = Path()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)

    def page():
        return status_page.page(root, arguments.runs or status.runs(root), time.time())

    if not arguments.watch:
        console.print(page())
        return
    with suppress(KeyboardInterrupt), Live(page(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REDRAW)
            live.update(page(), refresh=True)


if __name__ == "__main__":
    cli.run(main)
