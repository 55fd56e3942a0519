# SPDX-License-Identifier: Apache-2.0
"""Where torch computes in this job."""

import torch

DTYPE = torch.bfloat16  # of a drafter as served


def device() -> torch.device:
    """The GPU leased to this job, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype(states: torch.Tensor) -> torch.dtype:
    """What a drafter computes in on captured states: fp32 if they are (many a CPU knows no bf16), else bf16."""
    return torch.float32 if states.dtype == torch.float32 else DTYPE


def on_gpu() -> bool:
    """Whether there is a GPU for this job."""
    return device().type == "cuda"
