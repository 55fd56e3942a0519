# SPDX-License-Identifier: Apache-2.0
"""The server's own process writes down what the engine has resolved, and then is the usual server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pilotfish import engine, files, launch
from test_constants import config, configs, engine_of, target  # noqa: F401

TARGET = SimpleNamespace(
    model="run/target/model",
    dtype="torch.bfloat16",
    max_model_len=256,
    get_hidden_size=lambda: 64,
    get_total_num_hidden_layers=lambda: 4,
    get_vocab_size=lambda: 200,
)
FACTS = {
    "model": "run/target/model",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "hidden_size": 64,
    "layers": 4,
    "vocab_size": 200,
}


def test_without_a_drafter_the_view_holds_the_targets_facts():
    seen = launch.view(SimpleNamespace(model_config=TARGET, speculative_config=None))
    assert seen == {"target": FACTS, "speculative": None, "drafter": None}


def test_an_engine_that_captures_has_no_drafter():
    speculative = SimpleNamespace(method="extract_hidden_states", num_speculative_tokens=1)
    seen = launch.view(SimpleNamespace(model_config=TARGET, speculative_config=speculative))
    assert seen["drafter"] is None
    assert seen["speculative"] == {"method": "extract_hidden_states", "num_speculative_tokens": 1}


def test_with_a_drafter_the_view_holds_its_constants_and_its_folder(config: dict):  # noqa: F811
    made = engine_of(config)
    made.model_config = TARGET
    made.speculative_config.num_speculative_tokens = 3
    made.speculative_config.model = "run/export/eagle3"
    seen = launch.view(made)
    assert seen["speculative"] == {"method": "eagle3", "num_speculative_tokens": 3, "model": "run/export/eagle3"}
    assert seen["drafter"]["capture_layers"] == (1, 2, 3)
    assert json.dumps(seen)


# Stands for vLLM: the server's module makes the engine's configuration and says what it was told.
ARG_UTILS = """
import os, sys
from types import SimpleNamespace
class EngineArgs:
    def create_engine_config(self, context=None):
        target = SimpleNamespace(model="m", dtype="torch.bfloat16", max_model_len=8, get_hidden_size=lambda: 1,
                                 get_total_num_hidden_layers=lambda: 2, get_vocab_size=lambda: 3)
        method = sys.argv[sys.argv.index("--method") + 1] if "--method" in sys.argv else None
        return SimpleNamespace(
            model_config=target,
            speculative_config=method and SimpleNamespace(method=method, num_speculative_tokens=1),
            device_config=SimpleNamespace(device_type=os.environ["DEVICE"]),
            scheduler_config=SimpleNamespace(scheduler_cls=None),
            parallel_config=SimpleNamespace(worker_extension_cls=""),
        )
class AsyncEngineArgs(EngineArgs):
    pass
"""
API_SERVER = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
if __name__ == "__main__":
    made = AsyncEngineArgs().create_engine_config(context="server")
    print(sys.argv[1:], made.model_config.model)
    print(made.scheduler_config.scheduler_cls, made.parallel_config.worker_extension_cls or None)
"""


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., str]:
    """What the server says that is started with these arguments on a kind of device; its view is VIEW.json."""
    for folder, name, code in (("engine", "arg_utils", ARG_UTILS), ("entrypoints/openai", "api_server", API_SERVER)):
        (tmp_path / "vllm" / folder).mkdir(parents=True)
        (tmp_path / "vllm" / folder / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "vllm" / "__init__.py").touch()

    def started(*arguments: str, device: str = "cpu") -> str:
        path = os.pathsep.join([str(tmp_path), str(engine.SCRIPTS)])
        line = [sys.executable, "-m", "pilotfish.launch", str(tmp_path / "view.json"), *arguments]
        environment = {**os.environ, "PYTHONPATH": path, "DEVICE": device}
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    return started


def test_the_server_gets_its_own_arguments_and_the_view_is_written(serve: Callable[..., str], tmp_path: Path):
    assert serve("--model", "m") == "['--model', 'm'] m\nNone None\n"
    assert files.read_json(tmp_path / "view.json")["target"]["layers"] == 2


@pytest.mark.parametrize(("device", "scheduler"), [("cpu", launch.SCHEDULER), ("cuda", "None")])
def test_an_engine_that_captures_is_mended_on_a_cpu_alone(serve: Callable[..., str], device: str, scheduler: str):
    assert serve("--method", "extract_hidden_states", device=device).split()[-2:] == [scheduler, "None"]


@pytest.mark.parametrize(("method", "worker"), [("dflash", launch.DFLASH_WORKER), ("eagle3", "")])
def test_of_drafters_dflash_alone_is_mended(method: str, worker: str):
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
    )
    launch.mend(made)
    assert (made.scheduler_config.scheduler_cls, made.parallel_config.worker_extension_cls) == (None, worker)
