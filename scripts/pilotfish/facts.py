# SPDX-License-Identifier: Apache-2.0
"""What a plan needs to know of a target: sizes from its config.json or a GGUF's header; never its weights."""

import dataclasses
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, BinaryIO

from pilotfish import files
from pilotfish.errors import UserError

PACKAGE_PREFIX = "package:"
BF16 = 2  # bytes a parameter where nothing else is known of the weights
HEAD_DIM = 128  # of most targets in use: assumed where attention heads are not stated
# A GGUF's keys, without the architecture in front, as a Hugging Face config names them.
OF_GGUF = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_TEXT = 10_000  # bytes of a text that are read: names are short, and a length may be anything


@dataclass(frozen=True)
class Facts:
    """Sizes of a target; `parameters` counts all, `active` those that one token uses, `weight_bytes` their files."""

    hidden_size: int
    layers: int
    vocab_size: int
    parameters: int
    active: int
    weight_bytes: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    source: str  # where the facts come from
    assumed: tuple[str, ...] = ()  # which of them are guesses


def of_mapping(given: dict[str, Any], source: str = "as given") -> Facts:
    """Facts from a mapping that names at least the hidden size H, the layers, the vocabulary and the parameters.

    Raises UserError for a missing or unknown name, or a number that is none.
    """
    fields = {field.name for field in dataclasses.fields(Facts)} - {"source", "assumed"}
    needed = ("hidden_size", "layers", "vocab_size", "parameters")
    if wrong := sorted(set(given) - fields) + [name for name in needed if name not in given]:
        raise UserError(f"facts: {', '.join(wrong)}: unknown or missing; needed are {', '.join(needed)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"facts: {name} is {value!r}; give a whole number above 0")
    hidden = given["hidden_size"]
    guesses = {
        "active": given["parameters"],
        "weight_bytes": BF16 * given["parameters"],
        "intermediate_size": 3 * hidden,
        "heads": max(1, hidden // HEAD_DIM),
        "kv_heads": max(1, hidden // HEAD_DIM),
        "head_dim": HEAD_DIM,
    }
    assumed = tuple(sorted(set(guesses) - set(given)))
    return Facts(**{**guesses, **given}, source=source, assumed=assumed)


def of_config(config: dict[str, Any], source: str, weight_bytes: int | None = None) -> Facts:
    """Facts from a Hugging Face config.json; UserError where it states no sizes.

    Parameters are counted from the sizes, experts included; norms and biases are left out.
    """
    text = config.get("text_config") or config
    try:
        hidden, layers, vocabulary = (int(text[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        width = int(text.get("intermediate_size") or 4 * hidden)
        heads = int(text.get("num_attention_heads") or max(1, hidden // HEAD_DIM))
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head_dim = int(text.get("head_dim") or hidden // heads)
        attention = _attention(text, hidden, heads, kv_heads, head_dim)
        every, active = _mlps(text, hidden, layers, width)
    except KeyError as error:
        raise UserError(f"{source}: states no {error}; is it the config.json of a language model?") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(f"{source}: its sizes cannot be read ({error}); copy the model's config.json again") from None
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    other = vocabulary * hidden * (1 if tied else 2) + layers * attention
    parameters = other + every
    assumed = ("parameters counted from the sizes",)
    if weight_bytes is None:
        assumed += ("2 bytes a parameter",)
    return Facts(
        hidden, layers, vocabulary, parameters, other + active,
        BF16 * parameters if weight_bytes is None else weight_bytes, width, heads, kv_heads, head_dim, source, assumed,
    )  # fmt: skip


def _attention(text: dict, hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Parameters of one layer's attention; latent ones (MLA) keep queries and keys in two thin factors."""
    if not text.get("kv_lora_rank"):
        return hidden * head_dim * (2 * heads + 2 * kv_heads)
    rank, rope = text["kv_lora_rank"], text.get("qk_rope_head_dim", 64)
    nope, value = text.get("qk_nope_head_dim", HEAD_DIM), text.get("v_head_dim", HEAD_DIM)
    queries = text.get("q_lora_rank") or 0
    query = queries * (hidden + heads * (nope + rope)) if queries else hidden * heads * (nope + rope)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _mlps(text: dict, hidden: int, layers: int, width: int) -> tuple[int, int]:
    """Parameters of all layers' MLPs, and of those that one token passes."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next((text[name] for name in names if text.get(name)), 0)
    if not experts:
        return layers * 3 * hidden * width, layers * 3 * hidden * width
    dense = text.get("first_k_dense_replace") or 0
    expert = 3 * hidden * (text.get("moe_intermediate_size") or width)
    shared = text.get("n_shared_experts") or 0
    chosen = text.get("num_experts_per_tok") or 1
    first = dense * 3 * hidden * width
    return (
        first + (layers - dense) * (experts + shared) * expert,
        first + (layers - dense) * (chosen + shared) * expert,
    )


def of_target(source: str, revision: str | None, prepared: Path) -> Facts:
    """Facts of a configuration's `target.source`; `prepared` is results/RUN/target/model, which wins if it is there.

    A folder's are read from its config.json, a package's from its GGUF's header; a hub id's config.json is fetched.
    Raises UserError where there is neither.
    """
    if (prepared / "config.json").is_file():
        return _of_folder(prepared)
    if source.startswith(PACKAGE_PREFIX):
        return of_gguf(gguf_file(source.removeprefix(PACKAGE_PREFIX)))
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return _of_folder(folder)
    return _of_hub(source, revision)


def _of_folder(folder: Path) -> Facts:
    config = files.read_json(folder / "config.json")
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return of_config(config, f"{folder}/config.json", weights or None)


def _of_hub(source: str, revision: str | None) -> Facts:
    from huggingface_hub import hf_hub_download

    try:
        config = files.read_json(Path(hf_hub_download(source, "config.json", revision=revision)))
    except Exception as error:  # of many kinds: names, network, rights
        raise UserError(
            f"target.source: no folder {source!r}, and the hub gave no config.json of it ({type(error).__name__}); "
            "check the name and the network, or plan with --facts"
        ) from None
    try:
        index = files.read_json(Path(hf_hub_download(source, "model.safetensors.index.json", revision=revision)))
        weights = int(index["metadata"]["total_size"])
    except Exception:  # small models come in one file, without an index
        weights = None
    return of_config(config, f"config.json of {source}", weights)


def gguf_file(package: str) -> Path:
    """The one GGUF inside an installed Python package; UserError where there is none, or several."""
    try:
        listed = distribution(package).files or []
    except PackageNotFoundError:
        raise UserError(f"target.source: package {package!r} is not installed; pip install {package}") from None
    found = [Path(str(file.locate())) for file in listed if file.suffix == ".gguf"]
    if len(found) != 1:
        raise UserError(f"target.source: package {package!r} holds {len(found)} .gguf files where one is needed")
    return found[0]


def of_gguf(path: Path) -> Facts:
    """Facts from a GGUF's header; its weights count as the bf16 ones that they are dequantised to."""
    with open(path, "rb") as handle:
        header, vocabulary = _gguf_header(handle, path)
    prefix = f"{header.get('general.architecture')}."
    config = {name: header[prefix + key] for key, name in OF_GGUF.items() if prefix + key in header}
    found = of_config({**config, "vocab_size": vocabulary, "tie_word_embeddings": True}, path.name)
    # The header's keys do not say so; small models, which come in packages, are so.
    return dataclasses.replace(found, assumed=(*found.assumed, "the head is the embedding"))


def _gguf_header(handle: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """Single values of a GGUF's header (version 2 or 3), and how many tokens its tokenizer has.

    The gguf package reads every token and tensor: seconds, and each start of Snakemake asks for these facts.
    """

    def number(code: str) -> Any:
        return struct.unpack(f"<{code}", handle.read(struct.calcsize(f"<{code}")))[0]

    try:
        if handle.read(4) != b"GGUF" or number("I") < 2:
            raise ValueError("no GGUF of version 2 or 3")
        number("Q")  # tensors
        values: dict[str, Any] = {}
        vocabulary = 0
        for _ in range(number("Q")):
            name = _gguf_text(handle, number("Q"))
            kind = number("I")
            value = _gguf_value(handle, kind, number)
            if name == "tokenizer.ggml.tokens":
                vocabulary = value
            values[name] = value
    except (struct.error, ValueError, KeyError, OSError, OverflowError) as error:
        raise UserError(f"{path}: no readable GGUF header ({error}); install its package again") from None
    return values, vocabulary


def _gguf_text(handle: BinaryIO, length: int) -> str:
    """A text of `length` bytes, its start alone where it is long, as chat templates are."""
    text = handle.read(min(length, GGUF_TEXT)).decode(errors="replace")
    handle.seek(max(0, length - GGUF_TEXT), os.SEEK_CUR)
    return text


def _gguf_value(handle: BinaryIO, kind: int, number: Callable[[str], Any]) -> Any:
    """One value; of an array its length alone, its items are skipped."""
    if kind == GGUF_STRING:
        return _gguf_text(handle, number("Q"))
    if kind != GGUF_ARRAY:
        return number(GGUF_NUMBERS[kind])
    of, count = number("I"), number("Q")
    if of == GGUF_STRING:
        for _ in range(count):
            handle.seek(number("Q"), os.SEEK_CUR)
    else:
        handle.seek(count * struct.calcsize(f"<{GGUF_NUMBERS[of]}"), os.SEEK_CUR)
    return count
