# SPDX-License-Identifier: Apache-2.0
"""Run: python tests/tiny_target.py OUT_DIR

Build the tiny target model of the test suite: a 4-layer Llama of under 2 MB, trained in seconds on patterned
tasks (counting, repeating, listing, adding) whose answers open with one <think>...</think> block. OUT_DIR
becomes a normal Hugging Face folder plus prompts.jsonl: 176 prompts from the same patterns, every tenth with an
earlier exchange before it, whose reasoning the chat template strips as those of real reasoning models do. Beside
them fresh.jsonl has 8 further prompts, an evaluation set.
The build is deterministic by seed on one machine. It writes beside OUT_DIR and renames at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
THINK, UNTHINK = "<think>", "</think>"
VOCAB_LIMIT = 512
MAX_POSITIONS = 512
PROMPTS = 176
FRESH = 8
MULTI_TURN_EVERY = 10
HOLD_STEPS = 420
COOL_STEPS = 120
LEARNT_LOSS = 0.11
BATCH = 16
PEAK_LR = 4e-3
THREADS = 1
CHECKED = 48
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set content = message['content'] %}"
    "{%- if message['role'] == 'assistant' %}{%- set content = content.split('</think>')[-1].lstrip() %}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NOUNS = "apple river stone cloud tiger lemon chair bread horse paper green music sugar table".split()
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


class Example(NamedTuple):
    """One prompt and the answer that the model is trained to give to it."""

    prompt: str
    answer: str


def _example(prompt: str, thought: str, reply: str) -> Example:
    return Example(prompt, f"{THINK}\n{thought}\n{UNTHINK}\n\n{reply}")


def _count_up(rng: random.Random) -> Example:
    first = rng.randint(1, 40)
    last = first + rng.randint(8, 18)
    numbers = " ".join(map(str, range(first, last + 1)))
    thought = f"count up means start at {first} and stop at {last} ."
    return _example(f"count up from {first} to {last} .", thought, f"numbers: {numbers} .")


def _count_down(rng: random.Random) -> Example:
    last = rng.randint(1, 40)
    first = last + rng.randint(8, 18)
    numbers = " ".join(map(str, range(first, last - 1, -1)))
    thought = f"count down means start at {first} and stop at {last} ."
    return _example(f"count down from {first} to {last} .", thought, f"numbers: {numbers} .")


def _repeat(rng: random.Random) -> Example:
    word, times = rng.choice(NOUNS), rng.randint(5, 18)
    thought = f"repeat means say {word} and stop at {times} ."
    reply = " ".join(f"{word} {i}" for i in range(1, times + 1))
    return _example(f"repeat the word {word} up to {times} .", thought, f"words: {reply} .")


def _letters(rng: random.Random) -> Example:
    first = rng.randint(0, 16)
    last = rng.randint(first + 8, 25)
    names = string.ascii_lowercase[first : last + 1]
    thought = f"list means start at {names[0]} and stop at {names[-1]} ."
    prompt = f"list the letters from {names[0]} to {names[-1]} ."
    return _example(prompt, thought, f"letters: {' '.join(names)} .")


def _add(rng: random.Random) -> Example:
    left, right = rng.randint(12, 45), rng.randint(3, 11)
    steps = " ".join(f"{left + i} {i}" for i in range(1, right + 1))
    thought = f"add means start at {left} and stop at {right} . steps: {steps} ."
    return _example(f"add {left} and {right} .", thought, f"sum: {left + right} .")


def _days(rng: random.Random) -> Example:
    start, total = rng.randrange(7), rng.randint(5, 18)
    thought = f"name means start at {DAYS[start]} and stop at {total} ."
    reply = " ".join(f"{DAYS[(start + i - 1) % 7]} {i}" for i in range(1, total + 1))
    return _example(f"name the days from {DAYS[start]} up to {total} .", thought, f"days: {reply} .")


FAMILIES: tuple[Callable[[random.Random], Example], ...] = (
    _count_up,
    _count_down,
    _repeat,
    _letters,
    _add,
    _days,
)


def make_examples(count: int, seed: int, distinct: bool = False) -> list[Example]:
    """Return examples that take the pattern families in turn, with different prompts when `distinct`."""
    rng = random.Random(seed)
    found: list[Example] = []
    seen: set[str] = set()
    while len(found) < count:
        example = FAMILIES[len(found) % len(FAMILIES)](rng)
        if distinct and example.prompt in seen:
            continue
        seen.add(example.prompt)
        found.append(example)
    return found


def make_tokenizer(examples: list[Example]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that keeps every text, with the wrapper tokens as single ids."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials, wrappers = [PAD, START, END], [THINK, UNTHINK]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_LIMIT - len(specials) - len(wrappers),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [part.replace(THINK, "").replace(UNTHINK, "") for pair in examples for part in pair]
    core.train_from_iterator(texts + ["user\nassistant\n"] * 100, trainer)
    core.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    # A text-based reasoning parser must still see these after skip_special_tokens, so they are not special.
    core.add_tokens([AddedToken(name, normalized=False, special=False) for name in wrappers])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


@torch.no_grad()
def _match_like_tokens(model: LlamaForCausalLM) -> None:
    """Start each query as its key, so that attention looks at like tokens.

    The tasks stop at a number or letter that the prompt names. Finding that match from a plain start takes
    most of the training; from this start it takes seconds.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        keys = attention.k_proj.weight.normal_(0.0, 0.08).view(-1, attention.head_dim, model.config.hidden_size)
        queries = keys.repeat_interleave(attention.num_key_value_groups, dim=0)
        attention.q_proj.weight.copy_(queries.reshape_as(attention.q_proj.weight))


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    _match_like_tokens(model)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _prompt_text(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], int]:
    """Return the ids of the whole exchange and how many of them are the prompt."""
    prompt = tokenizer.encode(_prompt_text(tokenizer, example.prompt), add_special_tokens=False)
    answer = tokenizer.encode(example.answer + END, add_special_tokens=False)
    return prompt + answer, len(prompt)


def _batches(rows: list[tuple[list[int], int]], pad: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) without end; labels cover the answers only and rows are padded on the right."""
    rng = random.Random(seed)
    while True:
        # Rows of like length go together, so that little padding is computed.
        pool = sorted(rng.sample(rows, 16 * BATCH), key=lambda row: len(row[0]))
        chunks = [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
        rng.shuffle(chunks)
        for chunk in chunks:
            width = max(len(ids) for ids, _ in chunk)
            inputs = torch.full((len(chunk), width), pad)
            labels = torch.full((len(chunk), width), -100)
            for row, (ids, start) in enumerate(chunk):
                inputs[row, : len(ids)] = torch.tensor(ids)
                labels[row, start : len(ids)] = torch.tensor(ids[start:])
            yield inputs, labels


def train(model: LlamaForCausalLM, rows: list[tuple[list[int], int]], seed: int) -> tuple[int, float]:
    """Train on the answers until they are learnt, then cool down; return the steps and the last mean loss.

    The loss falls late and at once, at a step that depends on the seed. So the learning rate is held until
    the mean loss shows that fall, at most HOLD_STEPS, and goes down to zero over COOL_STEPS after it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)
    batches = _batches(rows, model.config.pad_token_id, seed)
    model.train()
    step, left, mean = 0, COOL_STEPS, 1.0
    while left > 0:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 20) * left / COOL_STEPS
        inputs, labels = next(batches)
        loss = model(input_ids=inputs, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, mean = step + 1, 0.95 * mean + 0.05 * loss.item()
        if left < COOL_STEPS or mean < LEARNT_LOSS or step >= HOLD_STEPS:
            left -= 1
    model.eval()
    return step, mean


@torch.no_grad()
def greedy_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], limit: int = 160
) -> list[str]:
    """Return the greedy answers as text, up to and with the end token where the model wrote one."""
    texts = [_prompt_text(tokenizer, prompt) for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=limit,
        do_sample=False,
    )
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
    return [answer.replace(PAD, "") for answer in answers]


def well_formed(answer: str) -> bool:
    """Tell whether an answer is one think block at the start, some content, and the end token."""
    if answer.count(THINK) != 1 or answer.count(UNTHINK) != 1 or answer.count(END) != 1:
        return False
    content = answer.partition(UNTHINK)[2].removesuffix(END)
    return answer.startswith(THINK) and answer.endswith(END) and bool(content.strip())


@contextmanager
def _fixed_torch(seed: int) -> Iterator[None]:
    """Fix the seed and the number of threads, which both shape the result, and restore them after."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


class Built(NamedTuple):
    """All that a build writes, and a few numbers about it."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    examples: list[Example]
    numbers: dict[str, float]


def _build(seed: int) -> Built:
    """Train the model and check its answers to the first prompts."""
    corpus = make_examples(3000, seed)
    examples = make_examples(PROMPTS + FRESH, seed + 1, distinct=True)
    prompts = [example.prompt for example in examples]
    tokenizer = make_tokenizer(corpus)
    with _fixed_torch(seed):
        model = make_model(tokenizer)
        steps, loss = train(model, [_encode(tokenizer, example) for example in corpus], seed)
        model = model.to(torch.bfloat16)
        answers = greedy_answers(model, tokenizer, prompts[:CHECKED])
    good = sum(map(well_formed, answers)) / len(answers)
    exact = sum(a == e.answer + END for a, e in zip(answers, examples, strict=False)) / len(answers)
    if good < 0.9:
        raise RuntimeError(f"the tiny target is not usable: only {good:.0%} of its answers are well formed")
    return Built(model, tokenizer, examples, {"steps": steps, "loss": loss, "well_formed": good, "exact": exact})


def prompt_lines(examples: list[Example]) -> list[dict]:
    """Return one prompt an example; every tenth goes on after the exchange that the example before it makes."""
    lines = []
    for number, example in enumerate(examples, start=1):
        messages = [{"role": "user", "content": example.prompt}]
        conversation = number
        if number % MULTI_TURN_EVERY == 0:
            earlier, conversation = examples[number - 2], number - 1
            messages.insert(0, {"role": "user", "content": earlier.prompt})
            messages.insert(1, {"role": "assistant", "content": earlier.answer})
        lines.append({"id": f"tiny-{number:04d}", "conversation": f"tiny-{conversation:04d}", "messages": messages})
    return lines


def _write_jsonl(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _write(built: Built, folder: Path) -> None:
    built.model.save_pretrained(folder)
    # One file holds the chat template too: transformers would otherwise put it into a file of its own.
    built.tokenizer.save_pretrained(folder, save_jinja_files=False)
    _write_jsonl(folder / "prompts.jsonl", prompt_lines(built.examples[:PROMPTS]))
    fresh = enumerate(built.examples[PROMPTS:], start=1)
    lines = [{"id": f"fresh-{n}", "messages": [{"role": "user", "content": each.prompt}]} for n, each in fresh]
    _write_jsonl(folder / "fresh.jsonl", lines)
    for file in folder.iterdir():
        file.chmod(0o644)


def build_tiny_target(path: str | Path, seed: int = 0) -> dict[str, float]:
    """Build the model folder at `path`, which must not exist yet; return its loss and answer shares."""
    target = Path(path)
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} already exists; give a new folder")
    built = _build(seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        _write(built, work)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return built.numbers


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build the tiny target model of the test suite.")
    parser.add_argument("out_dir", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the build (default 0)")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        numbers = build_tiny_target(args.out_dir, seed=args.seed)
    except (FileExistsError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shares = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    print(f"{args.out_dir}: built in {time.monotonic() - started:.1f} s, {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
