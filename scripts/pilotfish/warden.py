# SPDX-License-Identifier: Apache-2.0
"""Run a server that ends with the job, however the job ends: SIGKILL is no exception.

python -P warden.py PATIENCE COMMAND...

The job holds the other end of standard input and the kernel closes it when the job is gone. The server's process
group is printed first; PATIENCE is the seconds between SIGTERM and SIGKILL. The exit status is the server's own.
Standard library alone, since it stays in memory as long as the server does.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

POLL_SECONDS = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    patience, command = float(sys.argv[1]), sys.argv[2:]
    libc, warden, asked = ctypes.CDLL(None), os.getpid(), []
    # What the server's own processes leave behind becomes our child, so that nothing gets away.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in STOP:
        signal.signal(number, lambda number, _: asked.append(number))

    def end_with_warden() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != warden:
            os._exit(1)

    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=end_with_warden
    )
    print(server.pid, flush=True)
    while server.poll() is None and not asked and not _job_is_gone():
        pass
    _stop(server, patience)
    if server.returncode < 0:
        signal.signal(-server.returncode, signal.SIG_DFL) if -server.returncode in STOP else None
        os.kill(warden, -server.returncode)
    sys.exit(server.returncode)


def _job_is_gone() -> bool:
    """Whether standard input has ended; waits POLL_SECONDS for it."""
    try:
        ready = select.select([0], [], [], POLL_SECONDS)[0]
    except InterruptedError:
        return False
    return bool(ready) and not os.read(0, 1)


def _stop(server: subprocess.Popen, patience: float) -> None:
    """End the server, then all that is left of its group, then whoever left the group."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while left := children.read_text().split():
        for child in map(int, left):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
