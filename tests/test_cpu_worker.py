# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build norms the context of every DFlash layer with that layer's own weight."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform

import helpers  # noqa: F401
from pilotfish import cpu_worker  # noqa: F401

LAYERS, TOKENS, HEADS, SIZE, EPSILON = 3, 5, 2, 16, 1e-6

current_platform.import_kernels()


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys of a context, a weight for each layer, and the keys normed by torch."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.randn(LAYERS, TOKENS, HEADS, SIZE, generator=draw)
    weights = torch.rand(LAYERS, SIZE, generator=draw) + 0.5
    normed = [F.rms_norm(each, (SIZE,), weight, EPSILON) for each, weight in zip(keys, weights, strict=True)]
    return keys, weights, torch.stack(normed)


def test_each_layers_keys_are_normed_with_its_own_weight():
    keys, weights, wanted = drawn()
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=EPSILON)
    torch.testing.assert_close(DFlashQwen3Model._normalize_context_k(model, keys), wanted)


def test_vllms_own_kernel_still_takes_the_first_weight_for_all():
    """When this fails, vLLM has mended its kernel, and `pilotfish.cpu_worker` can go."""
    keys, weights, wanted = drawn()
    found = torch.empty_like(keys)
    ops.rms_norm(found, keys, weights, EPSILON)
    torch.testing.assert_close(found[0], wanted[0])
    assert not torch.allclose(found[1], wanted[1], rtol=0.1)
