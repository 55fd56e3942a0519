# SPDX-License-Identifier: Apache-2.0
"""What reaches the trainer: the right slots are trained, and no sample is cut or confused with another."""

from pathlib import Path

import pytest
import torch
from speculators.models.eagle3.data import shift_batch

from helpers import LAYERS, arrow_of, captured_folder, random_ids, random_states, response
from pilotfish import dflash, eagle3, samples, shards, transfer
from pilotfish.errors import UserError

RESPONSES = [response(row, random_ids(3 + row, row), random_ids(9, 90 + row)) for row in (4, 5, 7)]
IDS = {each["row"]: each["prompt_token_ids"] + each["token_ids"] for each in RESPONSES}
LONGEST = len(IDS[7]) - 1  # tokens with states
ALGORITHMS = pytest.mark.parametrize("algorithm", [eagle3, dflash], ids=["eagle3", "dflash"])


def dataset(
    tmp_path: Path, ids: dict = IDS, layers: list[int] = LAYERS, pack: int = LONGEST + 1, algorithm=eagle3
) -> transfer.SampleDataset:
    captured = captured_folder(tmp_path / "captured", ids)
    states = transfer.ShardTransfer([captured / shards.INDEX], layers)
    return transfer.SampleDataset(arrow_of(tmp_path, RESPONSES), states, pack, algorithm)


@pytest.mark.parametrize("response_length", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt_length", [1, 2, 5])
def test_slot_t_is_trained_if_its_token_and_the_next_are_generated(prompt_length: int, response_length: int):
    total = prompt_length + response_length
    generated = torch.arange(total) >= prompt_length
    mask = samples.serving_mask(generated)
    # speculators sees the T - 1 tokens that have states, and drops the first mask entry for slot 0.
    tokens = torch.arange(total - 1)
    shifted = shift_batch(
        {
            "input_ids": tokens,
            "hidden_states": tokens[:, None],
            "verifier_last_hidden_states": tokens[:, None],
            "loss_mask": mask,
            "lengths": torch.tensor([total - 1]),
            "position_ids": tokens,
        }
    )
    assert len(shifted["loss_mask"]) == total - 2
    for t in range(total - 2):
        assert shifted["hidden_states"][t] == t
        assert shifted["input_ids"][t] == t + 1
        assert shifted["loss_mask"][t] == (t + 1 >= prompt_length and t + 2 >= prompt_length)
    # A round starts at each response token but the last; the last accepted token ends the response.
    assert int(shifted["loss_mask"].sum()) == response_length - 1


def test_a_sample_has_its_own_states_split_into_features_and_label_layer(tmp_path: Path):
    samples = dataset(tmp_path, layers=[3, 1, 4])
    assert len(samples) == 3
    for number, (row, ids) in enumerate(IDS.items()):
        sample, states = samples[number], random_states(ids[:-1]).hidden_states
        assert sample["input_ids"].tolist() == ids[:-1]
        assert torch.equal(sample["hidden_states"], torch.cat([states[:, 2], states[:, 0]], 1))
        assert torch.equal(sample["verifier_last_hidden_states"], states[:, 3])
        assert sample["loss_mask"].tolist() == [j >= 3 + row for j in range(len(ids) - 1)]
        assert sample["lengths"].tolist() == [len(ids) - 1] == [samples.approx_lengths[number]]


def test_a_dflash_sample_keeps_its_last_token_which_has_no_state(tmp_path: Path):
    samples = dataset(tmp_path, layers=[3, 1, 4], algorithm=dflash)
    for number, (row, ids) in enumerate(IDS.items()):
        sample, states = samples[number], random_states(ids[:-1]).hidden_states
        assert sample["input_ids"].tolist() == ids
        assert torch.equal(sample["hidden_states"][:-1], torch.cat([states[:, 2], states[:, 0]], 1))
        assert torch.equal(sample["verifier_last_hidden_states"][:-1], states[:, 3])
        assert not sample["hidden_states"][-1].any() and not sample["verifier_last_hidden_states"][-1].any()
        assert sample["loss_mask"].tolist() == [j >= 3 + row for j in range(len(ids))]
        assert sample["lengths"].tolist() == [len(ids)] == [samples.approx_lengths[number]]


@ALGORITHMS
def test_a_sample_that_just_fits_the_pack_is_taken(tmp_path: Path, algorithm):
    longest = LONGEST + algorithm.EXTRA
    samples = dataset(tmp_path, pack=longest, algorithm=algorithm)
    assert max(samples.approx_lengths) == len(samples[2]["input_ids"]) == longest


@ALGORITHMS
def test_a_sample_longer_than_the_pack_is_refused_by_its_row(tmp_path: Path, algorithm):
    longest = LONGEST + algorithm.EXTRA
    with pytest.raises(UserError, match=f"row 7: {longest} tokens exceed tokens_per_batch = {longest - 1}"):
        dataset(tmp_path, pack=longest - 1, algorithm=algorithm)


@ALGORITHMS
def test_another_rows_tokens_are_refused_by_the_row(tmp_path: Path, algorithm):
    other = {**IDS, 5: [*IDS[5][:4], 199 - IDS[5][4], *IDS[5][5:]]}
    samples = dataset(tmp_path, other, algorithm=algorithm)
    assert samples[0]["input_ids"].tolist() == IDS[4][: LONGEST - 3 + algorithm.EXTRA]
    with pytest.raises(UserError, match="row 5: the shard holds another row's tokens"):
        samples[1]


def test_a_sample_without_states_is_refused_by_its_row(tmp_path: Path):
    samples = dataset(tmp_path, {row: IDS[row] for row in (4, 5)})
    with pytest.raises(UserError, match="row 7: no hidden states"):
        samples[2]


def test_states_are_never_generated_behind_the_readers_back(tmp_path: Path):
    with pytest.raises(UserError, match="run the `capture` rule again"):
        dataset(tmp_path).transfer.get_generated({})


@ALGORITHMS
def test_states_held_in_memory_reach_a_sample_as_those_of_shards_do(tmp_path: Path, algorithm):
    stored = dataset(tmp_path, algorithm=algorithm)
    rows = {row: stored.transfer.reader.read(row) for row in IDS}
    held = transfer.SampleDataset(tmp_path / "samples.arrow", transfer.HeldTransfer(rows), LONGEST + 1, algorithm)
    for number in range(len(IDS)):
        ours, theirs = held[number], stored[number]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_row_that_is_not_held_in_memory_is_refused(tmp_path: Path):
    arrow = arrow_of(tmp_path, RESPONSES)
    samples = transfer.SampleDataset(arrow, transfer.HeldTransfer({}), LONGEST, eagle3)
    with pytest.raises(UserError, match="row 4: no hidden states"):
        samples[0]
