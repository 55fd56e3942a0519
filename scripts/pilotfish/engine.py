# SPDX-License-Identifier: Apache-2.0
"""A vLLM server that lives inside one job: started, watched, and stopped whatever happens."""

import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from pilotfish import files
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
PYTHON = sys.executable
SERVED_NAME = "target"
POLL_SECONDS = 0.25
TAIL_LINES = 30
STOP_SECONDS = 20  # between SIGTERM and SIGKILL
SCRIPTS = Path(__file__).resolve().parent.parent
# Runs before the server, in its process: ask the kernel for SIGTERM when the job dies, then become it.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]): sys.exit("the job died first")
os.execv(sys.argv[2], sys.argv[2:])
"""
FOREIGN = "stop the process that took the port, or leave engine.port out to take a free one"
FEW_CORES = 4
INTEL_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
# What a start goes through, as patterns of vLLM's log lines.
MILESTONES = (
    ("weights loaded", re.compile(r"Loading weights took|Model loading took")),
    ("compiled", re.compile(r"torch\.compile took|Graph capturing finished|Warming up model")),
    ("KV cache ready", re.compile(r"GPU KV cache size|CPU KV cache|KV cache size")),
)


def free_port(wanted: int | None) -> int:
    """The wanted port if nothing listens on it, else UserError; without a wish, one that is free now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise UserError(
                f"engine.port: port {wanted} is in use by another process ({error.strerror}); stop that process, "
                "choose another port, or leave engine.port out to take a free one"
            ) from None
        return probe.getsockname()[1]


def arguments(
    options: dict, *, model: Path, trust_remote_code: bool, capture: bool, reasoning_parser: str | None = None
) -> list[str]:
    """vLLM's command line for `engine` settings; capture needs prefix caching and chunked prefill off."""
    # The user's own come first: of two that contradict each other vLLM takes the last.
    line = [*options["extra_args"], "--model", str(model)]
    line += ["--dtype", options["dtype"]]
    line += ["--max-model-len", str(options["max_model_len"]), "--max-num-seqs", str(options["max_num_seqs"])]
    line += ["--tensor-parallel-size", str(options["tensor_parallel"])]
    line += ["--gpu-memory-utilization", str(options["gpu_memory_utilization"])]
    line += ["--disable-uvicorn-access-log"]
    if options["enforce_eager"]:
        line += ["--enforce-eager"]
    if trust_remote_code:
        line += ["--trust-remote-code"]
    if reasoning_parser:
        line += ["--reasoning-parser", reasoning_parser]
    if capture:
        # A cached prefix is not recomputed, so fewer states than tokens would come back.
        line += ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
        line += ["--max-num-batched-tokens", str(max(2048, options["max_model_len"]))]
    return line


def capture_arguments(layers: Sequence[int], folder: Path) -> list[str]:
    """Command line that makes vLLM write the h(k) states of `layers` into `folder`, one file a request."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ShardCaptureConnector",
        "kv_connector_module_path": "pilotfish.capture",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder.resolve()),
            "use_synchronization_lock": False,
        },
    }
    return ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]


def drafter_arguments(drafter: Path, speculative_tokens: int) -> list[str]:
    """Command line that serves with a drafter, and reports each round of each request."""
    speculative = {"model": str(drafter), "num_speculative_tokens": speculative_tokens}
    return [
        "--speculative-config",
        json.dumps(speculative),
        "--per-request-spec-decode-metrics",
        "detailed",
    ]


class Engine:
    """Context manager around one vLLM server on loopback.

    Entering returns when the server answers, or raises UserError with the last log lines within a second
    of its death. Leaving stops its whole process group; the kernel stops it if this process is killed.
    """

    def __init__(self, line: Sequence[str], options: dict, log: Path):
        self.line = list(line)
        self.options = options
        self.log = log
        self.port = 0
        self.process: subprocess.Popen | None = None
        # A second name for the model, which no other server can know.
        self.mark = f"{SERVED_NAME}-{secrets.token_hex(8)}"
        self._view = log.with_suffix(".view.json")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> "Engine":
        self.port = free_port(self.options["port"])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._view.unlink(missing_ok=True)
        command = [PYTHON, "-c", DIE_WITH_PARENT, str(os.getpid())]
        command += [sys.executable, "-m", "pilotfish.launch", str(self._view.resolve())]
        command += [*self.line, "--served-model-name", SERVED_NAME, self.mark]
        command += ["--host", HOST, "--port", str(self.port)]
        logger.info("starting vLLM on %s:%d, log in %s", HOST, self.port, self.log)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self._check_identity()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _environment(self) -> dict[str, str]:
        # Snakemake exports thread counts; vLLM binds its own threads, and more of them than it has cores
        # make a CPU engine up to 60 times slower.
        environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
        environment |= {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), *filter(None, [os.getenv("PYTHONPATH")])])
        # The model is a folder by now: an engine that asks a hub for anything is at fault.
        environment["HF_HUB_OFFLINE"] = "1"
        if self.options["kv_cache_gib"]:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(self.options["kv_cache_gib"])
        if (os.cpu_count() or 1) <= FEW_CORES:
            # vLLM keeps a core for itself, which on two cores is half of the arithmetic.
            environment.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        if INTEL_OPENMP.is_file():
            # What vLLM advises on a CPU; the CUDA environment does not hold it.
            environment["LD_PRELOAD"] = os.pathsep.join([str(INTEL_OPENMP), *filter(None, [os.getenv("LD_PRELOAD")])])
        return environment

    def _wait_until_ready(self) -> None:
        begun = time.monotonic()
        reached: set[str] = set()
        while True:
            self.check_alive()
            for name in self._milestones() - reached:
                reached.add(name)
                logger.info("engine: %s (%.0f s)", name, time.monotonic() - begun)
            if self._answers():
                logger.info("engine: ready (%.0f s)", time.monotonic() - begun)
                return
            if time.monotonic() - begun > self.options["start_timeout"]:
                raise UserError(
                    f"the engine was not ready after engine.start_timeout = {self.options['start_timeout']} s; "
                    f"reached: {', '.join(sorted(reached)) or 'nothing'}. Last lines of {self.log}:\n{self.tail()}"
                )
            time.sleep(POLL_SECONDS)

    def _check_identity(self) -> None:
        """Raise UserError unless the server that answers is the one started here, with this job's target."""
        asked = self.line[self.line.index("--model") + 1]
        try:
            cards = httpx.get(f"{self.url}/v1/models", timeout=30).raise_for_status().json()["data"]
            roots, names = {card["root"] for card in cards}, {card["id"] for card in cards}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.url}: what answers there is no vLLM server ({error!r}); {FOREIGN}") from None
        if roots != {asked}:
            raise UserError(f"{self.url}: a server for {sorted(roots)} answers, not for {asked!r}; {FOREIGN}")
        if self.mark not in names:
            raise UserError(f"{self.url}: another job's server answers (as {sorted(names)}); {FOREIGN}")

    def view(self) -> dict:
        """What the running engine has resolved for itself, as it wrote it down (see `pilotfish.launch`).

        `target` holds its facts, `drafter` the constants (`pilotfish.constants.read` takes them) and
        `speculative` the method, k and folder; both are None without a drafter.
        """
        return files.read_json(self._view)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _milestones(self) -> set[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return {name for name, pattern in MILESTONES if pattern.search(text)}

    def check_alive(self) -> None:
        """Raise UserError with the last log lines when the server process has ended."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            raise UserError(
                f"the engine ended with exit status {status}. Last {TAIL_LINES} lines of {self.log}:\n{self.tail()}"
            )

    def tail(self) -> str:
        """The last lines of the engine's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL for what is left."""
        if self.process is None:
            return
        group = self.process.pid
        for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5)):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                logger.warning("the engine (process group %d) outlived %s for %d s", group, number.name, patience)
        self.process = None
