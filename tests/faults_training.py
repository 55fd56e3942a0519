# SPDX-License-Identifier: Apache-2.0
"""Faults of the training's code path, and a rehearsal that shows them."""

from collections.abc import Callable
from types import ModuleType

import torch
from speculators.models.eagle3.core import Eagle3DraftModel

from faults import Scene, fault
from pilotfish import dflash, eagle3, files

REHEARSAL = "drafters/eagle3/rehearsal"
WHERE = r"results/tiny/drafters/eagle3/rehearsal: \d+ check\(s\) failed:\n(?s:.*)"
WHERE_DFLASH = WHERE.replace("eagle3", "dflash")
CURE = r"(?s:.*)mend that, delete the folder and run again"


def change_method(scene: Scene, owner: object, name: str, change: Callable) -> None:
    """Put `change(method, *arguments)` in the place of a method or function."""
    method = getattr(owner, name)
    scene.monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(method, *args, **kwargs))


@fault(
    "Training",
    "a layer does not reach the projection",
    "validate_rehearsal",
    WHERE + r"layer 3 does not reach the projection: without its states the logits stay as they are" + CURE,
)
def layer_lost(scene: Scene) -> None:
    def forward(method, model, hidden_states: torch.Tensor, *args, **kwargs):
        hidden_states = hidden_states.clone()
        hidden_states[..., -model.hidden_size :] = 0
        return method(model, hidden_states, *args, **kwargs)

    change_method(scene, Eagle3DraftModel, "forward", forward)


@fault(
    "Training",
    "label layer leaks into the conditioning",
    "validate_rehearsal",
    WHERE + r"label layer 4 leaks into the conditioning: with other labels the logits are others" + CURE,
)
def label_layer_leaks(scene: Scene) -> None:
    count_from_the_end(scene, eagle3)


def count_from_the_end(scene: Scene, algorithm: ModuleType) -> None:
    """As if all captured layers were counted from the end: the label layer is the last of the conditioning."""

    def last_ones(method, sample: dict, states: torch.Tensor) -> dict:
        shifted = method(sample, states.roll(-1, 1))
        return {**method(sample, states), "hidden_states": shifted["hidden_states"]}

    change_method(scene, algorithm, "view", last_ones)


@fault(
    "Training",
    "noise reaches the labels",
    "validate_rehearsal",
    WHERE
    + r"noise reaches the labels: take them before any is added(?s:.*)"
    + r"slot \d+: its label state is that of no position \(noise, or other layers\), not t\+1's"
    + CURE,
)
def noise_in_labels(scene: Scene) -> None:
    def noisy(method, sample: dict, states: torch.Tensor) -> dict:
        return method(sample, states + 0.1 * torch.randn(states.shape).to(states))

    change_method(scene, eagle3, "view", noisy)


@fault(
    "Training",
    "soft loss where hard was asked",
    "validate_rehearsal",
    WHERE + r"the loss of step 0 is \d+\.\d+ where ce, as asked, is \d+\.\d+: it is that of kl_div" + CURE,
)
def soft_loss(scene: Scene) -> None:
    config = scene.root / "config" / "tiny.yaml"
    text = config.read_text(encoding="utf-8")
    files.write_text(config, text.replace("    algorithm: eagle3\n", "    algorithm: eagle3\n    loss: ce\n"))
    change_method(scene, eagle3, "call_arguments", lambda method, spec: method({**spec, "loss": "kl_div"}))


@fault(
    "Training",
    "packed documents see each other",
    "validate_rehearsal",
    WHERE + r"packed documents see each other: document 0 changes the logits of document 1" + CURE,
)
def one_document(scene: Scene) -> None:
    def without_borders(method, model, documents: torch.Tensor, *args, **kwargs):
        return method(model, documents.clamp(max=0), *args, **kwargs)

    change_method(scene, Eagle3DraftModel, "_build_attn_mask", without_borders)


def change_shift(scene: Scene, change: Callable[[dict, dict], dict]) -> None:
    """Change what the shift makes of a sample; `change` takes the sample and the shifted one."""
    change_method(scene, eagle3, "shift_batch", lambda method, sample: change(sample, method(sample)))


@fault(
    "Training",
    "targets shifted twice",
    "validate_rehearsal",
    WHERE + r"document 0 \(row \d+\), slot 0: its label state is that of position 2, not t\+1's" + CURE,
)
def shifted_twice(scene: Scene) -> None:
    def again(_: dict, shifted: dict) -> dict:
        return {**shifted, "verifier_last_hidden_states": shifted["verifier_last_hidden_states"].roll(-1, 0)}

    change_shift(scene, again)


@fault(
    "Training",
    "training mask shifted by one",
    "validate_rehearsal",
    WHERE
    + r"document 0 \(row \d+\): \(input, label\) positions that only training uses \[\], only serving \[\(8, 9\)\]"
    + CURE,
)
def mask_shifted(scene: Scene) -> None:
    """The mask goes along with the features instead of the tokens."""
    change_shift(scene, lambda sample, shifted: {**shifted, "loss_mask": sample["loss_mask"][:-1]})


@fault(
    "Training",
    "the memorised row does not come back",
    "validate_rehearsal",
    WHERE
    + r"round 2 accepted 1 of 3 tokens of a row known by heart \(from its response token 8\): the block is not full\n"
    + r" +round 2: the replay has \(8, 3\) \(start, accepted\) where the engine has \(8, 1\)"
    + CURE,
)
def row_does_not_come_back(scene: Scene) -> None:
    """An engine with another forward than the training's: the text is right, the blocks are not full."""
    scene.edit_json(f"{REHEARSAL}/served.json", lambda served: served.update(per_step_accepted=[3, 3] + 14 * [1]))


# What went wrong in one long training of DFlash, each without an error, and what its masks could do.


@fault(
    "Training",
    "DFlash: one of the conditioning layers does not reach the projection",
    "validate_rehearsal",
    WHERE_DFLASH + r"layer 3 does not reach the projection: without its states the logits stay as they are" + CURE,
)
def dflash_layer_lost(scene: Scene) -> None:
    def forward(method, model, *, hidden_states: torch.Tensor, **batch):
        seen = hidden_states.unflatten(-1, (len(model.target_layer_ids), -1)).clone()
        seen[..., -1, :] = 0
        return method(model, hidden_states=seen.flatten(-2), **batch)

    change_method(scene, dflash.DFlash, "forward", forward)


@fault(
    "Training",
    "DFlash: noise is added before the labels are read",
    "validate_rehearsal",
    WHERE_DFLASH + r"noise reaches the labels: take them before any is added" + CURE,
)
def dflash_noise_in_labels(scene: Scene) -> None:
    def forward(method, model, *, verifier_last_hidden_states: torch.Tensor, noise: float, **batch):
        last = verifier_last_hidden_states
        if noise and model.training:
            last = last + noise * torch.randn_like(last)
        return method(model, verifier_last_hidden_states=last, noise=noise, **batch)

    change_method(scene, dflash.DFlash, "forward", forward)


@fault(
    "Training",
    "DFlash: label layer leaks into the conditioning",
    "validate_rehearsal",
    WHERE_DFLASH + r"label layer 4 leaks into the conditioning: with other labels the logits are others" + CURE,
)
def dflash_label_layer_leaks(scene: Scene) -> None:
    count_from_the_end(scene, dflash)


@fault(
    "Training",
    "DFlash: soft loss where hard was asked",
    "validate_rehearsal",
    WHERE_DFLASH + r"the loss of a pack is \d+\.\d+ where 1 hard, as asked, is \d+\.\d+: it is that of soft" + CURE,
)
def dflash_soft_loss(scene: Scene) -> None:
    change_method(scene, dflash, "call_arguments", lambda method, spec: method({**spec, "loss": {"soft": 1.0}}))


@fault(
    "Training",
    "DFlash: blocks see each other",
    "validate_rehearsal",
    WHERE_DFLASH + r"blocks see each other: the token at position \d+ changes the block at position \d+" + CURE,
)
def dflash_blocks_see_each_other(scene: Scene) -> None:
    def open_blocks(method, model, *args, **kwargs):
        mask = method(model, *args, **kwargs).clone()
        mask[..., -mask.shape[-2] :] = 0  # the keys behind the context are the blocks' own
        return mask

    change_method(scene, dflash.DFlash, "_create_attention_mask", open_blocks)
