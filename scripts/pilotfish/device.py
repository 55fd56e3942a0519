# SPDX-License-Identifier: Apache-2.0
"""Where torch computes in this job."""

import torch

DTYPE = torch.bfloat16  # of hidden states, of autocast and of a drafter as served


def device() -> torch.device:
    """The GPU leased to this job, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def on_gpu() -> bool:
    """Whether there is a GPU for this job."""
    return device().type == "cuda"
