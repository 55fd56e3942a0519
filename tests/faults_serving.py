# SPDX-License-Identifier: Apache-2.0
"""Faults of the export, of the server and of the evaluation."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from faults import Scene, fault
from helpers import executable, plan
from pilotfish import engine, files, speed

EXPORT, SERVED = "export/eagle3", "evaluation/eagle3/served.json"
SET, LEVEL = "heldout", "8"


def change_tensors(scene: Scene, change: Callable[[dict], None]) -> None:
    """Rewrite the export's weights; `change` edits the tensors in place."""
    path = scene.path(f"{EXPORT}/model.safetensors")
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # it may be the checkpoint's file under a second name
    save_file(tensors, path)


def change_layer(scene: Scene, **changes) -> None:
    """Change keys of the decoder layer in the export's config.json."""
    scene.edit_json(f"{EXPORT}/config.json", lambda config: config["transformer_layer_config"].update(changes))


@fault("Export and serving", "`d2t` missing", "validate_export", r"export/eagle3: .*\n +d2t: missing\n.*export the")
def d2t_missing(scene: Scene) -> None:
    change_tensors(scene, lambda tensors: tensors.pop("d2t"))


@fault(
    "Export and serving",
    "trained head overwritten",
    "validate_export",
    r"export/eagle3: (.*\n)+ +lm_head\.weight: not bit for bit the verified checkpoint's\n.*export the",
)
def trained_head_overwritten(scene: Scene) -> None:
    target = load_file(scene.path("target/model/model.safetensors"))
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"])

    def overwrite(tensors: dict) -> None:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        tensors["lm_head.weight"] = head[ids].bfloat16()

    change_tensors(scene, overwrite)


@fault(
    "Export and serving",
    "layer ids missing so the server falls back silently",
    "validate_export",
    r"export/eagle3/config\.json: eagle_aux_hidden_state_layer_ids missing, .*export the drafter again",
)
def layer_ids_missing(scene: Scene) -> None:
    scene.edit_json(f"{EXPORT}/config.json", lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))


@fault(
    "Export and serving",
    "rope theta or scaling lost",
    "validate_export",
    r"config\.json: rope_theta 500000\.0, not 10000\.0 as trained(.*\n)+.*rope_scaling .*as trained(.*\n)+.*run again",
)
def rope_lost(scene: Scene) -> None:
    change_layer(scene, rope_parameters={"rope_theta": 500000.0, "rope_type": "default", "factor": 4.0})


@fault(
    "Export and serving",
    "`max_position_embeddings` 2048",
    "validate_export",
    r"config\.json: max_position_embeddings 128 is below engine\.max_model_len 256; lower the latter",
)
def too_few_positions(scene: Scene) -> None:
    change_layer(scene, max_position_embeddings=128)


@fault(
    "Export and serving",
    "wrong sliding window or causality",
    "validate_export",
    r"config\.json: sliding_window 2048, not None as trained\n.*causal False, not True as trained\n.*run again",
)
def wrong_window(scene: Scene) -> None:
    change_layer(scene, sliding_window=2048, is_causal=False)


@fault(
    "Export and serving",
    "NaN in an exported tensor",
    "validate_export",
    r"export/eagle3: (.*\n)+ +fc\.weight: 1 of \d+ values are NaN or infinite, the first at \[3, 5\](.*\n)+.*run again",
)
def nan_exported(scene: Scene) -> None:
    def damage(tensors: dict) -> None:
        tensors["fc.weight"][3, 5] = float("nan")

    change_tensors(scene, damage)


@fault(
    "Export and serving",
    "the engine sees other constants than were trained",
    "validate_evaluation",
    r"eagle3/served\.json: (.*\n)+.*the engine saw norm_before_residual False, not True as trained; export and serve",
)
def engine_sees_others(scene: Scene) -> None:
    scene.edit_json(SERVED, lambda served: served["engine"]["drafter"].update(norm_before_residual=False))


# Answers as vLLM does, for the model that ROOT names and under the name that it was told.
IMPOSTOR = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        cards = [{"id": name, "root": ROOT} for name in NAMES]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": cards}).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def serve_with(
    scene: Scene, root: str, names: str = "sys.argv[sys.argv.index('--served-model-name') + 1:][:2]"
) -> None:
    """Run the serving job with another server in vLLM's place."""
    code = f"import sys\nROOT, NAMES = {root!r}, {names}\n{IMPOSTOR}"
    scene.monkeypatch.setattr(engine.sys, "executable", executable(Path.cwd() / "impostor", code))
    scene.run("serve")


@fault(
    "Export and serving",
    "server started for another model",
    "serve",
    r"http://127\.0\.0\.1:\d+: a server for \['another/model'\] answers, not for '.*/target/model'; stop the process",
)
def another_model(scene: Scene) -> None:
    serve_with(scene, "another/model")


@fault(
    "Export and serving",
    "another job's server answers on the port",
    "serve",
    r"http://127\.0\.0\.1:\d+: another job's server answers \(as \['target'\]\); stop the process",
)
def another_jobs_server(scene: Scene) -> None:
    serve_with(scene, str(scene.path("target/model")), names="['target']")


@fault(
    "Export and serving",
    "port already taken by a foreign server",
    "serve",
    r"engine\.port: port \d+ is in use by another process .*choose another port",
)
def port_taken(scene: Scene) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        (line,) = (job.line for job in plan(scene.root) if job.rule == "serve")
        options = json.loads(line[line.index("--engine") + 1]) | {"port": foreign.getsockname()[1]}
        scene.run("serve", ["--engine", json.dumps(options)])


def change_level(scene: Scene, change: Callable[[dict], None]) -> None:
    """Edit what was measured with the drafter on one set at one concurrency."""
    scene.edit_json(SERVED, lambda served: change(served["sets"][SET][LEVEL]))


@fault(
    "Export and serving",
    "served rounds differ from replayed ones",
    "validate_evaluation",
    rf"{SET}, concurrency {LEVEL}: \d+\.\d% of \d+ rounds equal the replay's .*"
    r"the drafter's forward; compare their versions",
)
def rounds_differ(scene: Scene) -> None:
    def move(level: dict) -> None:
        """One accepted token a response goes from a round to the one behind it; no sum changes."""
        for answer in level["answers"]:
            steps = answer["per_step_accepted"]
            places = [i for i in range(len(steps) - 1) if steps[i] == steps[i + 1] + 1]
            for i in places[:3]:
                steps[i], steps[i + 1] = steps[i + 1], steps[i]

    change_level(scene, move)


@fault(
    "Export and serving",
    "the engine's text is not the target's",
    "validate_evaluation",
    rf"{SET}, concurrency {LEVEL}: the engine with the drafter does not give the target's text \(1 rows(.*)"
    r"row 5, response token 30: \d+ where the baseline has \d+, .*so serve again",
)
def other_text(scene: Scene) -> None:
    def alter(level: dict) -> None:
        ids = level["answers"][5]["token_ids"]
        ids[30] = (ids[30] + 1) % 400

    change_level(scene, alter)


@fault(
    "Export and serving",
    "counters disagree",
    "validate_evaluation",
    rf"{SET}, concurrency {LEVEL}: the engine's counters and its requests disagree; "
    r"was another client using it\? serve again",
)
def counters_disagree(scene: Scene) -> None:
    def count_more(level: dict) -> None:
        level["counters"]["rounds"] += 1

    change_level(scene, count_more)


@fault(
    "Data",
    "thinking mode of data differs from evaluation",
    "validate_evaluation",
    r"served\.json: (.*\n)+.*the answers are 'closed by the template', those trained on 'thinking' "
    r".*serve with the responses\.chat_template_kwargs",
)
def other_mode(scene: Scene) -> None:
    wrapper = files.read_json(scene.path("target/manifest.json"))["statistics"]["wrapper"]

    def close_reasoning(served: dict) -> None:
        """Every answer loses its reasoning's marks, and all that is told of its length is set right."""
        for level, measured in served["sets"][SET].items():
            for answer in measured["answers"]:
                answer["prompt_token_ids"] += [wrapper["open"], wrapper["close"]]
                answer["token_ids"] = [t for t in answer["token_ids"] if t not in wrapper.values()]
            lengths = [len(answer["token_ids"]) for answer in measured["answers"]]
            rows = speed.chunks(len(lengths), int(level))
            times = [seconds for seconds, _ in measured["chunks"]]
            measured["chunks"] = [[t, sum(lengths[r] for r in chunk)] for t, chunk in zip(times, rows, strict=True)]
            measured["tokens"] = sum(lengths)
            measured["tokens_per_second"] = measured["tokens"] / measured["seconds"]

    scene.edit_json(SERVED, close_reasoning)


@fault(
    "Export and serving",
    "time that was left out of a chunk",
    "validate_evaluation",
    rf"served\.json: 1 check.*\n.*row {SET} at concurrency {LEVEL}: seconds must be those of the chunks; serve again",
)
def time_left_out(scene: Scene) -> None:
    def shorten(level: dict) -> None:
        level["chunks"][0][0] /= 2

    change_level(scene, shorten)
