# SPDX-License-Identifier: Apache-2.0
"""Compose a run's report, as Markdown, from its manifests, its measurements and Snakemake's benchmarks."""

import json
from pathlib import Path

from pilotfish import costs, files
from pilotfish.markdown import table


def compose(results: Path, benchmarks: Path, run: str, drafters: dict[str, dict]) -> str:
    """The whole report; `drafters` gives each drafter's draft vocabulary size and speculative tokens."""
    found = {name: Drafter(results, name, **facts) for name, facts in drafters.items()}
    lines = [f"# Pilotfish run `{run}`", "", *_summary(results, found), ""]
    for name, drafter in found.items():
        lines += [f"## Training of `{name}`", "", *drafter.training(), ""]
        lines += [f"## Serving with `{name}`", "", *drafter.serving(), ""]
    lines += ["## Cost of each stage", "", *costs.stages(results, benchmarks), ""]
    lines += ["## Gates", "", *costs.gates(results, benchmarks), ""]
    lines += ["## Serve it", "", *_serve_lines(results, found)]
    return "\n".join(lines) + "\n"


class Drafter:
    """What a run knows of one drafter."""

    def __init__(self, results: Path, name: str, size: int, speculative_tokens: int):
        self.name, self.k = name, speculative_tokens
        self.vocabulary = _statistics(results / "vocabulary" / str(size) / "manifest.json")
        self.training_facts = _statistics(results / "drafters" / name / "manifest.json")
        self.rehearsal = _statistics(results / "drafters" / name / "rehearsal" / "manifest.json")
        self.replay = files.read_json(results / "evaluation" / name / "replay.json")["summary"]
        self.levels = _statistics(results / "evaluation" / name / "manifest.json")
        self.log = files.read_jsonl(results / "drafters" / name / "checkpoint" / "training_log.jsonl")

    def training(self) -> list[str]:
        """Loss and accuracy by training-time test step, at the end of training and held out."""
        steps = [row for row in self.log if row["kind"] == "train"]
        tail = steps[-max(1, len(steps) // 10) :]
        rows = [
            _training_row(f"held out, epoch {row['epoch'] + 1}", [row]) for row in self.log if row["kind"] == "heldout"
        ]
        rows += [_training_row("training, last tenth", tail)]
        ttt = _ttt_steps(steps[0])
        header = ["", *(f"loss {i + 1}" for i in range(ttt)), *(f"accuracy {i + 1}" for i in range(ttt))]
        note = (
            f"{len(steps)} steps. Accuracy at step i: share of positions where this and all earlier drafted "
            "tokens are the target's first choice within the draft vocabulary, so it is a little optimistic; "
            "replay and serving are not."
        )
        return [*table(header, rows), "", note]

    def serving(self) -> list[str]:
        """One row a concurrency: speed, tau, joint rates, identity of greedy outputs, parity with replay."""
        joint = [f"joint {i + 1}" for i in range(self.k)]
        header = ["concurrency", "baseline tok/s", "drafter tok/s", "speed-up", "tau", *joint, "rounds"]
        rows = [
            [
                level, f"{x['baseline_tokens_per_second']:.1f}", f"{x['tokens_per_second']:.1f}",
                f"{x['speedup']:.2f}x", _tau(x["summary"]), *_rates(x["summary"]["joint"]),
                x["summary"]["rounds"],
            ]
            for level, x in self.levels.items()
        ]  # fmt: skip
        interval = "{:.2f} to {:.2f}".format(*self.replay["tau_micro_interval_95"])
        lines = table(header, rows)
        lines += [
            "",
            f"Replay of all {self.replay['rows']} held-out responses: tau {_tau(self.replay)} "
            f"(95% interval {interval}), joint {' '.join(_rates(self.replay['joint']))}, "
            f"{self.replay['rounds']} rounds.",
            "",
        ]
        for level, x in self.levels.items():
            lines += [f"- Concurrency {level}: {_identity(x)} {_parity(x['parity'])}"]
        lines += ["", "tau is 1 + accepted / rounds (`tau_micro_incl_bonus`), greedy."]
        return lines


def _identity(level: dict) -> str:
    text = (
        f"{level['identical_to_baseline']} of {level['prompts']} greedy outputs identical to the baseline's at "
        "the same concurrency"
    )
    floor = level["baseline_identical_to_its_first_level"]
    if floor < level["prompts"]:
        text += f" (the baseline agrees with its own first level in {floor})"
    return f"{text}. {_departures(level['text_against_baseline'])}".rstrip()


def _departures(text: dict) -> str:
    """How far apart the target's logits are where the texts part."""
    if not text["rows_differing"]:
        return ""
    if not text["rows_judged"]:
        return "None of the places where they part can be judged: no state is stored there."
    return (
        f"Where they part, the two tokens' logits lie at most {text['largest_gap']:.2f} standard deviations apart "
        f"({text['rows_judged']} of {text['rows_differing']} places judged): arithmetic noise."
    )


def _parity(parity: dict) -> str:
    share = parity["rounds_equal"] / parity["rounds_compared"]
    return (
        f"Served and replayed rounds equal: {share:.1%} of the {parity['rounds_compared']} that lie in text both "
        f"share ({parity['rounds_served']} served); tau there {parity['tau_served']:.4f} served, "
        f"{parity['tau_replay']:.4f} replayed."
    )


def _training_row(name: str, rows: list[dict]) -> list[str]:
    def mean(key: str) -> str:
        return f"{sum(row[key] for row in rows) / len(rows):.3f}"

    ttt = _ttt_steps(rows[0])
    return [name, *(mean(f"loss_{i}") for i in range(ttt)), *(mean(f"full_acc_{i}") for i in range(ttt))]


def _ttt_steps(row: dict) -> int:
    """Training-time test steps that a row of the training log tells of."""
    return sum(key.startswith("full_acc_") for key in row)


def _statistics(path: Path) -> dict:
    return files.read_json(path)["statistics"]


def _tau(summary: dict) -> str:
    return f"{summary['tau_micro_incl_bonus']:.3f}"


def _rates(rates: list[float]) -> list[str]:
    return [f"{rate:.3f}" for rate in rates]


def _summary(results: Path, drafters: dict[str, Drafter]) -> list[str]:
    target = _statistics(results / "target" / "manifest.json")
    rows: list[list[object]] = [["target", f"{target['source']} ({target['architecture']})"]]
    for split in ("train", "heldout"):
        data = _statistics(results / "responses" / split / "manifest.json")
        name = {"train": "training", "heldout": "held-out"}[split]
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(data["finish_reasons"].items()))
        rows.append([f"{name} rows", f"{data['ok']} answered, {data['failed']} refused ({ends})"])
        rows.append([f"{name} answers", _answers(data)])
        thought = f" ({data['reasoning_tokens']} of them reasoning)" if data["reasoning_tokens"] else ""
        rows.append([f"{name} tokens", f"{data['prompt_tokens']} prompt, {data['response_tokens']} response{thought}"])
    states = _statistics(results / "hidden_states" / "train" / "manifest.json")
    rows.append(["capture layers, h(k)", " ".join(map(str, states["capture_layers"]))])
    rows.append(["layers against transformers", _layers(states["recomputed"])])
    for name, drafter in drafters.items():
        rows += [[f"{name}: {key}", value] for key, value in _drafter_summary(drafter)]
    return table(["", "value"], rows, left=2)


def _answers(data: dict) -> str:
    """The mode, what was left out, and what is remarkable, of a split's answers."""
    parts = [data["mode"], f"{data['kept']} kept"]
    parts += [f"{count} left out as {kind}" for kind, count in sorted(data["left_out"].items())]
    cut = f", {data['cut_in_reasoning']} inside the reasoning" if data["cut_in_reasoning"] else ""
    return ", ".join(parts) + f"; {data['truncated']} cut{cut}; {data['loops']} end in a loop"


def _layers(probe: dict) -> str:
    """The golden probe: each layer's relative error, and that of the layer that comes next."""
    errors = [
        f"h({layer}) {each['error']:.3f} (next {each['next_best']} {each['next_error']:.2f})"
        for layer, each in sorted(probe["layers"].items(), key=lambda item: int(item[0]))
    ]
    return f"relative error {', '.join(errors)}; {probe['rows']} rows recomputed"


def _coverage(vocabulary: dict, k: int) -> str:
    by_kind = [
        f"{vocabulary[key]:.2%} of {kind}"
        for kind in ("reasoning", "answer")
        if (key := f"coverage_heldout_{kind}") in vocabulary
    ]
    split = f" ({', '.join(by_kind)})" if len(by_kind) > 1 else ""
    return (
        f"{vocabulary['draft_vocab_size']} tokens, covers {vocabulary['coverage_train']:.2%} of training, "
        f"{vocabulary['coverage_heldout']:.2%} of held-out tokens{split}; no tau above "
        f"{vocabulary['tau_ceiling_heldout'][str(k)]:.2f} is possible with it"
    )


def _rehearsal(drafter: Drafter) -> str:
    accepted = drafter.rehearsal["per_step_accepted"]
    full = sum(each == drafter.k for each in accepted)
    return (
        f"row {drafter.rehearsal['row']} learnt by heart in {drafter.rehearsal['steps']} steps, served in "
        f"{full} full blocks of {len(accepted)}"
    )


def _drafter_summary(drafter: Drafter) -> list[tuple[str, str]]:
    vocabulary = drafter.vocabulary
    last = drafter.training_facts["heldout"][-1]
    gate = drafter.training_facts["acceptance"]
    accuracy = [last[f"full_acc_{step}"] for step in range(_ttt_steps(last))]
    rows = [
        ("draft vocabulary", _coverage(vocabulary, drafter.k)),
        ("held-out loss, accuracy by step", f"{last['loss']:.3f}, {' '.join(_rates(accuracy))}"),
        ("rehearsal", _rehearsal(drafter)),
        (
            "replay tau",
            f"{_tau(drafter.replay)} (on {gate['rows']} of the rows {gate['tau_replay']:.3f}, where the most frequent "
            f"continuations give {gate['tau_most_frequent']:.3f})",
        ),
    ]
    for level, x in drafter.levels.items():
        rows.append(
            (
                f"served at concurrency {level}",
                f"tau {_tau(x['summary'])} (joint {' '.join(_rates(x['summary']['joint']))}), "
                f"{x['baseline_tokens_per_second']:.1f} -> {x['tokens_per_second']:.1f} tokens/s = "
                f"{x['speedup']:.2f}x, {x['identical_to_baseline']} of {x['prompts']} outputs identical",
            )
        )
    return rows


def _serve_lines(results: Path, drafters: dict[str, Drafter]) -> list[str]:
    lines = ["From the repository's folder:", "", "```sh"]
    for name, drafter in drafters.items():
        speculative = {"model": f"{results}/export/{name}", "num_speculative_tokens": drafter.k}
        lines += [f"vllm serve {results}/target/model --speculative-config '{json.dumps(speculative)}'"]
    lines += [
        "```",
        "",
        "With the CPU build of vLLM, whose `vllm` command fails on its own version look-up, write",
    ]
    lines += ["`python -m vllm.entrypoints.openai.api_server --model` for `vllm serve`."]
    return lines
