# SPDX-License-Identifier: Apache-2.0
"""A vLLM server that lives inside one job: started, watched, and stopped whatever happens."""

import contextlib
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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx

from pilotfish import causes, files
from pilotfish.errors import UserError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

HOST = "127.0.0.1"
PYTHON = sys.executable
SERVED_NAME = "target"
POLL_SECONDS = 0.25
HEALTH_TIMEOUT = 2  # seconds
TAIL_LINES = 30
STOP_SECONDS = 20  # between SIGTERM and SIGKILL
KILL_SECONDS = 10  # that the warden may take besides
SCRIPTS = Path(__file__).resolve().parent.parent
WARDEN = SCRIPTS / "pilotfish" / "warden.py"
FOREIGN = "stop the process that took the port, or leave engine.port out to take a free one"
FEW_CORES = 4
INTEL_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
# What a start goes through once vLLM has written its view, as patterns of its log lines. An engine that does not
# compile goes from the weights to "init engine".
MILESTONES = (
    ("weights", re.compile(r"Loading weights took|Model loading took")),
    ("compile", re.compile(r"init engine .* took|Graph capturing finished")),
)
DONE = {"process": "process up", "weights": "weights loaded", "compile": "KV cache and kernels ready", "ready": "ready"}
STAGES = ("process", *(name for name, _ in MILESTONES), "ready")  # each with its limit in engine.start_timeouts


class EngineLost(UserError):
    """An engine that was ready has died, hangs, or answers no more: another may go on with what is unfinished."""


def start_limit(options: dict) -> float:
    """Seconds that the start of an engine may take, all of its stages together."""
    return sum(options["start_timeouts"][stage] for stage in STAGES)


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

    Entering returns when the server answers, or raises UserError with the last log lines within a second of its
    death, or when a stage of its start takes longer than engine.start_timeouts allows. Leaving stops it with all
    its processes; `pilotfish.warden` does so when this process is killed. The log of the start before is kept as
    `*.previous.log`.
    """

    def __init__(self, line: Sequence[str], options: dict, log: Path):
        self.line = list(line)
        self.options = options
        self.log = log
        self.port = 0
        self.process: subprocess.Popen | None = None  # the warden
        self._group = 0  # the server's process group
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
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".previous.log"))
        command = [PYTHON, "-P", str(WARDEN), str(STOP_SECONDS)]
        command += [sys.executable, "-m", "pilotfish.launch", str(self._view.resolve())]
        command += [*self.line, "--served-model-name", SERVED_NAME, self.mark]
        command += ["--host", HOST, "--port", str(self.port)]
        logger.info("starting vLLM on %s:%d, log in %s", HOST, self.port, self.log)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        try:
            self._group = int(self.process.stdout.readline() or 0)
            self._wait_until_ready()
            self._check_identity()
        except BaseException as error:
            self.stop()
            if isinstance(error, EngineLost):  # another start would fail as this one did
                raise UserError(str(error)) from None
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
        begun = since = time.monotonic()
        stages = list(STAGES)
        while stages:
            self.check_alive()
            now = time.monotonic()
            reached = self._reached()
            while stages and stages[0] in reached:
                logger.info("engine: %s (%.0f s)", DONE[stages.pop(0)], now - begun)
                since = now
            if stages and now - since > (limit := self.options["start_timeouts"][stages[0]]):
                raise UserError(
                    f"the engine is not past the stage {stages[0]!r} of its start after engine.start_timeouts."
                    f"{stages[0]} = {limit} s (before it: {', '.join(STAGES[: -len(stages)]) or 'nothing'}); raise the "
                    f"limit if it only wants more time. Last lines of {self.log}:\n{self.tail()}"
                )
            if stages:
                time.sleep(POLL_SECONDS)

    def _reached(self) -> set[str]:
        """The stages of the start that lie behind; who has a later one behind has the earlier ones too."""
        text = self._text()
        last = 1 if self._view.is_file() else 0
        last = max(last, *(n for n, (_, pattern) in enumerate(MILESTONES, 2) if pattern.search(text)), 0)
        return set(STAGES if self.answers() else STAGES[:last])

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

    def answers(self) -> bool:
        """Whether the server says that it is well, within HEALTH_TIMEOUT seconds."""
        try:
            return httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT).status_code == 200
        except httpx.HTTPError:
            return False

    def check_alive(self) -> None:
        """Raise EngineLost with exit status, likely cause and the last log lines when the server has ended."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            cause = causes.likely(status, self._text())
            raise EngineLost(
                f"the engine ended with exit status {status}{cause and f'; likely cause: {cause}'}. "
                f"Last {TAIL_LINES} lines of {self.log}:\n{self.tail()}"
            )

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """The last lines of the engine's log."""
        return "\n".join(f"  | {line}" for line in self._text().splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """Have the warden end the server and all its processes; do so here if the warden itself is gone."""
        if self.process is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the engine (process group %d) outlived its warden's patience", self._group)
            self.process.kill()
            self.process.wait()
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self.process.stdout.close()
        self.process = None


def restarting(times: int, attempt: Callable[[], Result]) -> Result:
    """The result of `attempt`, which starts engines of its own; made again when one is lost, at most `times` times.

    Work that an attempt finished must be on disk, so that the next does not repeat it.
    """
    for left in range(times, -1, -1):
        try:
            return attempt()
        except EngineLost as error:
            if not left:
                raise
            logger.warning(
                "%s\nwhat is finished is kept; another engine is started (%d restarts left)", error, left - 1
            )
    raise AssertionError("unreachable")
