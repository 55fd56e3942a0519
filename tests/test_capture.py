# SPDX-License-Identifier: Apache-2.0
"""States are copied out of the cache's blocks, files appear whole, and no token is computed twice."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.outputs import DraftTokenIds

import helpers  # noqa: F401
from pilotfish import capture

LAYERS, BLOCK, BLOCKS, WIDTH = 3, 4, 9, 8


@pytest.fixture
def connector() -> capture.ShardCaptureConnector:
    """A connector as a worker has it, over a cache [blocks, layers, block size, width] of random states."""
    made = capture.ShardCaptureConnector.__new__(capture.ShardCaptureConnector)
    made._kv_cache = torch.randn(BLOCKS, LAYERS, BLOCK, WIDTH)
    made._block_size = BLOCK
    made._is_tp_rank_zero = True
    made._executor = ThreadPoolExecutor(1)
    made._req_copy_events, made._req_futures = {}, {}
    return made


def submit(connector, folder: Path, tokens: int, block_ids: list[int]) -> Path:
    path = folder / "incoming" / "request.safetensors"
    ids = torch.arange(tokens)
    connector._submit_async_write(SimpleNamespace(req_id="r", filename=str(path), token_ids=ids, block_ids=block_ids))
    return path


@pytest.mark.parametrize(("tokens", "block_ids"), [(1, [5]), (8, [7, 0]), (10, [6, 2, 8])])
def test_states_come_from_the_requests_blocks_in_order(connector, tmp_path: Path, tokens, block_ids):
    wanted = torch.stack([connector._kv_cache[block_ids[t // BLOCK], :, t % BLOCK] for t in range(tokens)])
    path = submit(connector, tmp_path, tokens, block_ids)
    connector._kv_cache.zero_()  # the blocks belong to the next request as soon as the call returns
    connector._executor.shutdown()
    written = load_file(path)
    assert torch.equal(written["hidden_states"], wanted)
    assert written["token_ids"].tolist() == list(range(tokens))
    assert [file.name for file in path.parent.iterdir()] == ["request.safetensors"]
    assert connector._req_copy_events["r"].query()
    assert connector._req_futures == {}


def test_more_tokens_than_cache_slots_are_an_error(connector, tmp_path: Path):
    with pytest.raises(RuntimeError, match="r: 9 tokens but only 8 cache slots"):
        submit(connector, tmp_path, 9, [1, 2])


def test_only_the_first_of_several_ranks_writes(connector, tmp_path: Path):
    connector._is_tp_rank_zero = False
    path = submit(connector, tmp_path, 4, [1])
    connector._executor.shutdown()
    assert not path.exists()


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail_midway(tensors: dict, filename: str) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(capture, "save_file", fail_midway)
    path = tmp_path / "request.safetensors"
    with pytest.raises(OSError, match="no space left"):
        capture.ShardCaptureConnector._write_tensors({}, capture._Done(), str(path), None)
    assert not path.exists()


def test_the_last_token_that_vllm_drafts_again_is_not_scheduled():
    scheduler = capture.DraftlessScheduler.__new__(capture.DraftlessScheduler)
    request = SimpleNamespace(spec_token_ids=[], is_finished=lambda: False, is_prefill_chunk=False)
    scheduler.requests = {"r": request}
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda _, drafted: drafted)
    scheduler.update_draft_token_ids(DraftTokenIds(req_ids=["r"], draft_token_ids=[[7]]))
    assert request.spec_token_ids == []
