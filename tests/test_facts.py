# SPDX-License-Identifier: Apache-2.0
"""Sizes of a target from its config.json, a GGUF's header, or as given."""

import json
import struct
from pathlib import Path

import pytest

from pilotfish import facts
from pilotfish.errors import UserError

NOWHERE = Path("nowhere/target/model")
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
# Of deepseek-ai/DeepSeek-V3, which has 671B parameters, 37B of them active.
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129_280, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


def folder_of(path: Path, config: dict, weights: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if weights:
        (path / "model.safetensors").write_bytes(b"\0" * weights)
    return path


def test_a_folder_is_read_from_its_config_and_the_size_of_its_weights(tmp_path):
    found = facts.of_target(str(folder_of(tmp_path / "model", SMALL, weights=1000)), None, NOWHERE)
    assert (found.hidden_size, found.layers, found.vocab_size) == (64, 2, 100)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 16)
    assert found.parameters == found.active == 100 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 96)
    assert found.weight_bytes == 1000


def test_a_target_that_is_prepared_is_read_where_it_lies(tmp_path):
    prepared = folder_of(tmp_path / "target/model", SMALL)
    assert facts.of_target("package:is-not-installed", None, prepared).hidden_size == 64


def test_a_wrapped_text_model_is_found():
    assert facts.of_config({"model_type": "vl", "text_config": SMALL}, "here").layers == 2


def test_experts_and_latent_attention_are_counted():
    found = facts.of_config(DEEPSEEK_V3, "DeepSeek-V3")
    assert found.parameters == pytest.approx(671e9, rel=0.01)
    assert found.active == pytest.approx(37e9, rel=0.03)


def test_what_is_guessed_is_named():
    found = facts.of_mapping({"hidden_size": 5120, "layers": 64, "vocab_size": 248_320, "parameters": 27_000_000_000})
    assert found.weight_bytes == 54_000_000_000
    assert {"intermediate_size", "heads", "weight_bytes"} <= set(found.assumed)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hidden_size": 64}, "layers, vocab_size, parameters: unknown or missing"),
        ({"hidden_size": 64, "layers": 2, "vocab_size": 9, "parameters": 5, "width": 3}, "width: unknown"),
        ({"hidden_size": "64", "layers": 2, "vocab_size": 9, "parameters": 5}, "hidden_size is '64'; give a whole"),
    ],
)
def test_given_facts_that_do_not_do_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        facts.of_mapping(given)


def test_a_config_without_sizes_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'hidden_size'; is it the config\.json of a language model"):
        facts.of_target(str(folder_of(tmp_path / "model", {"vocab_size": 3})), None, NOWHERE)


def gguf(path: Path, values: list[tuple[str, int, bytes]]) -> Path:
    def text(letters: str) -> bytes:
        return struct.pack("<Q", len(letters)) + letters.encode()

    body = b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in values)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body)
    return path


def test_a_gguf_is_read_from_its_header(tmp_path):
    word = struct.pack("<Q", 2) + b"ab"
    path = gguf(
        tmp_path / "small.gguf",
        [
            ("general.architecture", 8, struct.pack("<Q", 5) + b"llama"),
            ("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + 3 * word),
            ("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
            ("llama.block_count", 4, struct.pack("<I", 2)),
            ("llama.embedding_length", 4, struct.pack("<I", 64)),
            ("llama.feed_forward_length", 4, struct.pack("<I", 96)),
            ("llama.attention.head_count", 4, struct.pack("<I", 4)),
        ],
    )
    found = facts.of_gguf(path)
    assert (found.hidden_size, found.layers, found.vocab_size, found.heads) == (64, 2, 3, 4)
    assert "the head is the embedding" in found.assumed


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": []}, {"num_attention_heads": "many"}, {"num_experts": {}, "head_dim": "x"}]
)
def test_sizes_that_are_none_are_refused(tmp_path, wrong):
    with pytest.raises(UserError, match="its sizes cannot be read"):
        facts.of_target(str(folder_of(tmp_path / "model", {**SMALL, **wrong})), None, NOWHERE)


def test_a_long_text_in_a_gguf_is_passed_over(tmp_path):
    template = struct.pack("<Q", 3 * facts.GGUF_TEXT) + b"x" * 3 * facts.GGUF_TEXT
    sizes = [
        (f"llama.{key}", 4, struct.pack("<I", 8)) for key in ("block_count", "embedding_length", "feed_forward_length")
    ]
    name = ("general.architecture", 8, struct.pack("<Q", 5) + b"llama")
    path = gguf(tmp_path / "small.gguf", [("tokenizer.chat_template", 8, template), name, *sizes])
    assert facts.of_gguf(path).layers == 8


@pytest.mark.parametrize("content", [b"GGUF" + b"\xff" * 60, b"", b"GGUF", b"PK\x03\x04 something else"])
def test_a_broken_gguf_is_refused_by_name(tmp_path, content):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.gguf: no readable GGUF header"):
        facts.of_gguf(tmp_path / "broken.gguf")
