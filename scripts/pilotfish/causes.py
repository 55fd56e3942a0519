# SPDX-License-Identifier: Apache-2.0
"""The likely cause of an engine's death, read from its exit status and the end of its log."""

import re
import signal

LOOKED_AT = 400  # last lines of a log; what was fatal stands there, and a traceback of vLLM fills a hundred

# What vLLM, torch and Python write, with what it means and its cure. The first that is found is told: what is
# above causes what is below.
CAUSES = (
    (
        r"No module named '?(?P<what>[\w.]+)|(?P<what2>ImportError: .*)",
        "import error ({what}): the environment is not whole; run the set-up again (bash envs/setup.sh cpu, or gpu)",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|MemoryError|"
        r"Cannot allocate memory|DefaultCPUAllocator: can't allocate|larger than the available KV cache memory",
        "out of memory: lower engine.max_model_len, max_num_seqs, kv_cache_gib or gpu_memory_utilization, or raise "
        "tensor_parallel",
    ),
    (r"No space left on device|Disk quota exceeded", "the disk is full: make room, then run again"),
    (
        r"[Aa]ddress already in use",
        "the port was taken by another process: stop it, or leave engine.port out to take a free one",
    ),
    (
        r"Model architectures? (?P<what>\[[^\]]*\]|\S+) .*not supported|does not recognize this architecture|"
        r"is not supported for now|has no vLLM implementation",
        "wrong architecture {what}: this version of vLLM does not serve such a model; choose another target",
    ),
    (r"trust_remote_code", "the model brings code of its own: read it, then set target.trust_remote_code"),
    (r"(?P<what>(?:PermissionError|Permission denied).*)", "missing permission ({what})"),
    (r"unrecognized arguments?: (?P<what>.*)", "vLLM does not know {what}: mend engine.extra_args"),
    (
        r"driver version is insufficient|no CUDA-capable device|CUDA driver initialization failed|No CUDA GPUs",
        "no usable GPU: compare `nvidia-smi` with the CUDA version that torch was built for",
    ),
)
SIGNALS = {
    signal.SIGKILL: "killed from outside, as the kernel does when memory runs out: see `dmesg`, lower "
    "engine.kv_cache_gib or max_model_len, or give the job more memory",
    signal.SIGTERM: "asked to end from outside: by a scheduler, or by a person",
    signal.SIGILL: "an instruction that this CPU lacks: this build of vLLM wants AVX2 at least",
    signal.SIGSEGV: "a fault in native code: take the pinned versions of envs/, and another attention backend",
}


def likely(status: int | None, log: str) -> str:
    """The likely cause of an end with this exit status (negative: a signal), with its cure; "" if none is known."""
    end = "\n".join(log.splitlines()[-LOOKED_AT:])
    for pattern, meaning in CAUSES:
        if found := re.search(pattern, end):
            what = next((text for text in found.groupdict().values() if text), "")
            return re.sub(r" \(\)|(?<=\S) (?=: )", "", meaning.format(what=what.strip()[:200]))
    return SIGNALS.get(-status, "") if status is not None and status < 0 else ""
