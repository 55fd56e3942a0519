# SPDX-License-Identifier: Apache-2.0
"""A server is started as the specification demands, its death is told at once, and nothing outlives the job."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import executable
from pilotfish import engine
from pilotfish.errors import UserError

OPTIONS = {
    "max_model_len": 4096,
    "dtype": "bfloat16",
    "tensor_parallel": 2,
    "max_num_seqs": 7,
    "enforce_eager": True,
    "kv_cache_gib": 3,
    "gpu_memory_utilization": 0.8,
    "port": None,
    "start_timeouts": dict.fromkeys(engine.STAGES, 60),
    "extra_args": ["--seed", "1"],
}

PATIENCE = 20  # seconds until a test fails that would otherwise hang

# Answers /health and /v1/models, and writes a view; it and its child keep the pipe open while they live. Neither
# heeds SIGTERM if STUBBORN. Without names of its own it answers to those that it was told.
SERVER = """
import http.server, json, os, signal, sys
if STUBBORN:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pipe = open(PIPE, "w")
print("up", file=pipe, flush=True)
if CHILD and os.fork() == 0:
    signal.pause()
    os._exit(0)
told = sys.argv[sys.argv.index("--served-model-name") + 1:][:2]
cards = MODELS or {"data": [{"id": name, "root": "m"} for name in told]}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(HEALTH)
        self.end_headers()
        self.wfile.write(json.dumps(cards).encode())
with open(sys.argv[3], "w") as view:
    json.dump({"told": told}, view)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeServer:
    """Scripts that are started in vLLM's place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.log = folder / "logs" / "engine.log"
        self.pipe = folder / "pipe"

    def running(self, code: str, **options) -> engine.Engine:
        self.monkeypatch.setattr(sys, "executable", executable(self.folder / "server", code))
        return engine.Engine(["--model", "m"], {**OPTIONS, **options}, self.log)

    def healthy(self, stubborn=False, health=200, child=True, models=None, **options) -> engine.Engine:
        os.mkfifo(self.pipe)
        self.reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        settings = f"STUBBORN, HEALTH, CHILD, PIPE = {stubborn}, {health}, {child}, {str(self.pipe)!r}\n"
        return self.running(f"{settings}MODELS = {models!r}\n{SERVER}", **options)

    def said(self) -> bytes:
        """What comes through the pipe next; nothing when the last process that held it has ended."""
        assert select.select([self.reader], [], [], PATIENCE)[0], f"nothing in {PATIENCE} s"
        return os.read(self.reader, 100)

    def wait_until_up(self) -> None:
        assert self.said() == b"up\n"

    def all_are_gone(self) -> bool:
        return b"".join(iter(self.said, b"")) in (b"", b"up\n")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    return FakeServer(tmp_path, monkeypatch)


@pytest.fixture
def taken():
    """A port that another process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_is_an_error_with_its_number_and_a_cure(taken: int):
    with pytest.raises(UserError, match=f"port {taken} is in use .* leave engine.port out"):
        engine.free_port(taken)


def test_the_wanted_port_is_given_once_it_is_free():
    wanted = engine.free_port(None)
    assert wanted > 1023
    assert engine.free_port(wanted) == wanted


def test_a_taken_port_stops_the_start_before_a_server_is_run(fake: FakeServer, taken: int):
    with pytest.raises(UserError, match=f"port {taken}"), fake.running("raise SystemExit", port=taken):
        pass
    assert not fake.log.exists()


def test_a_server_that_dies_at_start_is_an_error_with_the_end_of_its_log(fake: FakeServer):
    server = fake.running("for n in range(1, 41): print('line', n)\nraise SystemExit(3)")
    with pytest.raises(UserError, match="exit status 3") as raised, server:
        pass
    assert [line for line in str(raised.value).splitlines() if line.startswith("  |")] == [
        f"  | line {n}" for n in range(11, 41)
    ]
    assert str(fake.log) in str(raised.value)
    assert server.process is None


def test_a_server_is_run_on_loopback_offline_and_with_the_projects_modules(fake: FakeServer):
    code = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\nraise SystemExit(1)"
    with pytest.raises(UserError), fake.running(code):
        pass
    line, environment = json.loads(fake.log.read_text())
    given = values_of(line)
    assert line[:3] == ["-m", "pilotfish.launch", str(fake.log.with_suffix(".view.json"))]
    names = line[line.index("--served-model-name") + 1 :][:2]
    assert names[0] == engine.SERVED_NAME != names[1]
    assert given["--host"] == "127.0.0.1"
    assert given["--model"] == "m"
    assert int(given["--port"]) > 1023
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(engine.SCRIPTS)


def test_a_server_that_answers_is_entered_and_its_whole_group_is_stopped(fake: FakeServer):
    with fake.healthy() as server:
        server.check_alive()
        assert server.url == f"http://127.0.0.1:{server.port}"
    assert fake.all_are_gone()


def test_a_server_tells_its_own_view_and_not_that_of_an_earlier_start(fake: FakeServer):
    server = fake.healthy()
    fake.log.parent.mkdir(parents=True)
    fake.log.with_suffix(".view.json").write_text('{"told": "of an earlier start"}')
    with server:
        assert server.view() == {"told": [engine.SERVED_NAME, server.mark]}


def cards_of(root: str, name: str) -> dict:
    return {"data": [{"id": name, "root": root}]}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (cards_of("another/model", "target"), r"a server for \['another/model'\] answers, not for 'm'"),
        (cards_of("m", "target"), r"another job's server answers \(as \['target'\]\)"),
        ({"hello": "world"}, "what answers there is no vLLM server"),
        ([1], "what answers there is no vLLM server"),
    ],
    ids=["another model", "another job", "another kind", "not even an object"],
)
def test_a_server_that_is_not_the_jobs_own_is_refused_and_stopped(fake: FakeServer, models: object, said: str):
    with (
        pytest.raises(UserError, match=rf"http://127.0.0.1:\d+: {said}.*; stop the process"),
        fake.healthy(models=models),
    ):
        pass
    assert fake.all_are_gone()


def test_what_ignores_the_polite_signal_is_killed(fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "STOP_SECONDS", 0.1)
    with fake.healthy(stubborn=True):
        pass
    assert fake.all_are_gone()


def test_the_servers_end_leaves_no_child_behind(fake: FakeServer):
    with pytest.raises(UserError, match="exit status -9"), fake.healthy() as server:
        server.process.kill()
        server.process.wait()
        server.check_alive()
    assert fake.all_are_gone()


def test_a_fault_of_the_job_stops_the_server(fake: FakeServer):
    with pytest.raises(KeyboardInterrupt), fake.healthy():
        raise KeyboardInterrupt
    assert fake.all_are_gone()


def test_a_server_that_does_not_get_ready_in_time_is_stopped(fake: FakeServer):
    server = fake.healthy(health=503, start_timeouts={**OPTIONS["start_timeouts"], "weights": 0})
    answers, first = server.answers, iter([fake.wait_until_up])  # so that there is something to stop
    server.answers = lambda: next(first, lambda: None)() or answers()
    with (
        pytest.raises(UserError, match=r"not past the stage 'weights'.* engine\.start_timeouts\.weights = 0 s"),
        server,
    ):
        pass
    assert fake.all_are_gone()


def test_what_the_server_forked_is_stopped_when_the_server_itself_is_killed(fake: FakeServer):
    with pytest.raises(engine.EngineLost, match="exit status -9; likely cause: killed from outside"):
        with fake.healthy() as server:
            os.kill(server._group, signal.SIGKILL)
            server.process.wait()
            server.check_alive()
    assert fake.all_are_gone()


def test_a_stopped_server_is_ended_too(fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "STOP_SECONDS", 0.1)
    with fake.healthy() as server:
        os.killpg(server._group, signal.SIGSTOP)
    assert fake.all_are_gone()


@pytest.mark.parametrize("stubborn", [False, True])
def test_the_server_and_its_children_end_if_the_job_is_killed(fake: FakeServer, stubborn: bool):
    python = sys.executable
    server = fake.healthy(stubborn=stubborn)
    job = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pilotfish import engine\n"
        "from pilotfish.engine import Engine\n"
        "engine.STOP_SECONDS = 0.1\n"
        f"sys.executable = {sys.executable!r}\n"
        f"with Engine(['--model', 'm'], {server.options!r}, Path({str(server.log)!r})):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(engine.SCRIPTS)}
    killed = subprocess.run([python, "-c", job], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert fake.all_are_gone()


def parsed(line: list[str], flag: str) -> dict:
    return json.loads(line[line.index(flag) + 1])


def values_of(line: list[str]) -> dict[str, str]:
    """Each flag with the word behind it."""
    return {flag: value for flag, value in zip(line, [*line[1:], ""], strict=True) if flag.startswith("--")}


def line_of(**changes) -> list[str]:
    asked = {"model": Path("some/model"), "trust_remote_code": False, "capture": False}
    options = OPTIONS | {key: value for key, value in changes.items() if key not in asked}
    return engine.arguments(options, **(asked | {key: changes[key] for key in asked if key in changes}))


def test_the_engine_settings_reach_the_command_line():
    given = values_of(line_of())
    assert given["--model"] == "some/model"
    assert given["--dtype"] == "bfloat16"
    assert given["--max-model-len"] == "4096"
    assert given["--max-num-seqs"] == "7"
    assert given["--tensor-parallel-size"] == "2"
    assert given["--gpu-memory-utilization"] == "0.8"
    assert given["--seed"] == "1"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"enforce_eager": True}, "--enforce-eager"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
        ({"capture": True}, "--no-enable-prefix-caching"),
        ({"capture": True}, "--no-enable-chunked-prefill"),
    ],
)
def test_a_flag_is_given_when_it_is_asked_for_and_only_then(changes: dict, flag: str):
    assert flag in line_of(**changes)
    assert flag not in line_of(**dict.fromkeys(changes, False))


@pytest.mark.parametrize(("longest", "batch"), [(100, "2048"), (5000, "5000")])
def test_a_prompt_that_is_not_chunked_fits_the_batch(longest: int, batch: str):
    given = values_of(line_of(capture=True, max_model_len=longest))
    assert given["--max-num-batched-tokens"] == batch


@pytest.mark.parametrize("flag", ["enable-prefix-caching", "enable-chunked-prefill"])
def test_no_extra_argument_can_turn_caching_on_while_capturing(flag: str):
    line = line_of(capture=True, extra_args=[f"--{flag}"])
    assert [word for word in line if flag in word][-1] == f"--no-{flag}"


def test_capture_asks_for_the_layers_by_h_k_number_and_for_files_in_the_folder(tmp_path: Path):
    line = engine.capture_arguments([2, 15, 27, 30], tmp_path / "x" / ".." / "incoming")
    assert parsed(line, "--speculative-config") == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}},
    }
    transfer = parsed(line, "--kv-transfer-config")
    assert transfer["kv_connector"] == "ShardCaptureConnector"
    assert transfer["kv_connector_module_path"] == "pilotfish.capture"
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path / "incoming")
    assert transfer["kv_connector_extra_config"]["use_synchronization_lock"] is False


def test_a_drafter_is_served_with_its_rounds_reported_in_each_answer():
    line = engine.drafter_arguments(Path("export/eagle3"), 3)
    assert parsed(line, "--speculative-config") == {"model": "export/eagle3", "num_speculative_tokens": 3}
    assert values_of(line)["--per-request-spec-decode-metrics"] == "detailed"


def test_the_log_of_the_start_before_is_kept(fake: FakeServer):
    server = fake.running("import os\nprint(os.getpid())\nraise SystemExit(1)")
    said = []
    for _ in range(2):
        with pytest.raises(UserError), server:
            pass
        said.append(fake.log.read_text())
    assert [fake.log.with_suffix(".previous.log").read_text(), fake.log.read_text()] == said
    assert said[0] != said[1]


def test_a_lost_engine_is_replaced_a_bounded_number_of_times():
    made: list[int] = []

    def attempt() -> str:
        made.append(len(made))
        if len(made) < 3:
            raise engine.EngineLost("it died")
        return "done"

    assert engine.restarting(2, attempt) == "done"
    made.clear()
    with pytest.raises(engine.EngineLost, match="it died"):
        engine.restarting(1, attempt)
    assert len(made) == 2


def test_an_engine_that_does_not_start_is_not_started_again(fake: FakeServer):
    made: list[engine.Engine] = []

    def attempt() -> None:
        made.append(fake.running("raise SystemExit(3)"))
        with made[-1]:
            pass

    with pytest.raises(UserError, match="exit status 3"):
        engine.restarting(2, attempt)
    assert len(made) == 1
