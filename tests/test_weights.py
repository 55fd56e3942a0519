# SPDX-License-Identifier: Apache-2.0
"""A target's files are whole, inside their folder and of one model, or refused with the file and the cure."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hostile import VALUES, damaged, fuzzed, places, settled, with_value
from pilotfish import files, target, weights
from pilotfish.errors import UserError


def model_folder(folder: Path, shape: tuple[int, int] = (8, 4), layers: int = 2) -> Path:
    """A folder with config.json and weights in two files and an index, all as they should be."""
    folder.mkdir(parents=True)
    halves = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": np.zeros(shape, np.float16)},
        "model-00002-of-00002.safetensors": {f"model.layers.{layers - 1}.mlp.weight": np.ones(3, np.float16)},
    }
    for name, held in halves.items():
        save_file(held, folder / name)
    files.write_json(folder / "config.json", {"model_type": "llama"})
    listed = {tensor: name for name, held in halves.items() for tensor in held}
    files.write_json(folder / weights.INDEX, {"metadata": {}, "weight_map": listed})
    return folder


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def listing(name: object) -> Callable[[Path], None]:
    """A change of the index so that it says the embedding lies in `name`."""

    def change(folder: Path) -> None:
        index = files.read_json(folder / weights.INDEX)
        index["weight_map"]["model.embed_tokens.weight"] = name
        files.write_json(folder / weights.INDEX, index)

    return change


def writing(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(name).write_bytes(content) and None


def cutting(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(name).write_bytes(folder.joinpath(name).read_bytes()[:size]) and None


def dangling(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to(folder / "gone.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (writing("config.json", b"{"), "config.json: not valid JSON"),
        (writing("config.json", b"\xff\xfe"), "config.json: not valid JSON"),
        (writing("config.json", b"[" * 100_000), "config.json: not valid JSON (maximum recursion depth exceeded"),
        (writing("config.json", b"[]"), "config.json: a JSON list, not an object; fetch the model again"),
        (lambda folder: folder.joinpath(SECOND).unlink(), f"lies in '{SECOND}', which is no .safetensors file of"),
        (cutting(FIRST, -1), f"{FIRST}: no whole safetensors file (Error while deserializing header: incomplete"),
        (cutting(FIRST, 20), f"{FIRST}: no whole safetensors file (Error while deserializing header: invalid header"),
        (cutting(FIRST, 3), f"{FIRST}: no whole safetensors file (Error while deserializing header: header too small"),
        (writing(FIRST, struct.pack("<Q", 2**62) + b"{}"), f"{FIRST}: no whole safetensors file"),
        (writing(FIRST, b"\x80\x04PK"), f"{FIRST}: no whole safetensors file"),
        (listing("../../secret.safetensors"), "lies in '../../secret.safetensors', which is no .safetensors file of"),
        (listing("/etc/passwd"), "lies in '/etc/passwd', which is no .safetensors file of"),
        (listing("pytorch_model.bin"), "lies in 'pytorch_model.bin', which is no .safetensors file of"),
        (listing(SECOND), f"{SECOND}: lacks 'model.embed_tokens.weight', which {weights.INDEX} lists"),
        (listing(7), "lies in '7', which is no .safetensors file of"),
        (writing(weights.INDEX, b'{"weight_map": []}'), "no `weight_map` of tensors to files; fetch the model again"),
        (dangling, "tokenizer.json links to nothing; fetch the model again"),
    ],
)  # fmt: skip
def test_a_damaged_model_folder_is_refused_with_file_and_cure(tmp_path: Path, change: Callable, reason: str):
    source = model_folder(tmp_path / "source")
    target.materialise(str(source), None, tmp_path / "model")
    change(source)
    with pytest.raises(UserError) as error:
        target.materialise(str(source), None, tmp_path / "model")
    assert str(error.value).startswith("target.source: ")
    assert reason in str(error.value)


def test_pickles_are_never_even_linked(tmp_path: Path):
    source = model_folder(tmp_path / "source")
    for name in ("pytorch_model.bin", "optimizer.pt", "original/a.pth", "a.pkl", "a.ckpt"):
        files.write_text(source / name, "a pickle")
    target.materialise(str(source), None, tmp_path / "model")
    assert {path.suffix for path in (tmp_path / "model").rglob("*")} == {".json", ".safetensors"}
    with pytest.raises(UserError, match=r"a\.pkl is a pickle, which runs code when it is loaded, so it never is; conv"):
        target.materialise(str(source / "a.pkl"), None, tmp_path / "model")


def header(content: dict) -> bytes:
    """A safetensors file of 32 bytes of numbers, behind this header."""
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(32))


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 16]},
    "b": {"dtype": "I64", "shape": [2], "data_offsets": [16, 32]},
}


@fuzzed(600)
@given(
    content=damaged(header(HEADER))
    | st.tuples(st.sampled_from(places(HEADER)), VALUES).map(lambda change: header(with_value(HEADER, *change)))
)
def test_any_weights_are_listed_or_refused_with_their_name(tmp_path: Path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    found = settled(lambda: weights.tensors(path), f"target.source: {path}: no whole safetensors file")
    assert found is None or all(kind and all(size >= 0 for size in shape) for kind, shape in found.values())


@pytest.mark.parametrize("sizes", [(3, 4, 8), (2, 5, 8), (2, 4, 9)], ids=["layers", "hidden size", "vocabulary"])
def test_weights_of_another_model_than_the_configuration_says_are_refused(tmp_path: Path, sizes: tuple):
    folder = model_folder(tmp_path / "source")
    weights.compare(folder, layers=2, hidden=4, vocabulary=8)
    with pytest.raises(UserError, match=r"where config\.json says .*another model"):
        weights.compare(folder, *sizes)


SIZES = {"num_hidden_layers": 2, "hidden_size": 4, "vocab_size": 8, "model_type": "x"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, None),
        ({"architectures": None}, None),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM does not write text token after token"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5ForCond",
        ),
        ({"architectures": None, "hidden_size": None}, "its config.json has no hidden_size (found None)"),
        ({"architectures": None, "vocab_size": "9" * 5000}, "its config.json has no vocab_size (found 9999"),
        ({"architectures": None, "num_hidden_layers": -1}, "its config.json has no num_hidden_layers (found -1)"),
    ],
)
def test_a_model_of_another_task_is_told_apart(config: dict, reason: str | None):
    found = target.no_language_model(SimpleNamespace(**{**SIZES, **config}))
    assert found == reason if reason is None else found.startswith(reason)


@pytest.mark.parametrize("config", [{"model_type": "no-such-model"}, {"model_type": ["llama"]}, {}])
def test_what_transformers_cannot_read_is_an_error_with_the_cure(tmp_path: Path, config: dict):
    files.write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match=r"transformers cannot read .*; fetch the model's JSON files again, or"):
        target.facts(tmp_path, source="x", revision=None, trust_remote_code=False, reasoning_parser=None)


@pytest.mark.parametrize("content", [b"{", b"[2]", b'{"eos_token_id": "</s>"}', b'{"eos_token_id": [{}]}'])
def test_a_broken_generation_config_is_an_error_that_names_it(tmp_path: Path, content: bytes):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"generation_config\.json: .*; fetch"):
        target.end_token_ids(tmp_path, 2)
