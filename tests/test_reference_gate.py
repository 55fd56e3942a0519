# SPDX-License-Identifier: Apache-2.0
"""The gate of an adopted drafter passes what fits the target and the configuration, and names what does not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults import run_line
from pilotfish import constants, files, manifest, reference
from pilotfish.errors import UserError
from test_reference import WAYS, nested, published, root, settled, weights  # noqa: F401

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def scripts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """Adopts a drafter by its script, and returns what runs its gate with declared values and reads the manifest."""
    adopted = tmp_path / "references" / "it"

    def begin(name: str, kind: str) -> tuple[Path, Callable[..., dict]]:
        source = published(root, name, kind, tmp_path / "source")
        spec = {"source": str(source), "revision": None, "speculative_tokens": 3}
        shared = ["--target", str(root / "target/manifest.json"), "--spec"]
        script = str(SCRIPTS / "adopt_reference.py")
        run_line(["python", script, *shared, json.dumps(spec), "--output", str(adopted)], monkeypatch)
        declared = {"algorithm": name.partition("-")[0], "capture_layers": [1, 2, 3], "speculative_tokens": 3}

        def gate(**changes) -> dict:
            spec = json.dumps({**declared, "max_model_len": 128, **changes})
            line = ["python", str(SCRIPTS / "validate_reference.py"), *shared, spec, "--reference", str(adopted)]
            run_line([*line, "--manifest", str(adopted / "manifest.json")], monkeypatch)
            return manifest.read(adopted / "manifest.json", "reference")

        return adopted, gate

    return begin


@pytest.mark.parametrize(("name", "kind"), WAYS)
def test_the_gate_passes_what_was_adopted_and_says_what_it_is(scripts, root: Path, name: str, kind: str):  # noqa: F811
    folder, gate = scripts(name, kind)
    found = gate()
    said = found["statistics"]
    assert set(found["files"]) == set(reference.FILES)
    assert (said["format"], said["algorithm"]) == (kind, name.partition("-")[0])
    assert (said["capture_layers"], said["speculative_tokens"]) == ([1, 2, 3], 3)
    assert said["parameters"] == sum(
        each.numel() for each in load_file(folder / "model.safetensors").values() if each.is_floating_point()
    )
    assert constants.read(said["constants"], "it") == constants.of_config(files.read_json(root / name / "config.json"))


@pytest.mark.parametrize(
    ("name", "declared", "says"),
    [
        ("eagle3", {"algorithm": "dflash"}, "a drafter of eagle3, not dflash; set `algorithm: eagle3`"),
        (
            "eagle3",
            {"capture_layers": [0, 1, 2]},
            r"are \[1, 2, 3\], not \[0, 1, 2\]; set `capture_layers: \[1, 2, 3\]`",
        ),
        ("dflash", {"speculative_tokens": 4}, "blocks of 4, .*; set `speculative_tokens: 3`, not 4"),
        ("eagle3", {"speculative_tokens": 4}, "speculative_tokens 3, not 4 as configured"),
        ("eagle3", {"max_model_len": 4096}, "max_position_embeddings 2048 is below engine.max_model_len 4096"),
    ],
)
def test_the_gate_names_where_the_configuration_says_otherwise(scripts, name: str, declared: dict, says: str):
    _, gate = scripts(name, "speculators")
    with pytest.raises(UserError, match=says):
        gate(**declared)


def poked(name: str, value: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
        held[name].view(-1)[1] = value
        save_file(held, folder / "model.safetensors")

    return apply


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("eagle3", poked("fc.weight", float("nan")), r"fc\.weight: 1 of .* NaN or infinite"),
        ("eagle3", poked("fc.weight", 7.0), r"fc\.weight: not bit for bit what was read from the source"),
        ("eagle3", poked("d2t", 150), r"arange \+ d2t is not where t2d is true"),
        ("eagle3", weights(lambda held: held.pop("norm.weight")), r"norm\.weight: missing"),
        (
            "dflash",
            weights(lambda held: held.update({"norm.weight": torch.ones(2).bfloat16()})),
            r"shape \[2\], not \[64\]",
        ),
        ("dflash", lambda folder: (folder / "x.py").touch(), r"x\.py: no file of an adopted drafter"),
        ("eagle3", settled(auto_map={"": "x"}), "auto_map asks a server to run Python"),
        ("dflash", settled(sliding_window_non_causal=False), "the engine would make every layer causal"),
        ("eagle3", settled(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), r"layers \[1, 2, 4\] in h\(k\) numbering must"),
    ],
    ids=["NaN", "another value", "map", "missing", "shape", "stray file", "code", "causal", "layers"],
)
def test_the_gate_refuses_a_folder_that_changed(scripts, name: str, spoil: Callable[[Path], None], says: str):
    folder, gate = scripts(name, "speculators")
    spoil(folder)
    layers_now = [1, 2, 4] if "1, 2, 4" in says else [1, 2, 3]
    with pytest.raises(UserError, match=says):
        gate(capture_layers=layers_now)


def test_the_gate_refuses_what_the_replay_has_no_forward_pass_for(scripts):
    folder, gate = scripts("eagle3", "speculators")
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    nested("transformer_layer_config", rope_parameters=scaled)(folder)
    with pytest.raises(UserError, match="rope_type = 'linear' cannot be replayed"):
        gate()
