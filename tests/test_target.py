# SPDX-License-Identifier: Apache-2.0
"""Where a target comes from, and the facts that are read off its configuration."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save_file

from pilotfish import files, target
from pilotfish.errors import UserError


def make_model(folder: Path, *names: str) -> Path:
    """A folder of these files: empty weights, and JSON that tells its own name."""
    for name in names:
        if name.endswith(".safetensors"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            save_file({}, folder / name)
        else:
            files.write_json(folder / name, {"name": f"{name} of {folder.name}"})
    return folder


def complaint(source: object, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        target.materialise(str(source), None, folder)
    return str(error.value)


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/model", "~/nowhere", "justaname", "a/b/c", "../x"])
def test_a_source_that_is_neither_folder_nor_hub_id_is_an_error(tmp_path: Path, source: str):
    message = complaint(source, tmp_path / "model")
    assert message.startswith(f"target.source: no folder '{source}'; give an existing folder or a hub id")


def test_a_package_that_is_not_installed_comes_with_the_line_that_installs_it(tmp_path: Path):
    message = complaint("package:no-such-package-anywhere", tmp_path / "model")
    assert "package 'no-such-package-anywhere' is not installed; pip install no-such-package-anywhere" in message


def test_a_package_without_a_model_is_an_error_that_counts_its_models(tmp_path: Path):
    assert "package 'pytest' holds 0 .gguf files" in complaint("package:pytest", tmp_path / "model")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["model.safetensors"], "has no config.json; point it at a Hugging Face model folder"),
        ([], "has no config.json"),
        (["config.json", "pytorch_model.bin"], "has no .safetensors weights, and pickled ones are never loaded"),
        (["config.json", ".cache/model.safetensors"], "has no .safetensors weights"),
    ],
)
def test_a_folder_that_holds_no_model_is_an_error_with_the_cure(tmp_path: Path, names: list[str], reason: str):
    source = make_model(tmp_path / "source", *names)
    source.mkdir(exist_ok=True)
    message = complaint(source, tmp_path / "model")
    assert message.startswith(f"target.source: {source} ")
    assert reason in message


def test_a_folder_is_linked_and_not_copied(tmp_path: Path):
    source = make_model(tmp_path / "source", "config.json", "model.safetensors", "extra/a.json", ".git/HEAD")
    model = tmp_path / "model"
    assert target.materialise(str(source), None, model) is None
    linked = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_symlink()}
    assert linked == {"config.json", "model.safetensors", "extra/a.json"}
    assert (model / "extra/a.json").samefile(source / "extra/a.json")


def test_a_relative_source_is_linked_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model(tmp_path / "source", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    target.materialise("source", None, Path("results/model"))
    monkeypatch.chdir("/")
    assert files.read_json(tmp_path / "results/model/config.json") == {"name": "config.json of source"}


def test_nothing_of_an_earlier_target_stays(tmp_path: Path):
    source = make_model(tmp_path / "source", "config.json", "model.safetensors")
    model = make_model(tmp_path / "model", "tokenizer.json")
    target.materialise(str(source), None, model)
    assert not (model / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 9}, "mha"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, "gqa"),
        ({"num_attention_heads": 9, "num_key_value_heads": 1}, "mqa"),
        ({"num_attention_heads": 9, "num_key_value_heads": None}, "mha"),
        ({"num_attention_heads": 9}, "mha"),
        ({"num_attention_heads": 9, "num_key_value_heads": 9, "kv_lora_rank": 512}, "mla"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "kv_lora_rank": None}, "gqa"),
    ],
)
def test_the_kind_of_attention_is_read_off_the_heads(config: dict, kind: str):
    assert target.attention_kind(SimpleNamespace(**config)) == kind


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [
        (None, 2, [2]),
        (None, None, []),
        ({}, 2, [2]),
        ({"eos_token_id": None}, 2, [2]),
        ({"eos_token_id": 7}, 2, [2, 7]),
        ({"eos_token_id": [9, 2]}, 2, [2, 9]),
        ({"eos_token_id": 7}, None, [7]),
        ({"eos_token_id": 0}, 2, [0, 2]),
        ({"eos_token_id": [0]}, 0, [0]),
    ],
)
def test_end_tokens_are_those_of_tokenizer_and_generation_together(
    tmp_path: Path, generation: dict | None, tokenizer: int | None, expected: list[int]
):
    if generation is not None:
        files.write_json(tmp_path / "generation_config.json", generation)
    assert target.end_token_ids(tmp_path, tokenizer) == expected
