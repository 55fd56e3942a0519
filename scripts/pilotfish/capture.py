# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads to write hidden states while it generates: a KV connector, and on the CPU a scheduler.

vLLM imports this module by name inside the engine (`kv_connector_module_path`, `scheduler_cls`).
"""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds


class DraftlessScheduler(Scheduler):
    """Schedules none of the drafts of vLLM's `extract_hidden_states`, which are each request's last token again.

    They would be verified, and refused, at the price of computing every token twice: on a CPU, where arithmetic is
    what decoding waits for, a batch of 64 is 1.6 times faster without, with the same text and states bit for bit.
    A GPU's engine schedules ahead of its drafts (`AsyncScheduler`), so there they stay.
    """

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Forget the drafts."""


class _Done:
    """Stands for a CUDA event where the copy was synchronous."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class ShardCaptureConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens], one file a request.

    Two things differ from vLLM's example: a file appears by rename, whole or not at all, so a reader
    needs no lock; and on the CPU the copy out of the cache is synchronous, where the example's streams
    and pinned memory would end the engine. The job collects the files into shards (`pilotfish.shards`).
    """

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        assert lock_fd is None, "locks are turned off in the connector's configuration"
        event.synchronize()
        temporary = f"{filename}.tmp"
        save_file(tensors, temporary)
        os.replace(temporary, filename)

    def _submit_async_write(self, pending: PendingSave) -> None:
        assert self._kv_cache is not None
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        block_ids = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (block_ids[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        tokens = len(pending.token_ids)
        if len(slots) < tokens:
            raise RuntimeError(f"{pending.req_id}: {tokens} tokens but only {len(slots)} cache slots")
        # Advanced indexing copies, so the blocks may be reused as soon as this returns.
        states = extract_from_kv_cache(self._kv_cache, slots, tokens).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        done = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda finished: self._on_write_done(pending.req_id, finished))
