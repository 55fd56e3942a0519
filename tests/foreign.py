# SPDX-License-Identifier: Apache-2.0
"""A drafter in speculators' format written as others publish theirs: as SGLang's EAGLE-3, as z-lab's DFlash."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pilotfish import files

NO_PART_OF_IT = ("rope_parameters", "pad_token_id")  # as Transformers 4 wrote a config


def write(folder: Path, config: dict, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> Path:
    """A folder as Transformers saves it, its tensors in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "config.json", config)
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names[shard::shards], file)
    files.write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    return folder


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Config and tensors of a drafter in speculators' format."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


def _flat(config: dict) -> dict:
    layer = config["transformer_layer_config"]
    flat = {key: value for key, value in layer.items() if key not in NO_PART_OF_IT}
    return flat | {
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }


def as_speculators(drafter: Path, folder: Path, shards: int = 1) -> Path:
    """As it is, with the Python that speculators saves beside it."""
    write(folder, *read(drafter), shards)
    for path in drafter.glob("*.py"):
        shutil.copy(path, folder)
    return folder


def as_sglang(drafter: Path, folder: Path, shards: int = 1) -> Path:
    """As SpecForge saves an EAGLE-3 drafter for SGLang: `midlayer.*`, and layer ids that count outputs."""
    config, tensors = read(drafter)
    ids = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]
    made = {
        **_flat(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "norm_before_residual": config["norm_before_residual"],
        "norm_output": config["norm_output"],
        "sliding_window": None,
        "use_sliding_window": False,
    }
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return write(folder, made, renamed, shards)


def as_zlab(drafter: Path, folder: Path, shards: int = 1) -> Path:
    """As z-lab publishes a DFlash drafter: Qwen3's config with one more table, code beside it that is not needed."""
    config, tensors = read(drafter)
    made = {
        **_flat(config),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config["block_size"],
        "dflash_config": {
            "mask_token_id": config["mask_token_id"],
            "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
        },
        "num_target_layers": 4,
    }
    write(folder, made, tensors, shards)
    (folder / "dflash.py").write_text("raise RuntimeError('never run')\n", encoding="utf-8")
    return folder


FORMATS = {"speculators": as_speculators, "sglang": as_sglang, "z-lab": as_zlab}
