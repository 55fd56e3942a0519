# SPDX-License-Identifier: Apache-2.0
"""Importing this mends vLLM's DFlash drafter on a CPU; a worker imports it by name (`worker_extension_cls`).

vLLM norms the keys of the context for all draft layers in one call, with a weight [layers, head size]. Its CUDA kernel
takes each layer's own row; its CPU kernel takes the first layer's for all of them, so that a drafter of two layers or
more drafts other tokens than it was trained to (vLLM 0.32; vllm-project/vllm#56431 mended the same on XPU).
"""

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model


class ContextNorms:
    """What is mixed into the worker's class: nothing, since importing the module was all."""


def normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
    """Keys [layers, tokens, KV heads, head size], each layer's normed with its own weight."""
    normed = torch.empty_like(all_k)
    for out, keys, weight in zip(normed, all_k, self._k_norm_weights, strict=True):
        ops.rms_norm(out, keys, weight, self._rms_norm_eps)
    return normed


DFlashQwen3Model._normalize_context_k = normalize_context_k
