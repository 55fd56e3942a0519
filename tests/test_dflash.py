# SPDX-License-Identifier: Apache-2.0
"""DFlash's loss is that of the data's own tokens in the blocks of its anchors, and noise is on what it sees alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash.core import DFlashDraftModel
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers import HIDDEN, LAYERS, arrow_of, captured_folder, even_map, random_ids, random_target, response
from pilotfish import dflash, probes, shards, transfer
from pilotfish.errors import UserError

VOCABULARY, DRAFT_VOCABULARY, BLOCK, PACK = 200, 80, 4, 40
EVERYWHERE = PACK  # more anchors than there are places for
SPEC = {
    "algorithm": "dflash",
    "trust_remote_code": False,
    "seed": 3,
    "draft_layers": 1,
    "block_size": BLOCK,
    "speculative_tokens": BLOCK - 1,
    "mask_token": 5,
    "gamma": 2.0,
    "anchors": EVERYWHERE,
    "loss": {"hard": 1.0},
    "noise": 0.0,
}
PROMPT = 5
RESPONSES = [response(row, random_ids(PROMPT, row), random_ids(9 + 2 * row, 50 + row)) for row in range(2)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("target") / "model", VOCABULARY)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> transfer.SampleDataset:
    folder = tmp_path_factory.mktemp("data")
    ids = {each["row"]: each["prompt_token_ids"] + each["token_ids"] for each in RESPONSES}
    captured = captured_folder(folder / "captured", ids)
    states = transfer.ShardTransfer([captured / shards.INDEX], LAYERS)
    return transfer.SampleDataset(arrow_of(folder, RESPONSES), states, PACK, dflash)


def batch_of(data: transfer.SampleDataset, *numbers: int) -> dict:
    """A pack of some samples, in fp32."""
    batch = dflash.collator(SPEC, PACK, HIDDEN, len(LAYERS) - 1, torch.bfloat16)([data[number] for number in numbers])
    return batch | {name: value.float() for name, value in batch.items() if "hidden_states" in name}


def drafter(target: Path, vocabulary: int = DRAFT_VOCABULARY, **spec) -> dflash.DFlash:
    """A drafter that can propose the even tokens below 160, or all of them."""
    torch.manual_seed(0)
    return dflash.build({**SPEC, **spec}, target, LAYERS[:3], even_map(VOCABULARY, vocabulary)).eval()


class Looked(NamedTuple):
    """What a forward gave: blocks, loss, metrics, the drafter's and the target's logits, and what fc was given."""

    blocks: dflash.Blocks
    loss: torch.Tensor
    metrics: dict
    logits_ABV: torch.Tensor
    target_logits: torch.Tensor
    seen_TC: torch.Tensor


def look(model: dflash.DFlash, batch: dict, seed: int = 0, **spec) -> Looked:
    torch.manual_seed(seed)
    seen: list[torch.Tensor] = []
    handle = model.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with probes.outputs(model.lm_head) as logits, probes.outputs(model.verifier_lm_head) as targets:
        blocks, loss, metrics = model(**batch, **dflash.call_arguments({**SPEC, **spec}))
    handle.remove()
    shape = blocks.positions_AB.shape
    return Looked(blocks, loss, metrics, logits[0][0].unflatten(0, shape), targets[0], seen[0])


def in_the_draft_vocabulary(model: dflash.DFlash, token: int) -> int:
    """A token's index there, by search; IGNORED where it has none."""
    ids = range(VOCABULARY) if model.d2t is None else (torch.arange(len(model.d2t)) + model.d2t).tolist()
    return next((index for index, other in enumerate(ids) if other == token), dflash.IGNORED)


@pytest.mark.parametrize("vocabulary", [DRAFT_VOCABULARY, VOCABULARY], ids=["reduced", "whole"])
def test_the_labels_are_the_datas_tokens_in_the_draft_vocabulary(target: Path, data, vocabulary: int):
    model, batch = drafter(target, vocabulary), batch_of(data, 0, 1)
    positions_AB, labels_AB, counts_AB = look(model, batch).blocks
    ignored = 0
    for position, label, counts in zip(positions_AB.flatten(), labels_AB.flatten(), counts_AB.flatten(), strict=True):
        token = int(batch["input_ids"][0, position])
        assert int(label) == (in_the_draft_vocabulary(model, token) if counts else dflash.IGNORED)
        ignored += bool(counts) and int(label) == dflash.IGNORED
    assert (ignored > 0) == (vocabulary < VOCABULARY)


def test_every_place_with_a_generated_token_and_one_after_it_is_an_anchor_once(target: Path, data):
    blocks = look(drafter(target), batch_of(data, 0, 1)).blocks
    lengths = [len(each["prompt_token_ids"]) + len(each["token_ids"]) for each in RESPONSES]
    wanted = [*range(PROMPT, lengths[0] - 1), *range(lengths[0] + PROMPT, sum(lengths) - 1)]
    assert blocks.positions_AB[blocks.counts_AB.any(1), 0].tolist() == wanted


def test_no_slot_of_a_block_counts_beyond_its_document(target: Path, data):
    batch = batch_of(data, 0, 1)
    positions_AB, _, counts_AB = look(drafter(target), batch).blocks
    documents_AB = batch["document_ids"][0][positions_AB]
    assert (documents_AB == documents_AB[:, :1])[counts_AB].all()
    assert not counts_AB[:, 0].any(), "the anchor is known"
    crossing = (documents_AB[:, 0] == 0) & (documents_AB[:, -1] == 1)
    assert crossing.any() and not counts_AB[crossing].all(0)[-1]


def by_hand(model: dflash.DFlash, batch: dict, seen: Looked, gamma: float) -> tuple[float, float]:
    """The hard and the soft loss of a pack, slot by slot."""
    hard = soft = total = 0.0
    states = model.verifier_norm(batch["verifier_last_hidden_states"][0])
    for block, (positions, labels) in enumerate(
        zip(seen.blocks.positions_AB.tolist(), seen.blocks.labels_AB.tolist(), strict=True)
    ):
        for slot in range(1, len(positions)):
            if labels[slot] == dflash.IGNORED:
                continue
            weight = math.exp(-(slot - 1) / gamma)
            log_q = seen.logits_ABV[block, slot].log_softmax(-1)
            log_p = model.verifier_lm_head(states[positions[slot] - 1]).log_softmax(-1)
            total += weight
            hard -= weight * log_q[labels[slot]].item()
            soft += weight * (log_p.exp() * (log_p - log_q)).sum().item()
    return hard / total, soft / total


@pytest.mark.parametrize("gamma", [0.5, 4.0])
@pytest.mark.parametrize("weights", [{"hard": 1.0}, {"soft": 1.0}, {"hard": 0.7, "soft": 0.3}], ids=str)
@torch.no_grad()
def test_the_loss_is_the_weighted_mean_over_slots_whose_token_can_be_drafted(
    target: Path, data, gamma: float, weights: dict
):
    model, batch = drafter(target), batch_of(data, 0, 1)
    seen = look(model, batch, gamma=gamma, loss=weights)
    hard, soft = by_hand(model, batch, seen, gamma)
    mixed = weights.get("hard", 0) * hard + weights.get("soft", 0) * soft
    assert seen.loss.item() == pytest.approx(mixed, rel=1e-5)
    assert seen.metrics["loss_sum"] == seen.loss and abs(hard - soft) > 0.01


@torch.no_grad()
def test_a_slot_whose_token_cannot_be_drafted_takes_no_loss(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0)
    batch["input_ids"][batch["loss_mask"].bool()] = 1  # it can draft even tokens
    assert look(model, batch).loss == 0
    batch["input_ids"][0, PROMPT + 3] = 2
    assert look(model, batch).loss > 0


@pytest.mark.parametrize("anchors", [3, EVERYWHERE])
@torch.no_grad()
def test_the_soft_loss_is_that_of_speculators_where_every_token_can_be_drafted(target: Path, data, anchors: int):
    model, batch = drafter(target, VOCABULARY), batch_of(data, 1)
    ours = look(model, batch, loss={"soft": 1.0}, anchors=anchors)
    torch.manual_seed(0)
    _, theirs, _ = DFlashDraftModel.forward(
        model, **batch, loss_config=resolve_loss_config("kl_div", "eager"), gamma=SPEC["gamma"], max_anchors=anchors
    )
    # They divide by the number of slots, and we by the sum of their weights.
    counts_AB = ours.blocks.counts_AB
    weight = sum(math.exp(-(j - 1) / SPEC["gamma"]) * counts_AB[:, j].sum().item() for j in range(1, BLOCK))
    assert ours.loss.item() == pytest.approx(theirs.item() * counts_AB.sum().item() / weight, rel=1e-5)


def test_anchors_are_drawn_anew_with_every_seed(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0, 1)
    drawn = [look(model, batch, seed, anchors=4).blocks.positions_AB[:, 0].tolist() for seed in range(3)]
    assert all(len(set(each)) == 4 and each == sorted(each) for each in drawn)
    assert drawn[0] != drawn[1] and drawn[1] != drawn[2]


def test_more_anchors_than_there_are_places_do_no_harm(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0, 1)
    few = look(model, batch)
    places = int(few.blocks.counts_AB.any(1).sum())
    just, many = (look(model, batch, anchors=anchors) for anchors in (places, 3 * EVERYWHERE))
    for other in (just, many):
        assert other.loss.item() == pytest.approx(few.loss.item(), rel=1e-6)
        assert int(other.blocks.counts_AB.sum()) == int(few.blocks.counts_AB.sum())
        assert dflash.accuracy(other.metrics, batch, SPEC) == dflash.accuracy(few.metrics, batch, SPEC)


def test_a_pack_without_a_place_for_an_anchor_has_no_loss_and_no_gradient(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0, 1)
    seen = look(model, {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])})
    seen.loss.backward()
    assert seen.loss == 0 and not seen.blocks.counts_AB.any()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters() if parameter.requires_grad)
    assert dflash.accuracy(seen.metrics, batch, SPEC) == [0, 0, 0]


def test_a_slot_is_right_only_with_all_before_it_in_its_block(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0, 1)
    seen = look(model, batch)
    # Labels that the drafter proposes, but for the second slot of the first block.
    labels_AB = torch.where(seen.blocks.counts_AB, seen.logits_ABV.argmax(-1), dflash.IGNORED)
    labels_AB[0, 2] = (labels_AB[0, 2] + 1) % DRAFT_VOCABULARY
    model._labels = lambda *_: labels_AB.view(1, -1)
    totals = seen.blocks.counts_AB.sum(0).tolist()[1:]
    wanted = [1.0, (totals[1] - 1) / totals[1], (totals[2] - 1) / totals[2]]
    assert dflash.accuracy(look(model, batch).metrics, batch, SPEC) == pytest.approx(wanted)


@torch.no_grad()
def test_noise_is_on_what_the_drafter_sees_and_never_on_its_labels(target: Path, data):
    model, batch = drafter(target).train(), batch_of(data, 0, 1)
    clean, noisy = (look(model, batch, noise=noise, loss={"soft": 1.0}) for noise in (0.0, 1.0))
    assert torch.equal(clean.target_logits, noisy.target_logits)
    assert torch.equal(clean.blocks.labels_AB, noisy.blocks.labels_AB)
    assert not torch.equal(clean.seen_TC, noisy.seen_TC)
    assert clean.loss != noisy.loss


@torch.no_grad()
def test_there_is_no_noise_outside_training(target: Path, data):
    model, batch = drafter(target), batch_of(data, 0, 1)
    clean, asked = (look(model, batch, noise=noise) for noise in (0.0, 1.0))
    assert torch.equal(clean.seen_TC, asked.seen_TC) and clean.loss == asked.loss


@torch.no_grad()
def test_the_noise_of_each_layer_is_in_proportion_to_that_layers_states(target: Path, data):
    model, batch = drafter(target).train(), batch_of(data, 0, 1)
    sizes_L = torch.tensor([0.1, 1.0, 30.0])
    batch["hidden_states"] = (batch["hidden_states"].unflatten(-1, (3, -1)) * sizes_L[:, None]).flatten(-2)
    states_TC = batch["hidden_states"][0]
    added_LH = (look(model, batch, noise=0.2).seen_TC - states_TC).unflatten(-1, (3, -1)).transpose(0, 1).flatten(1)
    real = int((batch["document_ids"] >= 0).sum()) - 2  # the last token of a document has no state
    rms_L = (states_TC.unflatten(-1, (3, -1)).square().sum((0, 2)) / (real * HIDDEN)).sqrt()
    assert rms_L.tolist() == pytest.approx(sizes_L.tolist(), rel=0.1)
    assert (added_LH.std(1) / rms_L).tolist() == pytest.approx([0.2] * 3, rel=0.05)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a target's tokenizer of ten tokens, `a` to `j`; keywords name its special ones."""

    def write(**special: str) -> Path:
        known = {letter: number for number, letter in enumerate("abcdefghij")}
        core = Tokenizer(models.WordLevel(known, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(tmp_path)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("asked", "special", "size", "chosen"),
    [
        (7, {}, 10, 7),
        (0, {"mask_token": "d"}, 10, 0),
        ("c", {"mask_token": "d"}, 10, 2),
        (None, {"mask_token": "d"}, 10, 3),
        (None, {}, 16, 15),
    ],
    ids=["id", "the id 0", "token", "the tokenizer's own", "an id that no token has"],
)
def test_the_mask_token_is_the_one_asked_for_or_one_that_the_target_never_writes(
    tokenizer, asked: int | str | None, special: dict, size: int, chosen: int
):
    assert dflash.mask_token_id(asked, tokenizer(**special), size, trust_remote_code=False) == chosen


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (10, "mask_token: 10 is no id of the target's 10 tokens"),
        (-1, "mask_token: -1 is no id"),
        ("ab", "mask_token: 'ab' is no single token of the target; name one, or give its id"),
        (None, r"every id is in use; name a token that the target never writes, for example one of \['j'\]"),
    ],
)
def test_without_a_mask_token_the_error_says_what_to_name(tokenizer, asked: int | str | None, says: str):
    with pytest.raises(UserError, match=says):
        dflash.mask_token_id(asked, tokenizer(pad_token="j"), 10, trust_remote_code=False)
