# SPDX-License-Identifier: Apache-2.0
"""The likely cause of an engine's death is told with its cure, from what vLLM, torch and Python really write."""

import pytest

from pilotfish import causes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ModuleNotFoundError: No module named 'uvloop'", "import error (uvloop): the environment is not whole"),
        ("ImportError: libcudart.so.12: cannot open shared object file", "import error (ImportError: libcudart.so.12"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory: lower"),
        (
            "ValueError: To serve at least one request with the models's max seq len, 0.04 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (0.01 GiB).",
            "out of memory: lower engine.max_model_len",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("OSError: [Errno 98] Address already in use", "the port was taken by another process"),
        (
            "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
            "wrong architecture ['FooForCausalLM']:",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/model'", "missing permission (PermissionError"),
        ("api_server.py: error: unrecognized arguments: --foo", "vLLM does not know --foo: mend engine.extra_args"),
        ("please set the argument `trust_remote_code=True`", "the model brings code of its own"),
        ("RuntimeError: No CUDA GPUs are available", "no usable GPU"),
    ],
)
def test_what_is_fatal_is_found_in_the_log_and_comes_with_a_cure(line: str, said: str):
    log = f"INFO starting\nTraceback (most recent call last):\n{line}\nRuntimeError: Engine core initialization failed."
    assert said in causes.likely(1, log)


@pytest.mark.parametrize(("signal", "said"), [(9, "killed from outside"), (4, "this CPU lacks"), (11, "native code")])
def test_an_end_by_a_signal_is_explained(signal: int, said: str):
    assert said in causes.likely(-signal, "INFO all is well")


@pytest.mark.parametrize("status", [0, 1, None, -2])
def test_no_cause_is_made_up(status: int | None):
    assert causes.likely(status, "INFO all is well\nsomething else") == ""
