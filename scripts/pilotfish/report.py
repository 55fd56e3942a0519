# SPDX-License-Identifier: Apache-2.0
"""Compose a run's report, as Markdown, from its manifests, its measurements and Snakemake's benchmarks."""

import json
from pathlib import Path

from pilotfish import comparison, costs, files
from pilotfish.markdown import table


def compose(results: Path, benchmarks: Path, plan: Path, run: str, evaluated: dict[str, dict], sets: list[str]) -> str:
    """The whole report; `evaluated` gives, by name, each drafter's and reference's facts (see `Evaluated`).

    `plan` is what the run was planned to cost, a file that need not be there.
    """
    found = {
        name: (Reference if facts["kind"] == "reference" else Drafter)(results, name, sets, facts)
        for name, facts in evaluated.items()
    }
    drafters = {name: each for name, each in found.items() if isinstance(each, Drafter)}
    lines = [f"# Pilotfish run `{run}`", "", *comparison.tables(list(found.values()), sets), ""]
    lines += ["## Data and drafters", "", *_summary(results, drafters, sets), ""]
    for name, drafter in drafters.items():
        lines += [f"## Training of `{name}`", "", *drafter.training(), ""]
    for name, each in found.items():
        lines += [f"## Serving with `{name}`", "", *_serving(each), ""]
    lines += ["## Cost of each stage", "", *costs.stages(results, benchmarks, plan), ""]
    lines += ["## Gates", "", *costs.gates(results, benchmarks), ""]
    lines += ["## Serve it", "", *_serve_lines(results, found)]
    return "\n".join(lines) + "\n"


class Evaluated:
    """What a run knows of a drafter or a reference: `facts` has its `kind`, `algorithm`, `speculative_tokens`."""

    def __init__(self, results: Path, name: str, sets: list[str], facts: dict):
        self.name, self.k, self.algorithm = name, facts["speculative_tokens"], facts["algorithm"]
        self.folder = results / ("references" if facts["kind"] == "reference" else "export") / name
        folder = results / "evaluation" / name
        self.replays = {each: files.read_json(folder / each / "replay.json") for each in sets}
        self.sets = _statistics(folder / "manifest.json")["sets"]


class Reference(Evaluated):
    """A published drafter, which was not trained here."""


class Drafter(Evaluated):
    """A drafter of this run; `facts` has its vocabulary map's `size` too."""

    def __init__(self, results: Path, name: str, sets: list[str], facts: dict):
        super().__init__(results, name, sets, facts)
        self.vocabulary = _statistics(results / "vocabulary" / facts["size"] / "manifest.json")
        self.training_facts = _statistics(results / "drafters" / name / "manifest.json")
        self.rehearsal = _statistics(results / "drafters" / name / "rehearsal" / "manifest.json")
        self.log = files.read_jsonl(results / "drafters" / name / "checkpoint" / "training_log.jsonl")

    def training(self) -> list[str]:
        """Loss, accuracy by drafted token and replay tau: held out after each epoch, and at the end of training."""
        steps = [row for row in self.log if row["kind"] == "train"]
        tail = steps[-max(1, len(steps) // 10) :]
        taus = {row["epoch"]: f"{row['tau']:.3f}" for row in self.log if row["kind"] == "replay"}
        rows = [
            _training_row(f"held out, epoch {row['epoch'] + 1}", [row], taus.get(row["epoch"], ""))
            for row in self.log
            if row["kind"] == "heldout"
        ]
        rows += [_training_row("training, last tenth", tail, "")]
        places = range(1, _drafted(steps[0]) + 1)
        note = (
            f"{len(steps)} steps. Accuracy i: share of starts where drafted token i and all before it are "
            f"{ACCURACY_OF[self.algorithm]}. Replay tau: of {_replayed_rows(self.log)} held-out rows."
        )
        return [*table(["", "loss", *(f"accuracy {i}" for i in places), "replay tau"], rows), "", note]


ACCURACY_OF = {
    "eagle3": "the target's first choice within the draft vocabulary, which is a little optimistic",
    "dflash": "the data's",
}


def _replayed_rows(log: list[dict]) -> int:
    return max((int(row["rows"]) for row in log if row["kind"] == "replay"), default=0)


def _serving(each: Evaluated) -> list[str]:
    """One row a set and concurrency: speed, tau, joint rates, latencies; then identity and parity."""
    joint = [f"joint {i + 1}" for i in range(each.k)]
    header = ["set, concurrency", "baseline tok/s", "drafter tok/s", "ms/token p50", "p99", "tau", *joint, "rounds"]
    rows, lines = [], []
    for name, levels in each.sets.items():
        for level, x in levels.items():
            times = x["time_per_output_token_ms"]
            rows.append(
                [
                    f"{name}, {level}", f"{x['baseline_tokens_per_second']:.1f}", f"{x['tokens_per_second']:.1f}",
                    *(f"{times[key]:.1f}" for key in ("p50", "p99")), _tau(x["summary"]),
                    *_rates(x["summary"]["joint"]), x["summary"]["rounds"],
                ]
            )  # fmt: skip
            lines.append(f"- {name}, concurrency {level}: {_identity(x)} {_parity(x['parity'])}")
    return [*table(header, rows), "", *lines]


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


def _training_row(name: str, rows: list[dict], tau: str) -> list[str]:
    def mean(key: str) -> str:
        return f"{sum(row[key] for row in rows) / len(rows):.3f}"

    return [name, mean("loss"), *(mean(f"full_acc_{i}") for i in range(_drafted(rows[0]))), tau]


def _drafted(row: dict) -> int:
    """Places in a draft that a row of the training log tells of."""
    return sum(key.startswith("full_acc_") for key in row)


def _statistics(path: Path) -> dict:
    return files.read_json(path)["statistics"]


def _tau(summary: dict) -> str:
    return f"{summary['tau_micro_incl_bonus']:.3f}"


def _rates(rates: list[float]) -> list[str]:
    return [f"{rate:.3f}" for rate in rates]


def _summary(results: Path, drafters: dict[str, Drafter], sets: list[str]) -> list[str]:
    target = _statistics(results / "target" / "manifest.json")
    rows: list[list[object]] = [["target", f"{target['source']} ({target['architecture']})"]]
    for split in ("train", *sets):
        data = _statistics(results / "responses" / split / "manifest.json")
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(data["finish_reasons"].items()))
        rows.append([f"{split}: rows", f"{data['ok']} answered, {data['failed']} refused ({ends})"])
        rows.append([f"{split}: answers", _answers(data)])
        thought = f" ({data['reasoning_tokens']} of them reasoning)" if data["reasoning_tokens"] else ""
        rows.append(
            [f"{split}: tokens", f"{data['prompt_tokens']} prompt, {data['response_tokens']} response{thought}"]
        )
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
    # None where no response is so long.
    ceiling = vocabulary["tau_ceiling_heldout"].get(str(k))
    return (
        f"{vocabulary['draft_vocab_size']} tokens, covers {vocabulary['coverage_train']:.2%} of training, "
        f"{vocabulary['coverage_heldout']:.2%} of held-out tokens{split}"
        + ("" if ceiling is None else f"; no tau above {ceiling:.2f} is possible with it")
    )


def _rehearsal(drafter: Drafter) -> str:
    accepted = drafter.rehearsal["per_step_accepted"]
    full = sum(each == drafter.k for each in accepted)
    return (
        f"row {drafter.rehearsal['row']} learnt by heart in {drafter.rehearsal['steps']} steps, served in "
        f"{full} full blocks of {len(accepted)}"
    )


def _drafter_summary(drafter: Drafter) -> list[tuple[str, str]]:
    last, gate = drafter.training_facts["heldout"][-1], drafter.training_facts["acceptance"]
    accuracy = [last[f"full_acc_{place}"] for place in range(_drafted(last))]
    return [
        ("parameters", f"{drafter.training_facts['parameters'] / 1e6:.1f} M"),
        ("draft vocabulary", _coverage(drafter.vocabulary, drafter.k)),
        ("rehearsal", _rehearsal(drafter)),
        ("held-out loss, accuracy by drafted token", f"{last['loss']:.3f}, {' '.join(_rates(accuracy))}"),
        (
            "replay tau at the gate",
            f"{gate['tau_replay']:.3f} on {gate['rows']} held-out rows, where the most frequent continuations give "
            f"{gate['tau_most_frequent']:.3f}",
        ),
    ]


def _serve_lines(results: Path, found: dict[str, Evaluated]) -> list[str]:
    lines = ["From the repository's folder:", "", "```sh"]
    for each in found.values():
        speculative = {"model": str(each.folder), "num_speculative_tokens": each.k}
        lines += [f"vllm serve {results}/target/model --speculative-config '{json.dumps(speculative)}'"]
    lines += [
        "```",
        "",
        "With the CPU build of vLLM, whose `vllm` command fails on its own version look-up, write",
    ]
    lines += ["`python -m vllm.entrypoints.openai.api_server --model` for `vllm serve`."]
    return lines
