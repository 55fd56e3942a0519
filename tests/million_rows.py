# SPDX-License-Identifier: Apache-2.0
"""How long batches of a million samples take, and how much memory: figures for docs/benchmarks.md.

python tests/million_rows.py
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from pilotfish import batches, samples

ROWS = 1_000_000
IDS = 32  # stored of each row; lengths are drawn, since ids alone would take 17 GB
LONGEST = 3296
BUDGETS = (49_152, 4_096)
AT_ONCE = 10_000  # rows in one record batch


def write(arrow: Path) -> None:
    """A million samples with lengths as of long answers: log-normal, median 2,000 tokens, cut at LONGEST."""
    draw = np.random.default_rng(0)
    writer = datasets.arrow_writer.ArrowWriter(features=samples.FEATURES, path=str(arrow))
    for start in range(0, ROWS, AT_ONCE):
        lengths = np.clip(draw.lognormal(np.log(2000), 0.6, AT_ONCE), 20, LONGEST).astype(np.int64)
        offsets = pa.array(np.arange(AT_ONCE + 1, dtype=np.int32) * IDS)
        columns = {
            "row": pa.array(np.arange(start, start + AT_ONCE)),
            "id": pa.array([f"p{row}" for row in range(start, start + AT_ONCE)]),
            "input_ids": pa.ListArray.from_arrays(offsets, pa.array(draw.integers(0, 100_000, AT_ONCE * IDS))),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(np.ones(AT_ONCE * IDS, dtype=bool))),
            "prompt_length": pa.array(np.full(AT_ONCE, 8)),
            "seq_len": pa.array(lengths),
            "finish_reason": pa.array(["stop"] * AT_ONCE),
        }
        writer.write_table(pa.table(columns))
    writer.finalize()
    writer.close()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(name: str, work):
    begun, before = time.perf_counter(), peak_mb()
    made = work()
    print(f"{name}: {time.perf_counter() - begun:.1f} s, peak memory +{peak_mb() - before:.0f} MB", flush=True)
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arrow = Path(folder) / "samples.arrow"
        # In a process of its own: what writing takes is not what reading takes.
        maker = multiprocessing.get_context("spawn").Process(target=write, args=(arrow,))
        maker.start()
        maker.join()
        print(f"{ROWS:,} rows, {arrow.stat().st_size / 1e6:.0f} MB; before: {peak_mb():.0f} MB")
        lengths = timed("lengths", lambda: batches.lengths(samples.load(arrow)))
        for budget in BUDGETS:
            packed = batches.PackedBatches(lengths, budget, seed=0)
            said = timed(f"{budget:,} tokens a batch, first epoch", lambda packed=packed: batches.describe(packed))
            print(f"  {said}")
            packed.set_epoch(1)
            timed("  second epoch", lambda packed=packed: len(packed))
            theirs = MultipackDistributedBatchSamplerV2(budget, lengths, num_replicas=1, rank=0)
            count = timed("  speculators' own sampler", lambda theirs=theirs: len(theirs))
            print(f"    {count:,} batches, {1 - lengths.sum() / (count * budget):.1%} padding")


if __name__ == "__main__":
    main()
