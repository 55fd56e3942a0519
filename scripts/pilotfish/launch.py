# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's server and have it write down what it has resolved for itself: the engine's own view.

python -m pilotfish.launch VIEW.json ARGUMENTS OF VLLM
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from pilotfish import constants, files

SERVER = "vllm.entrypoints.openai.api_server"
CAPTURE = "extract_hidden_states"  # vLLM's name of a method that drafts nothing
SCHEDULER = "pilotfish.capture.DraftlessScheduler"
DFLASH_WORKER = "pilotfish.cpu_worker.ContextNorms"


def view(config: Any) -> dict:
    """The facts of a VllmConfig that a job compares with its own: of the target, and of the drafter if there is one."""
    target, speculative = config.model_config, config.speculative_config
    facts: dict = {
        "target": {
            "model": target.model,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_model_len": target.max_model_len,
            "hidden_size": target.get_hidden_size(),
            "layers": target.get_total_num_hidden_layers(),
            "vocab_size": target.get_vocab_size(),
        },
        "speculative": None,
        "drafter": None,
    }
    if speculative is not None:
        facts["speculative"] = {
            "method": speculative.method,
            "num_speculative_tokens": speculative.num_speculative_tokens,
        }
    if method(config) not in (None, CAPTURE):
        facts["speculative"]["model"] = speculative.model
        facts["drafter"] = constants.of_engine(config).model_dump()
    return facts


def mend(config: Any) -> None:
    """Have a CPU's engine do what only a GPU's does by itself: see the two classes' own words."""
    if method(config) == CAPTURE:
        config.scheduler_config.scheduler_cls = SCHEDULER
    elif method(config) == "dflash":
        config.parallel_config.worker_extension_cls = DFLASH_WORKER


def method(config: Any) -> str | None:
    """vLLM's name for how the engine drafts; None where it does not."""
    return config.speculative_config and config.speculative_config.method


def main() -> None:
    """Take the view's path off the command line, and become the server."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    path = Path(sys.argv.pop(1))
    create = AsyncEngineArgs.create_engine_config

    def create_and_tell(self, *arguments, **options):
        config = create(self, *arguments, **options)
        if config.device_config.device_type == "cpu":
            mend(config)
        files.write_json(path, view(config))
        return config

    AsyncEngineArgs.create_engine_config = create_and_tell
    runpy.run_module(SERVER, run_name="__main__")


if __name__ == "__main__":
    main()
