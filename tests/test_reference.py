# SPDX-License-Identifier: Apache-2.0
"""Published drafters are adopted from each format bit for bit, and refused where they do not fit, with the cure."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest
import torch
from safetensors.torch import load_file

import foreign
import test_replay_dflash as dflash
import test_replay_eagle3 as eagle3
from helpers import HIDDEN, random_target
from pilotfish import constants, export_checks, layers, manifest, reference
from pilotfish.errors import UserError
from pilotfish.heads import TargetTensors

FACTS = {
    "source": "somewhere/target",
    "revision": None,
    "architecture": "LlamaForCausalLM",
    "layers": 4,
    "hidden_size": HIDDEN,
    "vocab_size": eagle3.VOCABULARY,
    "default_capture_layers": None,
}
DRAFTERS = ("eagle3", "dflash", "dflash-whole")
WAYS = [
    ("eagle3", "speculators"),
    ("eagle3", "sglang"),
    ("dflash", "speculators"),
    ("dflash-whole", "speculators"),
    ("dflash-whole", "z-lab"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with its manifest, and a random drafter of each kind for it, in bf16."""
    made = tmp_path_factory.mktemp("references")
    model = random_target(made / "target" / "model")
    paths = [model / "config.json", model / "model.safetensors"]
    manifest.write(
        made / "target" / "manifest.json", schema="target", paths=paths, spec="{}", code="", statistics=FACTS
    )
    drafters = (
        eagle3.reference_model(False, False),
        dflash.reference_model(model),
        dflash.reference_model(model, dflash.VOCABULARY),
    )
    for name, drafter in zip(DRAFTERS, drafters, strict=True):
        drafter.bfloat16().save_pretrained(made / name)
    return made


def adopt(root: Path, source: Path, folder: Path, **facts) -> dict:
    return reference.adopt(
        source, folder, model=root / "target/model", facts=FACTS | facts, target="the/target", speculative_tokens=3
    )


def published(root: Path, name: str, kind: str, folder: Path) -> Path:
    return foreign.FORMATS[kind](root / name, folder)


def change(
    folder: Path, config: Callable[[dict], object] | None = None, weights: Callable[[dict], object] | None = None
):
    """Change a folder's config.json and tensors in place."""
    held, tensors = foreign.read(folder)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    (config or len)(held)
    (weights or len)(tensors)
    foreign.write(folder, held, tensors)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("name", "kind"), WAYS)
def test_a_drafter_comes_back_from_each_format_as_it_was(root: Path, tmp_path: Path, name: str, kind: str, shards: int):
    source = foreign.FORMATS[kind](root / name, tmp_path / "source", shards)
    record = adopt(root, source, tmp_path / "adopted")
    config, tensors = foreign.read(root / name)
    adopted, held = foreign.read(tmp_path / "adopted")
    assert {path.name for path in (tmp_path / "adopted").iterdir()} == set(reference.FILES)
    assert held.keys() == tensors.keys()
    assert all(export_checks.bit_equal(held[each], tensors[each]) for each in tensors)
    assert constants.differences(constants.of_config(config), constants.of_config(adopted)) == []
    key = "eagle_aux_hidden_state_layer_ids" if name == "eagle3" else "aux_hidden_state_layer_ids"
    assert adopted[key] == config[key] == [1, 2, 3]
    assert adopted["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert adopted["speculators_config"]["verifier"]["name_or_path"] == "the/target"
    assert "auto_map" not in adopted
    assert (record["format"], record["converted"], record["filled"], record["dropped"]) == (kind, {}, [], [])


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculators_reads_what_was_adopted(root: Path, tmp_path: Path, name: str):
    from speculators import SpeculatorModelConfig

    adopt(root, published(root, name, "speculators", tmp_path / "source"), tmp_path / "adopted")
    read = SpeculatorModelConfig.from_pretrained(tmp_path / "adopted")
    assert read.speculators_model_type == name.partition("-")[0]
    assert read.transformer_layer_config.rms_norm_eps == 1e-5


def test_what_speculators_calls_causal_is_bidirectional_to_the_server(root: Path, tmp_path: Path):
    source = published(root, "dflash", "speculators", tmp_path / "source")
    change(source, lambda config: config.update(sliding_window_non_causal=False))
    adopt(root, source, tmp_path / "adopted")
    assert json.loads((tmp_path / "adopted/config.json").read_text())["sliding_window_non_causal"] is True


def test_defaults_that_a_config_leaves_out_are_written_out(root: Path, tmp_path: Path):
    source = published(root, "eagle3", "speculators", tmp_path / "source")
    change(source, lambda config: [config["transformer_layer_config"].pop(key) for key in ("head_dim", "hidden_act")])
    adopt(root, source, tmp_path / "adopted")
    layer = json.loads((tmp_path / "adopted/config.json").read_text())["transformer_layer_config"]
    assert (layer["head_dim"], layer["hidden_act"], layer["tie_word_embeddings"]) == (16, "silu", False)


@pytest.mark.parametrize("kind", ["speculators", "sglang"])
def test_without_layer_ids_they_are_the_default_ones(root: Path, tmp_path: Path, kind: str):
    source = published(root, "eagle3", kind, tmp_path / "source")
    change(source, lambda config: [config.pop(key, 0) for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids")])
    facts = {"layers": 12, "default_capture_layers": layers.default_capture_layers(12)}
    adopt(root, source, tmp_path / "adopted", **facts)
    adopted = json.loads((tmp_path / "adopted/config.json").read_text())
    assert adopted["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]


def test_a_newer_zlab_config_has_its_block_size_among_the_nested(root: Path, tmp_path: Path):
    source = published(root, "dflash-whole", "z-lab", tmp_path / "source")
    change(source, lambda config: config["dflash_config"].update(block_size=config.pop("block_size")))
    adopt(root, source, tmp_path / "adopted")
    assert json.loads((tmp_path / "adopted/config.json").read_text())["block_size"] == dflash.BLOCK


def test_an_embedding_or_a_map_that_is_left_out_is_filled_in(root: Path, tmp_path: Path):
    source = published(root, "eagle3", "sglang", tmp_path / "source")
    change(source, None, lambda tensors: [tensors.pop(name) for name in ("embed_tokens.weight", "t2d")])
    record = adopt(root, source, tmp_path / "adopted")
    held = load_file(tmp_path / "adopted/model.safetensors")
    rows = torch.cat([rows for _, rows in TargetTensors(root / "target/model").embedding()])
    assert torch.equal(held["embed_tokens.weight"], rows.bfloat16())
    assert torch.equal(held["t2d"], foreign.read(root / "eagle3")[1]["t2d"])
    assert record["filled"] == ["embed_tokens.weight", "t2d"]


def test_copies_of_the_targets_own_are_dropped_and_told(root: Path, tmp_path: Path):
    """Of embedding and head, and maps of the whole vocabulary to itself."""
    source, held = published(root, "dflash-whole", "z-lab", tmp_path / "source"), TargetTensors(root / "target/model")
    copies = {
        "embed_tokens.weight": torch.cat([rows for _, rows in held.embedding()]),
        "lm_head.weight": torch.cat(list(held.head())),
        "d2t": torch.zeros(dflash.VOCABULARY, dtype=torch.long),
        "t2d": torch.ones(dflash.VOCABULARY, dtype=torch.bool),
    }
    change(source, None, lambda tensors: tensors.update(copies))
    record = adopt(root, source, tmp_path / "adopted")
    assert record["dropped"] == list(copies)
    assert not copies.keys() & load_file(tmp_path / "adopted/model.safetensors").keys()


def test_other_floats_become_bfloat16_and_their_number_is_told(root: Path, tmp_path: Path):
    source = published(root, "eagle3", "sglang", tmp_path / "source")
    change(source, None, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].float()}))
    record = adopt(root, source, tmp_path / "adopted")
    held = load_file(tmp_path / "adopted/model.safetensors")
    assert record["converted"] == {"float32": 1}
    assert torch.equal(held["fc.weight"], foreign.read(root / "eagle3")[1]["fc.weight"])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def settled(**values) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda config: config.update(values))


def nested(key: str, **values) -> Callable[[Path], None]:
    return lambda folder: change(folder, lambda config: config[key].update(values))


def weights(apply: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: change(folder, None, apply)


REFUSED = {
    "no config": ("eagle3", "sglang", lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    "pickles": ("eagle3", "sglang", pickled, "pickled weights .* are never loaded: convert them to safetensors first"),
    "damaged": (
        "eagle3",
        "sglang",
        lambda folder: (folder / "model.safetensors").write_bytes(b"damaged!"),
        "model.safetensors: cannot be read .*; fetch the drafter's files again",
    ),
    "unknown": ("eagle3", "sglang", settled(architectures=["X"]), "config.json: X is no known format; give a drafter"),
    "code": (
        "dflash-whole",
        "z-lab",
        settled(architectures=["X"]),
        "X is no known format; the Python that its auto_map names is never run",
    ),
    "other algorithm": ("eagle3", "speculators", settled(speculators_model_type="peagle"), "peagle is no known format"),
    "other names": (
        "eagle3",
        "sglang",
        weights(lambda held: [held.update({f"model.{name}": held.pop(name)}) for name in list(held)]),
        "LlamaForCausalLMEagle3 is no known format",
    ),
    "missing": (
        "eagle3",
        "sglang",
        weights(lambda held: held.pop("midlayer.mlp.up_proj.weight")),
        "source: tensors layers.0.mlp.up_proj.weight are missing; fetch the drafter's files again",
    ),
    "no map": ("eagle3", "sglang", weights(lambda held: held.pop("d2t")), "tensors d2t are missing"),
    "no head": (
        "dflash",
        "speculators",
        weights(lambda held: held.pop("lm_head.weight")),
        "lm_head.weight are missing",
    ),
    "unread": (
        "dflash",
        "speculators",
        weights(lambda held: held.update({"markov.weight": torch.zeros(2)})),
        "source: nobody would read its tensors markov.weight: it is a drafter of another kind",
    ),
    "own embedding": (
        "dflash-whole",
        "z-lab",
        weights(lambda held: held.update({"embed_tokens.weight": torch.zeros(dflash.VOCABULARY, HIDDEN)})),
        "nobody would read its tensors embed_tokens.weight",
    ),
    "mask embedding": (
        "dflash-whole",
        "z-lab",
        lambda folder: (folder / "mask_embedding.pt").write_bytes(b""),
        "mask_embedding.pt: a mask embedding of its own, which is not replayed",
    ),
    "hidden size": (
        "dflash-whole",
        "z-lab",
        settled(hidden_size=128),
        "hidden_size 128 where the target has 64: it was made for another target",
    ),
    "vocabulary": ("eagle3", "sglang", settled(vocab_size=300), "vocab_size 300 where the target has 200"),
    "draft vocabulary": (
        "eagle3",
        "sglang",
        settled(draft_vocab_size=300),
        "draft_vocab_size 300 where the target has",
    ),
    "layers outside": (
        "dflash-whole",
        "z-lab",
        nested("dflash_config", target_layer_ids=[0, 1, 3]),
        r"layers \[1, 2, 4\] in h\(k\) numbering must rise and lie in 1\.\.3",
    ),
    "layers in disorder": (
        "eagle3",
        "sglang",
        nested("eagle_config", eagle_aux_hidden_state_layer_ids=[1, 0, 2]),
        r"layers \[2, 1, 3\] in h\(k\) numbering must rise",
    ),
    "mask token": ("dflash-whole", "z-lab", nested("dflash_config", mask_token_id=200), "mask_token_id 200 is none of"),
    "no mask token": (
        "dflash-whole",
        "z-lab",
        nested("dflash_config", mask_token_id=None),
        "mask_token_id missing; write what it was trained with into dflash_config",
    ),
    "sliding": (
        "dflash-whole",
        "z-lab",
        settled(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=8),
        "layers with sliding attention, which are not replayed",
    ),
    "causal": ("dflash-whole", "z-lab", settled(is_causal=True), "is_causal is True, which neither the replay nor"),
    "quantised": ("eagle3", "sglang", settled(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
    "unheard of": ("dflash-whole", "z-lab", nested("dflash_config", markov_rank=8), "markov_rank is 8, which neither"),
    "from the anchor": ("dflash", "speculators", settled(sample_from_anchor=True), "sample_from_anchor is True"),
    "tied": ("eagle3", "sglang", settled(tie_word_embeddings=True), "tie_word_embeddings is true"),
    "other layers": ("eagle3", "speculators", nested("transformer_layer_config", model_type="qwen3"), "type 'qwen3'"),
    "no layers": (
        "eagle3",
        "speculators",
        settled(transformer_layer_config=None),
        "transformer_layer_config is missing",
    ),
    "not said": ("eagle3", "speculators", settled(norm_before_residual=None), "norm_before_residual missing"),
    "unreadable": ("eagle3", "sglang", settled(hidden_size="x"), "config.json: transformers cannot read it"),
}


@pytest.mark.parametrize(("name", "kind", "spoil", "says"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_with_the_place_and_the_cure(root, tmp_path: Path, name, kind, spoil, says: str):
    source = published(root, name, kind, tmp_path / "source")
    spoil(source)
    with pytest.raises(UserError, match=says) as refusal:
        adopt(root, source, tmp_path / "adopted")
    assert str(source) in str(refusal.value)
    assert not (tmp_path / "adopted").exists()


def test_a_shard_that_is_not_there_is_named(root: Path, tmp_path: Path):
    source = foreign.as_sglang(root / "eagle3", tmp_path / "source", shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: cannot be read .*fetch"):
        adopt(root, source, tmp_path / "adopted")


@pytest.mark.parametrize("source", ["./nowhere", "~/nowhere", "justaname", "a/b/c"])
def test_a_source_that_is_neither_folder_nor_hub_id_is_an_error(source: str):
    with pytest.raises(UserError, match=r"references: no folder '.*'; give an existing folder or a hub id"):
        reference.locate(source, None)


def test_a_hub_id_is_fetched_without_pickles_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fetch(source: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert not {"x.py", "x.bin", "*"} & set(allow_patterns)
        return str(tmp_path / f"{source.replace('/', '--')}-{revision}")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    assert reference.locate("org/name", "abc") == (tmp_path / "org--name-abc", "org--name-abc")


def test_a_hub_that_gives_nothing_is_an_error_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    def fetch(*_, **__) -> str:
        raise ConnectionError("down")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))
    with pytest.raises(UserError, match=r"'org/name' is no folder here, .*ConnectionError: down.*check the name"):
        reference.locate("org/name", None)
