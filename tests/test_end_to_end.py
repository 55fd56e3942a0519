# SPDX-License-Identifier: Apache-2.0
"""The whole path on the tiny target, through the real engine, as a user runs it."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import foreign
from conftest import snakemake
from faults import Scene
from helpers import flip_bit, plan
from pilotfish import engine, files, responses, samples, shards, turns
from pilotfish.errors import UserError

RUN = Path("results") / "tiny"
TINY = yaml.safe_load((Path(__file__).parent.parent / "config" / "tiny.yaml").read_text(encoding="utf-8"))
PARTS = [f"{number:05d}-of-00002" for number in range(2)]


@pytest.fixture(scope="module")
def run(tiny_run: tuple[Path, str]) -> Path:
    return tiny_run[0] / RUN


def answered(run: Path, split: str) -> list[dict]:
    return [row for part in PARTS for row in files.read_jsonl(run / "responses" / split / f"{part}.jsonl")]


def reader(run: Path, split: str) -> shards.ShardReader:
    return shards.ShardReader([run / "hidden_states" / split / part / "index.json" for part in PARTS])


def test_the_run_ends_by_printing_its_summary(tiny_run: tuple[Path, str]):
    root, said = tiny_run
    summary = (root / RUN / "report.md").read_text(encoding="utf-8").partition("\n## Training")[0]
    assert "dflash, DDTree-8" in summary and "fresh, concurrency 8" in summary
    assert summary in said


def test_a_second_run_has_nothing_to_do(tiny_run: tuple[Path, str]):
    again = snakemake(tiny_run[0])
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout + again.stderr


def test_no_unfinished_work_and_no_pickle_is_left(run: Path):
    names = [path.name for path in run.rglob("*")]
    assert not [name for name in names if name.endswith((".work", ".tmp", ".pt", ".bin", ".pkl", ".lock"))]
    assert not list(run.rglob("incoming/*"))


def test_every_prompt_was_answered_with_exact_ids_and_parsed_reasoning(run: Path):
    rows = answered(run, "train")
    assert [row["row"] for row in rows] == list(range(TINY["prompts"]["train"]))
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert len(stopped) > 0.9 * len(rows)
    assert sum(bool(row["reasoning"]) for row in stopped) > 0.9 * len(stopped)
    assert all("<think>" not in (row["text"] or "") for row in stopped)


def wrapper(run: Path) -> tuple[int, int]:
    """Ids of the tokens that open and close the tiny target's reasoning, as the run recorded them."""
    facts = files.read_json(run / "target" / "manifest.json")["statistics"]["wrapper"]
    return facts["open"], facts["close"]


def test_the_wrapper_tokens_of_the_targets_reasoning_are_known(run: Path, tiny_target: Path):
    tokenizer = Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
    assert wrapper(run) == (tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"))
    facts = files.read_json(run / "target" / "manifest.json")["statistics"]
    assert set(wrapper(run)) <= set(facts["forced_token_ids"])


def test_the_exact_stream_is_trained_on_wrapper_included(run: Path):
    opening, closing = wrapper(run)
    held = reader(run, "train")
    for sample in samples.load(run / "samples" / "train" / "samples.arrow"):
        ids, start = sample["input_ids"], sample["prompt_length"]
        assert ids[start] == opening and closing in ids[start:]
        assert all(sample["loss_mask"][start:]) and not any(sample["loss_mask"][:start])
        assert held.read(sample["row"]).token_ids.tolist() == ids[:-1]


def test_earlier_reasoning_is_stripped_by_the_template_and_samples_hold_what_the_engine_saw(
    run: Path, tiny_target: Path
):
    """Multi-turn prompts: the ids of prompt and answer are the engine's own, not made anew from text."""
    prompts = files.read_jsonl(run / "prompts" / "train.jsonl")
    turns = {row: prompt["messages"] for row, prompt in enumerate(prompts) if len(prompt["messages"]) > 1}
    assert len(turns) > 5 and all("<think>" in messages[1]["content"] for messages in turns.values())
    opening, closing = wrapper(run)
    template = AutoTokenizer.from_pretrained(tiny_target)
    held, found = reader(run, "train"), samples.load(run / "samples" / "train" / "samples.arrow")
    for row, messages in turns.items():
        sample = found[row]
        prompt = sample["input_ids"][: sample["prompt_length"]]
        assert prompt == template.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert not {opening, closing} & set(prompt)
        assert held.read(row).token_ids.tolist() == sample["input_ids"][:-1]


def test_samples_are_the_prompts_ids_then_the_responses(run: Path):
    for sample, row in zip(
        samples.load(run / "samples" / "train" / "samples.arrow"), answered(run, "train"), strict=True
    ):
        assert sample["input_ids"] == row["prompt_token_ids"] + row["token_ids"]
        assert sum(sample["loss_mask"]) == len(row["token_ids"])


def test_all_states_came_from_generation_and_none_needed_a_second_pass(tiny_run: tuple[Path, str]):
    root, said = tiny_run
    assert "rows lack layers" not in said
    assert not list((root / "logs" / "tiny" / "capture").glob("*.engine.log"))


def test_while_states_are_captured_no_token_is_computed_twice(tiny_run: tuple[Path, str]):
    logs = list((tiny_run[0] / "logs" / "tiny" / "respond").glob("*.engine.log"))
    assert logs and all("pilotfish.capture.DraftlessScheduler" in log.read_text(encoding="utf-8") for log in logs)


def test_dflash_is_served_with_the_norms_of_each_layer(tiny_run: tuple[Path, str]):
    log = (tiny_run[0] / "logs" / "tiny" / "serve" / "dflash.engine.log").read_text(encoding="utf-8")
    assert "Injected <class 'pilotfish.cpu_worker.ContextNorms'>" in log


def test_captured_states_are_those_of_transformers_before_each_layer(run: Path, tiny_target: Path):
    """h(k) is Hugging Face's hidden_states[k] for k < L; h(L) gives its logits only through the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    held = reader(run, "heldout")
    assert held.captured == [1, 2, 3, 4]
    states = held.read(0)
    with torch.no_grad():
        golden = model(states.token_ids[None], output_hidden_states=True)
        last_logits = model.lm_head(model.model.norm(states.hidden_states[:, 3].float()))
    for position, layer in enumerate(held.captured[:3]):
        ours = states.hidden_states[:, position].float()
        similarity = [torch.cosine_similarity(ours, each[0], dim=-1).mean().item() for each in golden.hidden_states[:4]]
        assert max(range(4), key=similarity.__getitem__) == layer
        assert similarity[layer] > 0.99
    agree = (last_logits.argmax(-1) == golden.logits[0].argmax(-1)).float().mean().item()
    assert agree > 0.95


@pytest.mark.parametrize("drafter", TINY["drafters"])
def test_each_drafter_makes_most_rounds_accept_something_and_is_served_as_it_is_replayed(run: Path, drafter: str):
    sets = files.read_json(run / "evaluation" / drafter / "manifest.json")["statistics"]["sets"]
    assert set(sets) == {"heldout", "fresh"}
    for levels in sets.values():
        assert set(levels) == {"1", "8"}
        for level in levels.values():
            assert level["summary"]["tau_micro_incl_bonus"] > 1.8
            assert level["parity"]["rounds_equal"] >= 0.96 * level["parity"]["rounds_compared"] > 0


def test_a_draft_tree_accepts_more_than_its_chain_on_every_set(run: Path):
    for name in TINY["evaluation"]["sets"]:
        replay = files.read_json(run / "evaluation" / "dflash" / name / "replay.json")
        (tree,) = replay["trees"]
        assert (tree["budget"], tree["top_k"], tree["depth"], tree["root_counted"]) == (8, 8, 5, False)
        assert tree["summary"]["tau_micro_incl_bonus"] > replay["summary"]["tau_micro_incl_bonus"]


@pytest.mark.parametrize("drafter", TINY["drafters"])
def test_the_export_is_weights_configuration_and_their_manifest_and_no_code(run: Path, drafter: str):
    folder = run / "export" / drafter
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert "auto_map" not in files.read_json(folder / "config.json")


@pytest.mark.parametrize("drafter", TINY["drafters"])
def test_the_training_log_has_a_replay_of_held_out_rows_after_each_epoch(run: Path, drafter: str):
    log = files.read_jsonl(run / "drafters" / drafter / "checkpoint" / "training_log.jsonl")
    taus = [row["tau"] for row in log if row["kind"] == "replay"]
    assert len(taus) == TINY["drafters"][drafter]["epochs"]
    assert taus[-1] > taus[0]


def test_a_published_drafter_in_a_foreign_format_is_measured_as_what_it_was_exported_from(
    tiny_run: tuple[Path, str], tmp_path: Path
):
    root = tmp_path / "work"
    shutil.copytree(tiny_run[0], root, symlinks=True)
    config = {**TINY, "references": {}, "evaluation": {**TINY["evaluation"], "concurrency": [8]}}
    for name, write in (("eagle3", foreign.as_sglang), ("dflash", foreign.as_zlab)):
        write(root / RUN / "export" / name, root / "published" / name)
        config["references"][f"published-{name}"] = {
            "source": f"published/{name}",
            "algorithm": name,
            "capture_layers": TINY["drafters"][name]["capture_layers"],
            "speculative_tokens": {"eagle3": 3, "dflash": 5}[name],
        }
    (root / "config" / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    ran = snakemake(root)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert not {"rule respond", "rule capture", "rule train"} & {
        line.removeprefix("local").rstrip(":") for line in said.splitlines()
    }
    for name in ("eagle3", "dflash"):
        theirs, ours = (
            files.read_json(root / RUN / "evaluation" / each / "heldout" / "replay.json")["rows"]
            for each in (f"published-{name}", name)
        )
        assert theirs == ours
        assert f"published-{name}, chain-" in (root / RUN / "report.md").read_text(encoding="utf-8")


def test_manifests_hold_no_absolute_path_and_no_host(tiny_run: tuple[Path, str]):
    root, _ = tiny_run
    for path in (root / RUN).rglob("manifest.json"):
        assert str(root) not in path.read_text(encoding="utf-8"), path


def test_verify_finds_a_flipped_bit_and_the_next_run_rebuilds_just_that(tiny_run: tuple[Path, str], tmp_path: Path):
    root = tmp_path / "work"
    shutil.copytree(tiny_run[0], root, symlinks=True)

    def run(*arguments: str) -> tuple[int, str]:
        ran = snakemake(root, *arguments)
        return ran.returncode, ran.stdout + ran.stderr

    code, said = run("verify")
    assert code == 0 and "read and sound" in said and "no manifest vouches" not in said
    flip_bit(root / RUN / "samples" / "train" / "samples.arrow", from_end=2000)
    code, said = run("verify")
    assert code != 0 and "samples.arrow: other bytes than manifest.json vouches for" in said
    code, said = run()
    assert code == 0 and "3 of 3 steps (100%) done" in said
    assert f"Rebuilt: {RUN}/samples/train/manifest.json" in said
    assert "Nothing to be done" in run()[1]
    assert run("verify")[0] == 0


def test_rows_without_states_are_captured_by_prefill_and_no_text_is_made_anew(
    tiny_run: tuple[Path, str], tmp_path: Path
):
    root = tmp_path / "work"
    shutil.copytree(tiny_run[0], root, symlinks=True)
    part = RUN / "hidden_states" / "heldout" / PARTS[0]
    before = reader(root / RUN, "heldout").read(3)
    shutil.rmtree(root / RUN / "responses" / "heldout" / f"{PARTS[0]}.captured")
    shutil.rmtree(root / part)
    made = snakemake(root, f"{part}/index.json")
    said = made.stdout + made.stderr
    assert made.returncode == 0, said
    assert "24 of 24 rows lack layers: [1, 2, 3, 4] are captured" in said
    assert "respond.py" not in said
    after = reader(root / RUN, "heldout").read(3)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    similarity = torch.cosine_similarity(after.hidden_states.float(), before.hidden_states.float(), dim=-1)
    assert similarity.min() > 0.99


def test_sampled_answers_are_generated_without_capture(
    tiny_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """While it captures, vLLM's CPU build makes nonsense of sampled text; the states come by prefill then."""
    scene = Scene(tiny_run[0], tmp_path / "work", monkeypatch)
    job = next(job for job in plan(scene.root) if job.rule == "respond")
    spec = json.loads(job.line[job.line.index("--spec") + 1])
    lines = []

    def start(line: list[str], *_) -> None:
        lines.append(line)
        raise UserError("started")

    monkeypatch.setattr(engine, "Engine", start)
    for temperature in (0.0, 0.8):
        sampling = {**spec["sampling"], "temperature": temperature, "max_tokens": 63}
        changed = json.dumps({**spec, "sampling": sampling})
        with pytest.raises(UserError, match="started"):
            scene.run("respond", ["--spec", changed], **job.wildcards)
    assert ["--kv-transfer-config" in line for line in lines] == [True, False]


HELDOUT = RUN / "prompts" / "heldout.jsonl"


def respond_line(root: Path, output: Path, max_tokens: int, prompts: Path = HELDOUT, part: str = PARTS[0]) -> list[str]:
    """`python scripts/respond.py ...` for one part of some prompts, as the rule would write it."""
    spec = {
        "trust_remote_code": False, "reasoning_parser": "deepseek_r1", "seed": 0,
        "sampling": {"max_tokens": max_tokens, "temperature": 0.0, "top_p": 1.0, "chat_template_kwargs": {}},
    }  # fmt: skip
    options = {
        **TINY["engine"], "dtype": "bfloat16", "tensor_parallel": 1, "gpu_memory_utilization": 0.9, "port": None,
        "start_timeouts": dict.fromkeys(engine.STAGES, 600), "restarts": 0, "stall_timeout": 300, "extra_args": [],
        "max_num_seqs": 4,
    }  # fmt: skip
    return [
        sys.executable, "scripts/respond.py", "--spec", json.dumps(spec), "--part", part,
        "--target", str(RUN / "target" / "manifest.json"), "--prompts", str(prompts),
        "--engine", json.dumps(options), "--capture-layers", '[["eagle3", [1, 2, 3]]]', "--output", str(output),
        "--captured", str(output.with_suffix(".captured")), "--engine-log", str(output.with_suffix(".log")),
    ]  # fmt: skip


def test_the_target_answers_a_conversation_turn_by_turn_and_tools_pass_through_its_template(
    tiny_run: tuple[Path, str], tiny_target: Path, tmp_path: Path
):
    """Its own answer, without its reasoning, stands before the second turn; what tools were asked stays the data's."""
    root, _ = tiny_run
    first, second = (prompt["messages"][-1] for prompt in files.read_jsonl(root / HELDOUT)[:2])
    tools = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}]
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    called = [first, {"role": "assistant", "content": "", "tool_calls": calls}]
    called.append({"role": "tool", "tool_call_id": "c", "content": "7"})
    conversation = {"id": "a", "messages": [first, {"role": "assistant", "content": "of the data"}, second]}
    asked = [*map(turns.unanswered, turns.expanded(conversation)), {"id": "b", "messages": called, "tools": tools}]
    files.write_jsonl(tmp_path / "asked.jsonl", asked)
    line = respond_line(root, tmp_path / "part.jsonl", 64, tmp_path / "asked.jsonl", "00000-of-00001")
    done = subprocess.run(line, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two, three = files.read_jsonl(tmp_path / "part.jsonl")
    assert one["reasoning"] and one["text"]
    template = AutoTokenizer.from_pretrained(tiny_target)
    said = [first, {"role": "assistant", "content": one["text"]}, second]
    ids = template.apply_chat_template(called, tools=tools, add_generation_prompt=True)["input_ids"]
    assert three["prompt_token_ids"] == ids and len(ids) > len(one["prompt_token_ids"])
    for row, messages in ((one, said[:1]), (two, said)):
        assert (
            row["prompt_token_ids"] == template.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )


def test_a_job_that_is_killed_keeps_its_rows_and_takes_its_engine_along(tiny_run: tuple[Path, str], tmp_path: Path):
    root, _ = tiny_run
    line = respond_line(root, tmp_path / "part.jsonl", max_tokens=8)
    job = subprocess.Popen(line, cwd=root, stderr=subprocess.PIPE, text=True)
    assert job.stderr is not None
    said = iter(job.stderr.readline, "")
    assert any("canary: row 0" in each for each in said)
    family = psutil.Process(job.pid).children(recursive=True)
    assert family
    job.send_signal(signal.SIGKILL)
    job.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    kept = list((tmp_path / "part.jsonl.work").rglob("rows.jsonl"))
    assert len(kept) == 1 and kept[0].read_text(encoding="utf-8").count("\n") >= 1
    again = subprocess.run(line, cwd=root, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "of 24 rows are already done" in again.stderr
    # Greedy answers of a bigger batch may part in the last bits; the prompts may not.
    first = files.read_jsonl(root / RUN / "responses" / "heldout" / f"{PARTS[0]}.jsonl")
    second = files.read_jsonl(tmp_path / "part.jsonl")
    assert [row["prompt_token_ids"] for row in first] == [row["prompt_token_ids"] for row in second]
    # Eight tokens end inside the reasoning, which the gate counts and the policy decides.
    facts = files.read_json(root / RUN / "target" / "manifest.json")["statistics"]
    policy = {"truncated": "drop", "max_truncated": 0.5, "max_loops": 0.1, "max_flawed": 0.0}
    review = responses.Review(facts, policy, responses.detokeniser(root / RUN / "target" / "model", False))
    reasons = [review.take(row) for row in second]
    assert all(row["reasoning"] and row["text"] is None for row in second)
    assert review.statistics()["cut_in_reasoning"] == len(second)
    assert set(reasons) == {"cut after 8 tokens"}
    with pytest.raises(UserError, match="24 of 24 answers were cut at max_tokens"):
        review.verdict("responses/heldout", None)
