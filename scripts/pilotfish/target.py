# SPDX-License-Identifier: Apache-2.0
"""Bring a target model into the run's folder and record the facts that later rules rely on."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from pilotfish import weights
from pilotfish.errors import UserError
from pilotfish.facts import gguf_file
from pilotfish.layers import default_capture_layers

logger = logging.getLogger(__name__)
PACKAGE_PREFIX = "package:"
FORCED_WORDS = ("think", "tool")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")  # loading one runs the code in it: never even linked
OTHER_TASKS = ("MaskedLM", "Classification", "QuestionAnswering", "MultipleChoice", "PreTraining", "ObjectDetection")


def materialise(source: str, revision: str | None, folder: Path) -> str | None:
    """Fill `folder` with the target's files and return the resolved revision of a hub id.

    A package's GGUF is dequantised to bf16 safetensors; a Hugging Face folder or hub snapshot is linked
    file by file, so `folder` looks the same for every kind of source and no weights are copied.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if source.startswith(PACKAGE_PREFIX):
        _dequantise(gguf_file(source.removeprefix(PACKAGE_PREFIX)), folder)
        return None
    local = os.path.expanduser(source)
    if os.path.isdir(local):
        _link_files(Path(local), folder)
        return None
    if local.endswith(PICKLES) and os.path.isfile(local):
        raise UserError(
            f"target.source: {source} is a pickle, which runs code when it is loaded, so it never is; convert the "
            "model to a folder with .safetensors weights with transformers' save_pretrained"
        )
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(f"target.source: no folder {source!r}; give an existing folder or a hub id ORG/NAME")
    snapshot, commit = _download(source, revision)
    _link_files(snapshot, folder)
    return commit


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("dequantising %s to bf16 safetensors", gguf.name)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # of many kinds: the reader trusts what the file says of itself
        raise UserError(
            f"target.source: {gguf} cannot be read ({type(error).__name__}: {error}); it may be cut short or of a kind "
            "that transformers does not know: install its package again"
        ) from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _download(source: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(
            snapshot_download(source, revision=revision, ignore_patterns=["*.pt", "*.bin", "*.pth", "original/*"])
        )
    except Exception as error:
        raise UserError(
            f"target.source: {source!r} is no folder here, and the hub did not give it "
            f"({type(error).__name__}: {error}); check the name, the revision, HF_TOKEN and the network"
        ) from None
    return snapshot, snapshot.name


def _link_files(source: Path, folder: Path) -> None:
    """Link every file but hidden ones and pickles; UserError where what is needed is missing or damaged."""
    for file in sorted(source.rglob("*")):
        if any(part.startswith(".") for part in file.relative_to(source).parts):
            continue
        if file.is_symlink() and not file.exists():
            raise UserError(f"target.source: {file} links to nothing; fetch the model again")
        if file.suffix in PICKLES:
            logger.info("%s: left out, as every pickle: loading one runs the code in it", file)
        elif file.is_file():
            link = folder / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    if not (folder / "config.json").is_file():
        raise UserError(f"target.source: {source} has no config.json; point it at a Hugging Face model folder")
    if not list(folder.rglob("*.safetensors")):
        raise UserError(
            f"target.source: {source} has no .safetensors weights, and pickled ones are never loaded; "
            "convert the model with transformers' save_pretrained"
        )
    weights.check(source)


def facts(
    folder: Path, *, source: str, revision: str | None, trust_remote_code: bool, reasoning_parser: str | None
) -> dict:
    """What later rules need to know of the target: sizes, attention kind, template, tokens, default layers."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds: the readers trust what the files say
        raise UserError(
            f"target.source: transformers cannot read {folder} ({type(error).__name__}: {_first_line(error)}); "
            "fetch the model's JSON files again, or choose a model that this version of transformers knows"
        ) from None
    if wrong := no_language_model(config):
        raise UserError(f"target.source: {source}: {wrong}; choose a causal language model")
    weights.compare(folder, config.num_hidden_layers, config.hidden_size, config.vocab_size)
    if not tokenizer.chat_template:
        raise UserError(f"target.source: {source} has no chat template, so prompts cannot be put to it")
    layers = config.num_hidden_layers
    return {
        "source": source,
        "revision": revision,
        "architecture": (config.architectures or [config.model_type])[0],
        "layers": layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention": attention_kind(config),
        "chat_template_sha256": hashlib.sha256(_template_text(tokenizer.chat_template).encode()).hexdigest(),
        "end_token_ids": end_token_ids(folder, tokenizer.eos_token_id),
        "forced_token_ids": forced_token_ids(tokenizer),
        "thinking_token_ids": thinking_token_ids(tokenizer),
        "reasoning_parser": reasoning_parser,
        "wrapper": wrapper_tokens(reasoning_parser, tokenizer) if reasoning_parser else None,
        "default_capture_layers": default_capture_layers(layers),
    }


def _first_line(error: Exception) -> str:
    """What transformers says, without its advice: its version is pinned here."""
    return str(error).strip().partition("\n")[0]


def no_language_model(config: object) -> str | None:
    """Why a transformers text configuration is no causal language model's; None where it is one."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = getattr(config, name, None)
        if not isinstance(value, int) or value < 1:
            return f"its config.json has no {name} (found {str(value)[:100]})"
    architecture = str((config.architectures or [""])[0])
    if getattr(config, "is_encoder_decoder", False) or architecture.endswith(OTHER_TASKS):
        return f"{architecture or config.model_type} does not write text token after token"
    return None


def _template_text(template: str | dict) -> str:
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def attention_kind(config: object) -> str:
    """`mla`, `mha`, `gqa` or `mqa`, read from a transformers text configuration."""
    if getattr(config, "kv_lora_rank", None):
        return "mla"
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"


def end_token_ids(folder: Path, eos_token_id: int | None) -> list[int]:
    """Every token id that ends a response: the tokenizer's and those of generation_config.json."""
    ids = set() if eos_token_id is None else {eos_token_id}
    path = folder / "generation_config.json"
    if path.is_file():
        more = weights.json_object(path).get("eos_token_id", [])
        more = more if isinstance(more, list) else [] if more is None else [more]
        if not all(isinstance(each, int) for each in more):
            raise UserError(f"target.source: {path}: eos_token_id {str(more)[:100]} is no token id; fetch it again")
        ids.update(more)
    return sorted(ids)


def forced_token_ids(tokenizer: Any) -> list[int]:
    """Tokens that every draft vocabulary holds: special ones, and added ones that wrap reasoning or tool calls."""
    added = tokenizer.added_tokens_decoder.items()
    wrapping = {number for number, token in added if any(word in str(token) for word in FORCED_WORDS)}
    return sorted({*tokenizer.all_special_ids, *wrapping})


def thinking_token_ids(tokenizer: Any) -> list[int]:
    """Tokens that wrap reasoning, whether or not a reasoning parser is set."""
    return sorted(number for number, token in tokenizer.added_tokens_decoder.items() if "think" in str(token))


def wrapper_tokens(reasoning_parser: str, tokenizer: Any) -> dict[str, int] | None:
    """Ids of the tokens that open and close reasoning for one of vLLM's parsers; None if it knows no such tokens."""
    from vllm.reasoning import ReasoningParserManager

    try:
        parser = ReasoningParserManager.get_reasoning_parser(reasoning_parser)(tokenizer)
    except Exception as error:  # each parser has its own way to refuse a tokenizer
        raise UserError(
            f"target.reasoning_parser: vLLM's {reasoning_parser!r} does not fit this target "
            f"({type(error).__name__}: {error}); choose the parser of the target's own family"
        ) from None
    texts = {"open": parser.reasoning_start_str, "close": parser.reasoning_end_str}
    vocabulary = tokenizer.get_vocab()
    if any(text not in vocabulary for text in texts.values()):
        logger.warning("%s has no single wrapper tokens: reasoning is not checked by token id", reasoning_parser)
        return None
    return {name: vocabulary[text] for name, text in texts.items()}
