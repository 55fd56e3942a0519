# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node on this machine's loopback, with three devices that stand in for GPUs; and runs through it.

python tests/slurm.py FOLDER    the whole tiny run, every job of it through Slurm

Debian's `slurm-wlm` and `munge` are all that it takes. No accounting, no cgroups: a container can run it.
"""

import contextlib
import getpass
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from conftest import REPOSITORY, copy_workflow

DAEMONS = ("munged", "slurmctld", "slurmd")
SEARCH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
NODE = platform.node().partition(".")[0]
GPUS = ("/dev/null", "/dev/zero", "/dev/full")  # what matters is that Slurm counts them and sets CUDA_VISIBLE_DEVICES
START = 60  # seconds in which the node must be ready
POLL_SECONDS = 0.2
# Every rule's threads and memory fit, several jobs at once, whatever this machine has.
NODES = "CPUs=32 RealMemory=1000000"

CONFIG = """\
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=10
NodeName={node} NodeAddr=127.0.0.1 Gres=gpu:{gpus} {size} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""


def missing() -> list[str]:
    """The daemons that are not installed."""
    return [name for name in DAEMONS if not shutil.which(name, path=SEARCH)]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm with all that it writes in `folder`; yields what a process must have in its environment to use it.

    RuntimeError if Slurm is not installed or does not get ready.
    """
    if lacking := missing():
        raise RuntimeError(f"{', '.join(lacking)} not found: apt-get install slurm-wlm munge")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    _write_configuration(folder)
    environment = {
        **os.environ,
        "PATH": f"{_srun(folder, shutil.which('srun')).parent}{os.pathsep}{SEARCH}",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    with contextlib.ExitStack() as held:
        held.enter_context(_daemon(folder, environment, *_munged(folder)))
        held.enter_context(_daemon(folder, environment, "slurmctld", "-D", "-c"))
        held.enter_context(_daemon(folder, environment, "slurmd", "-D", "-N", NODE))
        _wait_for_node(folder, environment)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=environment, check=False)
            _wait_for_jobs(environment)


def _write_configuration(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    controller, daemon = _free_ports(2)
    text = CONFIG.format(
        node=NODE, folder=folder, user=getpass.getuser(), controller=controller, daemon=daemon, gpus=len(GPUS),
        size=NODES,
    )  # fmt: skip
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    gres = "".join(f"NodeName={NODE} Name=gpu File={device}\n" for device in GPUS)
    (folder / "gres.conf").write_text(gres, encoding="utf-8")


def _srun(folder: Path, real: str) -> Path:
    """`srun` that knows our configuration: the plugin takes SLURM_CONF, as all SLURM_*, out of its environment."""
    path = folder / "bin" / "srun"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {real} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _munged(folder: Path) -> list[str]:
    paths = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    # `--force`, since the folder is nobody else's to enter.
    return ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in paths.items())]


@contextlib.contextmanager
def _daemon(folder: Path, environment: dict[str, str], *line: str) -> Iterator[None]:
    with open(folder / f"{line[0]}.out", "wb") as out:
        process = subprocess.Popen(line, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def _wait_for_node(folder: Path, environment: dict[str, str]) -> None:
    until = time.monotonic() + START
    while True:
        asked = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if asked.stdout.strip() == "idle":
            return
        if time.monotonic() > until:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"Slurm is not ready after {START} s: {asked.stdout}{asked.stderr}\n{logs}")
        time.sleep(POLL_SECONDS)


def _wait_for_jobs(environment: dict[str, str]) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until and jobs(environment):
        time.sleep(POLL_SECONDS)


def jobs(environment: dict[str, str]) -> dict[str, str]:
    """The comment, which names rule and wildcards, of each Slurm job that has not ended, by its number."""
    line = ["squeue", "-h", "-o", "%i %k"]
    asked = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    return dict(job.split(" ", 1) for job in asked.stdout.splitlines())


def python_of(cluster: str) -> str:
    """The interpreter of `.venv-slurm` or `.venv-kubernetes`, which is set up if it is not yet."""
    subprocess.run(["bash", "envs/setup.sh", cluster], cwd=REPOSITORY, check=True)
    return str(REPOSITORY / f".venv-{cluster}" / "bin" / "python")


def line(*arguments: str) -> list[str]:
    """Snakemake on the tiny configuration as a user starts it on a cluster, but that it asks for news more often."""
    often = ["--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5"]
    config = ["--profile", "profiles/slurm", "--configfile", "config/tiny.yaml"]
    return [python_of("slurm"), "-m", "snakemake", *arguments, *config, *often]


def main() -> int:
    from tiny_target import build_tiny_target

    folder = Path(sys.argv[1])
    root = copy_workflow(folder / "work")
    build_tiny_target(root / "results" / "tiny-target")
    begun = time.monotonic()
    with running(folder / "slurm") as environment:
        ran = subprocess.run(line(), cwd=root, env=environment)
    print(f"exit status {ran.returncode} after {time.monotonic() - begun:.0f} s, in {root}")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
