# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 in training, with speculators' model and losses: one layer over three hidden states, rolled out k steps."""

from collections.abc import Mapping
from pathlib import Path

import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import CollateFn

from pilotfish import samples
from pilotfish.device import on_gpu

EXTRA = 0  # tokens of a view beside those with states


def build(spec: Mapping, target: Path, layers: list[int], maps: Mapping[str, torch.Tensor]) -> Eagle3DraftModel:
    """A fresh EAGLE-3 drafter in fp32 whose head starts from the target's rows of the draft vocabulary.

    speculators freezes the head; here it is trained, as in EAGLE-3 itself.
    """
    layer = create_transformer_layer_config(
        str(target), num_layers=1, draft_arch="llama", hidden_act=None, sliding_window=2048,
        full_attention_indices=[0], trust_remote_code=spec["trust_remote_code"],
    )  # fmt: skip
    # A window that no layer uses would still be exported, and some servers apply it.
    layer.sliding_window = None
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d=maps["t2d"],
        d2t=maps["d2t"],
        draft_vocab_size=len(maps["d2t"]),
        norm_before_residual=True,
        ttt_steps=spec["speculative_tokens"],
        verifier_name_or_path=str(target),
        draft_attn_impl="simple_flex_attention" if on_gpu() else "eager",
        target_layer_ids=layers,
        trust_remote_code=spec["trust_remote_code"],
    ).float()
    model.lm_head.weight.requires_grad_(True)
    return model


def view(sample: Mapping[str, torch.Tensor], states_TLH: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens [T-1], conditioning [T-1, L*H], last state [T-1, H] and mask [T-1] of a sample with states [T-1, L+1, H].

    speculators shifts them against each other; the mask is moved so that slot t counts iff serving uses it.
    """
    return {
        "hidden_states": states_TLH[:, :-1].flatten(1),
        "input_ids": sample["input_ids"][:-1],
        "verifier_last_hidden_states": states_TLH[:, -1],
        "loss_mask": samples.serving_mask(sample["loss_mask"]),
    }


def collator(_spec: Mapping, tokens: int, hidden: int, layers: int, dtype: torch.dtype) -> CollateFn:
    """Packs of `tokens` slots, shifted as EAGLE-3 needs them."""
    return CollateFn(tokens, hidden, num_target_layers=layers, dtype=dtype, preprocess=shift_batch)


def call_arguments(spec: Mapping) -> dict:
    """What the model's forward is called with beside the batch: the loss and its steps."""
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn=spec["loss"],
        ttt_steps=spec["ttt_steps"],
        ttt_step_loss_decay=spec["ttt_step_loss_decay"],
        loss_implementation="fused" if on_gpu() else "eager",
    )
    return arguments


def accuracy(metrics: Mapping, batch: Mapping, spec: Mapping) -> list[float]:
    """Share of starts whose step s, and all before it, are right, of one document's forward."""
    supervised = int(batch["loss_mask"].sum())
    # A start right before the response has later steps in it, and counts as wrong there.
    return [float(metrics[f"full_acc_{step}_sum"] / (supervised - step)) for step in range(spec["ttt_steps"])]
