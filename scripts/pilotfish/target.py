# SPDX-License-Identifier: Apache-2.0
"""Bring a target model into the run's folder and record the facts that later rules rely on."""

import hashlib
import json
import logging
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pilotfish.errors import UserError
from pilotfish.layers import default_capture_layers

logger = logging.getLogger(__name__)
PACKAGE_PREFIX = "package:"
FORCED_WORDS = ("think", "tool")


def materialise(source: str, revision: str | None, folder: Path) -> str | None:
    """Fill `folder` with the target's files and return the resolved revision of a hub id.

    A package's GGUF is dequantised to bf16 safetensors; a Hugging Face folder or hub snapshot is linked
    file by file, so `folder` looks the same for every kind of source and no weights are copied.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if source.startswith(PACKAGE_PREFIX):
        _dequantise(_gguf_file(source.removeprefix(PACKAGE_PREFIX)), folder)
        return None
    if Path(source).expanduser().is_dir():
        _link_files(Path(source).expanduser(), folder)
        return None
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UserError(f"target.source: no folder {source!r}; give an existing folder or a hub id ORG/NAME")
    snapshot, commit = _download(source, revision)
    _link_files(snapshot, folder)
    return commit


def _gguf_file(package: str) -> Path:
    try:
        listed = distribution(package).files or []
    except PackageNotFoundError:
        raise UserError(f"target.source: package {package!r} is not installed; pip install {package}") from None
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    if len(found) != 1:
        raise UserError(f"target.source: package {package!r} holds {len(found)} .gguf files where one is needed")
    return found[0]


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("dequantising %s to bf16 safetensors", gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


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
    for file in sorted(source.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(source).parts):
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


def facts(
    folder: Path, *, source: str, revision: str | None, trust_remote_code: bool, reasoning_parser: str | None
) -> dict:
    """What later rules need to know of the target: sizes, attention kind, template, tokens, default layers."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target.source: transformers cannot read {folder}: {error}") from None
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
        more = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", [])
        ids.update(more if isinstance(more, list) else [] if more is None else [more])
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
