# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a training: one stretch of one row learnt by heart with the real code, and served."""

import logging
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import httpx
import torch

from pilotfish import algorithms, excerpts, heads, shards, training
from pilotfish.device import device as on_device
from pilotfish.engine import SERVED_NAME, Engine
from pilotfish.errors import UserError
from pilotfish.excerpts import Excerpt

logger = logging.getLogger(__name__)

ROWS = 64  # of the training samples, among which a stretch is looked for
CANDIDATES = 8  # rows with a stretch that are enough to choose from
SEARCHED = 96  # response tokens of a row that are looked at
TOKENS = 40  # of a stretch, if there is one so long
# Of its narrowest token, in standard deviations of the logits: noise has moved them by 0.10 at most, and the gate of
# the evaluation allows 0.25. A stretch that has less is given up for a shorter one.
MARGIN = 0.5
FULL_ROUNDS = 4  # that a stretch must have room for
STEPS = 200  # at most
SURE = 5  # steps in a row without a mistake, so that rounding to bf16 brings none
LEARNING_RATE = 1e-3


def shortest(k: int) -> int:
    """Tokens of the shortest stretch for k drafted tokens: the first comes from prefill, then full rounds."""
    return 1 + FULL_ROUNDS * (k + 1)


def choose(rows: Iterable[dict], reader: shards.ShardReader, head: heads.Head, t2d: torch.Tensor, k: int) -> Excerpt:
    """The stretch whose every token is the target's first choice by the widest margin, and in the draft vocabulary.

    Arithmetic noise then changes nothing of it when the engine is asked for it greedily, whatever the
    sampling was. All tokens before it are its prompt. `t2d` [V] marks the draft vocabulary. UserError if
    the first ROWS rows hold none.
    """
    margins: list[tuple[dict, torch.Tensor]] = []
    wanted, found = max(TOKENS, shortest(k)), 0
    for sample in islice(rows, ROWS):
        margins.append((sample, _margins(sample, reader, head, t2d)))
        found += _widest(margins[-1][1], wanted)[0] > 0
        if found == CANDIDATES:
            break
    for length, least in ((wanted, MARGIN), (shortest(k), 0.0)):
        stretches = [(*_widest(each, length), sample) for sample, each in margins]
        width, start, sample = max(stretches, key=lambda stretch: stretch[0])
        if width > least:
            start += sample["prompt_length"]
            return excerpts.cut(sample, reader.read(sample["row"]), 0, start, start + length)
    raise UserError(
        f"none of the first {len(margins)} training samples has {shortest(k)} tokens in a row that are the target's "
        "first choice and in the draft vocabulary; raise draft_vocab_size, or lower responses.temperature"
    )


def _margins(sample: dict, reader: shards.ShardReader, head: heads.Head, t2d: torch.Tensor) -> torch.Tensor:
    """By how many standard deviations each response token's logit lies above all others; 0 where it does not.

    0 as well where the token is not in the draft vocabulary.
    """
    first = sample["prompt_length"]
    tokens_N = torch.tensor(sample["input_ids"][first : first + SEARCHED])
    states = reader.read(sample["row"]).hidden_states[first - 1 : first - 1 + len(tokens_N), -1]
    logits_NV = head.logits(states)
    top = logits_NV.topk(2, 1)
    right_N = (top.indices[:, 0] == tokens_N) & t2d[tokens_N]
    return torch.where(right_N, (top.values[:, 0] - top.values[:, 1]) / logits_NV.std(1), 0.0)


def _widest(margins_N: torch.Tensor, length: int) -> tuple[float, int]:
    """Of all runs of `length` tokens, the one whose smallest margin is the widest: that margin, and its start."""
    if len(margins_N) < length:
        return 0.0, 0
    width, start = margins_N.unfold(0, length, 1).amin(1).max(0)
    return float(width), int(start)


def memorise(model: torch.nn.Module, excerpt: Excerpt, spec: dict, folder: Path) -> list[dict]:
    """Train on one excerpt until every drafted token is right from every start; returns loss and accuracy by step.

    Samples, collation, forward, loss and autocast are those of the real training; optimizer and learning
    rate are not. `spec` is the drafter's; `folder` takes the sample.
    """
    algorithm, tokens = algorithms.of(spec), len(excerpt.tokens_T)
    spec = everywhere(spec, tokens)
    (batch,) = training.loader(excerpts.dataset([excerpt], spec, folder), spec, tokens, seed=0)
    device = on_device()
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    arguments = algorithm.call_arguments(spec)
    model.to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    log: list[dict] = []
    while len(log) < STEPS and not (len(log) >= SURE and all(min(row["accuracy"]) == 1 for row in log[-SURE:])):
        with torch.autocast(device.type, dtype=batch["hidden_states"].dtype):
            _, loss, metrics = model(**batch, **arguments)
        shares = algorithm.accuracy(metrics, batch, spec)
        log.append({"loss": round(loss.item(), 6), "accuracy": [round(share, 6) for share in shares]})
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    logger.info("%d steps: loss %.4f, accuracy by step %s", len(log), log[-1]["loss"], log[-1]["accuracy"])
    return log


def everywhere(spec: dict, tokens: int) -> dict:
    """The spec of a drafter that is trained at every place of so many tokens, without noise, whatever it is else."""
    return {**spec, "anchors": tokens, "noise": 0.0}


def ask(server: Engine, excerpt: Excerpt, patience: int) -> dict:
    """The engine's greedy answer to the excerpt's prompt, as ids: `token_ids` and `per_step_accepted`.

    UserError when it does not answer within `patience` seconds.
    """
    request = {
        "model": SERVED_NAME,
        "prompt": excerpt.tokens_T[: excerpt.prompt_length].tolist(),
        "max_tokens": len(excerpt.response),
        "return_token_ids": True,
        # Spelled out, so that no default of the model's folder slips in.
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=patience).raise_for_status().json()
    except httpx.HTTPError as error:
        server.check_alive()
        raise UserError(
            f"the engine did not answer ({error!r}); last lines of {server.log}:\n{server.tail()}"
        ) from None
    metrics = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return {
        "token_ids": answer["choices"][0]["token_ids"],
        "per_step_accepted": metrics.get("per_step_accepted") or [],
    }
