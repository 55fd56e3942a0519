# SPDX-License-Identifier: Apache-2.0
"""What every script's command line shares: the parser's common options, logging and error display."""

import argparse
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pilotfish.errors import UserError

RUN = "PILOTFISH_RUN"  # set by the workflow: the process id of its Snakemake


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with `--spec` (what the artifact depends on) and `--code` (digest of the code)."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--spec", required=True, help="JSON object with the settings that shape the artifact")
    made.add_argument("--code", default="by-hand", help="digest of the code, recorded in the manifest")
    return made


def path_argument(made: argparse.ArgumentParser, name: str, help: str, many: bool = False) -> None:
    """Add a required option that takes one path, or several."""
    made.add_argument(name, required=True, type=Path, help=help, nargs="+" if many else None)


def heartbeat_argument(made: argparse.ArgumentParser) -> None:
    """Add `--heartbeat`, the file in which a long job says how far it is; none is written without it."""
    made.add_argument("--heartbeat", type=Path, help="JSON file that tells the job's progress to `make status`")


def spec_of(arguments: argparse.Namespace) -> dict:
    """The parsed `--spec`; a UserError when it is not a JSON object."""
    try:
        spec = json.loads(arguments.spec)
    except json.JSONDecodeError as error:
        raise UserError(f"--spec: not valid JSON ({error})") from None
    if not isinstance(spec, dict):
        raise UserError("--spec: a JSON object is needed, in braces")
    return spec


def _end_with_run() -> None:
    """End as on SIGTERM when the Snakemake that started this job has ended, by SIGKILL too."""
    if not (run := os.getenv(RUN)):
        return
    try:
        ended = os.pidfd_open(int(run))
    except ProcessLookupError:
        sys.exit(143)

    def watch() -> None:
        select.select([ended], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def run(main: Callable[[], None]) -> None:
    """Run a script's main: log lines to stderr, a UserError as one message, SIGTERM as a clean exit."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Log lines tell the progress; bars would fill the log files.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    name = Path(sys.argv[0]).stem
    logging.basicConfig(format=f"[{name}] %(message)s", level=logging.INFO, stream=sys.stderr)
    for chatty in ("httpx", "httpx2", "openai"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # SystemExit unwinds the context managers, so engines stop and locks are given back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    _end_with_run()
    try:
        main()
    except UserError as error:
        print(f"\n[{name}] error: {error}\n", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"[{name}] interrupted; what was finished is kept", file=sys.stderr)
        sys.exit(130)
