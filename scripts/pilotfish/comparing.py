# SPDX-License-Identifier: Apache-2.0
"""Two or more runs side by side, as Markdown: settings that differ, data, tau, speed, the gates' figures, cost."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pilotfish import comparison, costs, files, rates, seals, status
from pilotfish.errors import UserError
from pilotfish.markdown import table

NONE = "-"  # a cell of what a run has not, or not yet
MANIFEST = "manifest.json"
OPTIONAL = ("adopt_reference", "validate_reference")  # stages of a run that compares itself with published drafters
REPEATING = "export"  # its settings are its drafter's and the engine's
WORK = ".work"  # of folders with unfinished work
OWN_ARGUMENTS = ("model", "speculative-config")  # of an engine's line: they name the run's own folders
SHOWN_DIGITS = 12  # of a sha256

Row = list[str]


class Run:
    """What a run has left on disk so far; whatever is not there is None."""

    def __init__(self, root: Path, name: str):
        self.root, self.name = root, name
        self.results, self.benchmarks = root / "results" / name, root / "benchmarks" / name
        paths = sorted(
            path for path in self.results.rglob(MANIFEST) if WORK not in {each.suffix for each in path.parents}
        )
        self.manifests = {path.parent.relative_to(self.results).as_posix(): _manifest(path) for path in paths}
        self.edited = [path for path in paths if seals.SEAL in files.read_json(path) and seals.fault(path)]

    def names(self, kind: str) -> list[str]:
        """What there is of a kind, e.g. the splits below `responses`."""
        return sorted(path.name for path in self.results.glob(f"{kind}/*") if path.is_dir() and path.suffix != WORK)

    def figure(self, folder: str, *keys: str):
        """One of a manifest's statistics, however deep; None where there is none."""
        return _dig(self.manifests.get(folder, {}).get("statistics"), *keys)

    def replay(self, drafter: str, chosen: str) -> dict | None:
        """A drafter's replay of a set."""
        path = self.results / "evaluation" / drafter / chosen / "replay.json"
        return files.read_json(path) if path.is_file() else None

    def settings(self) -> dict[tuple[str, str, str], str]:
        """Each setting with its value as JSON, by kind of artifact, its name ("" if there is one alone), and key."""
        found: dict[tuple[str, str, str], str] = {}
        versions: dict[str, set[str]] = {}  # several where a package was exchanged in the middle of the run
        for folder, manifest in self.manifests.items():
            # What shapes a rehearsal shapes its drafter, so its own folder is left out.
            kind, name = [*folder.split("/"), ""][:2]
            if kind != REPEATING:
                _flatten(found, (kind, name), "", json.loads(manifest["spec"]))
            for package, version in manifest["packages"].items():
                versions.setdefault(package, set()).add(version)
        found |= {("packages", "", package): ", ".join(sorted(each)) for package, each in versions.items()}
        for split in self.names("responses"):
            _flatten(found, ("responses", split), "sampling", rates.Run(self.root, self.name).sampling(split) or {})
        served = self.results / "evaluation" / "baseline" / "served.json"
        if served.is_file():
            measured = files.read_json(served)
            _flatten(found, ("evaluation", "baseline"), "sampling", measured["sampling"])
            _flatten(found, ("evaluation", "baseline"), "engine", _options(measured["arguments"]))
        return found

    def stages_without_product(self) -> list[str]:
        """Rules, in the order of the flow, of which nothing is there; none of a run that has its report."""
        if (self.results / status.OUTPUTS["report"]).is_file():
            return []
        lacking = [rule for rule, pattern in status.OUTPUTS.items() if not any(self.results.glob(pattern))]
        return [rule for rule in lacking if rule not in OPTIONAL]


def _manifest(path: Path) -> dict:
    manifest = files.read_json(path)
    try:
        json.loads(manifest["spec"]).items(), manifest["packages"].items(), manifest["statistics"].items()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path}: no manifest as a gate writes it; delete it and run again, then compare") from None
    return manifest


def runs(root: Path) -> list[str]:
    """Names of the runs below results/ that have anything to compare."""
    return sorted(path.name for path in root.glob("results/*") if any(path.glob(f"*/**/{MANIFEST}")))


def compose(root: Path, names: Sequence[str]) -> str:
    """The whole page; UserError for fewer than two names, one named twice, and one that is no run."""
    there = ", ".join(runs(root)) or "none yet"
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UserError(f'name two different runs, or more: make compare RUNS="a b"; there are: {there}')
    for name in names:
        if name not in runs(root):
            raise UserError(f"results/{name}: no such run, or nothing of it is finished; there are: {there}")
    found = [Run(root, name) for name in names]
    lines = [f"# Runs {' and '.join(f'`{name}`' for name in names)}", "", *_unfinished(found)]
    lines += ["## Settings that differ", "", *_settings(found), ""]
    for title, rows in (
        ("Data", _data(found)),
        ("Coverage of the draft vocabularies", _vocabularies(found)),
        ("tau of each drafter and set", _taus(found)),
        ("Speed of each drafter, set and concurrency", _speeds(found)),
        ("What the gates saw", _gates(found)),
        ("Cost of each stage: wall time, disk", _costs(found)),
    ):
        lines += [f"## {title}", "", *(table(["", *names], rows) if rows else ["Nothing yet."]), ""]
        lines += [NOTES[title], ""] if title in NOTES else []
    return "\n".join(lines).rstrip() + "\n"


NOTES = {
    "tau of each drafter and set": comparison.DEFINITION,
    "Speed of each drafter, set and concurrency": f"none is the engine without a drafter. {comparison.SPEED}",
}


def _unfinished(found: Sequence[Run]) -> list[str]:
    """A line for each run that is not whole, and for manifests that are not as their gate wrote them."""
    lines = []
    for run in found:
        if not (run.results / status.OUTPUTS["report"]).is_file():
            lacking = ", ".join(run.stages_without_product())
            lines.append(f"- `{run.name}` is unfinished; of these stages nothing is there yet: {lacking}.")
        lines += [
            f"- `{run.name}`: {path.relative_to(run.results)} was edited since its gate; run `snakemake verify`."
            for path in run.edited
        ]
    return [*lines, f"- {NONE} stands for what is not there.", ""] if lines else []


def _settings(found: Sequence[Run]) -> list[str]:
    """A row for each setting that is not the same in all runs, then what some run has not at all."""
    settings = [run.settings() for run in found]
    artifacts = [{key[:2] for key in each} for each in settings]
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for kind, name, key in sorted(set().union(*settings)):
        if all((kind, name) in each for each in artifacts):
            values = tuple(each.get((kind, name, key), NONE) for each in settings)
            if len(set(values)) > 1:
                alike.setdefault((kind, key, values), []).append(name)
    rows = [[_dotted(kind, names, key), *values] for (kind, key, values), names in alike.items()]
    lines = table(["", *(run.name for run in found)], rows) if rows else ["None."]
    everything = set().union(*artifacts)
    for run, own in zip(found, artifacts, strict=True):
        if lacking := [_dotted(kind, [name], "") for kind, name in sorted(everything - own)]:
            lines += ["", f"`{run.name}` has no {', '.join(lacking)}."]
    return [*lines, "", SOURCES]


SOURCES = (
    "From what each run's gates and engines noted of the settings that they worked with; how a drafter's batches were "
    "made (tokens_per_batch, anchors, weight_decay) is noted nowhere."
)


def _dotted(kind: str, names: Sequence[str], key: str) -> str:
    """A setting's path; names that share one row in braces, as a shell would write them."""
    name = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
    return ".".join(step for step in (kind, name, key) if step)


def _flatten(found: dict, place: tuple[str, str], key: str, value: object) -> None:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            _flatten(found, place, f"{key}.{name}".lstrip("."), each)
    else:
        found[(*place, key)] = value if isinstance(value, str) else json.dumps(value)


def _options(arguments: Sequence[str]) -> dict[str, object]:
    """The options of an engine's command line, but for those that name folders of the run."""
    made: dict[str, object] = {}
    for each in arguments:
        if each.startswith("--"):
            name = each.removeprefix("--")
        made[name] = True if each.startswith("--") else each
    return {name: value for name, value in made.items() if name not in OWN_ARGUMENTS}


def _dig(value, *keys: str):
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value


def _union(names: Iterator[str]) -> list[str]:
    """Each name once: train and heldout first, the others in order."""
    return sorted(set(names), key=lambda name: (name != "train", name != "heldout", name))


def _row(found: Sequence[Run], label: str, cell: Callable[[Run], str | None]) -> list[Row]:
    """The row of a figure, as a list of none where no run has it."""
    cells = [cell(run) for run in found]
    return [] if not any(cells) else [[label, *(each or NONE for each in cells)]]


def _figure(folder: str, *keys: str, form: str = "{:,}") -> Callable[[Run], str | None]:
    """How a statistic of a manifest is shown."""

    def cell(run: Run) -> str | None:
        value = run.figure(folder, *keys)
        return None if value is None else form.format(value)

    return cell


OF_RESPONSES = (
    ("prompts", "rows", "{:,}"),
    ("refused", "failed", "{:,}"),
    ("responses kept", "kept", "{:,}"),
    ("cut at max_tokens", "truncated", "{:,}"),
    ("end in a loop", "loops", "{:,}"),
    ("mode", "mode", "{}"),
    ("prompt tokens", "prompt_tokens", "{:,}"),
    ("response tokens", "response_tokens", "{:,}"),
    ("reasoning tokens", "reasoning_tokens", "{:,}"),
)


def _data(found: Sequence[Run]) -> list[Row]:
    """Counts of each split, and the digest of its samples: the same digest, the same data."""
    rows = []
    for split in _union(name for run in found for name in run.names("responses")):
        for label, key, form in OF_RESPONSES:
            rows += _row(found, f"{split}: {label}", _figure(f"responses/{split}", key, form=form))
        rows += _row(found, f"{split}: sha256 of the samples", lambda run, split=split: _samples_digest(run, split))
    return rows


def _samples_digest(run: Run, split: str) -> str | None:
    digest = _dig(run.manifests.get(f"samples/{split}"), "files", "samples.arrow", "sha256")
    return digest and digest[:SHOWN_DIGITS]


def _vocabularies(found: Sequence[Run]) -> list[Row]:
    rows = []
    for size in sorted({name for run in found for name in run.names("vocabulary")}):
        tokens = " tokens" if size.isdigit() else ""
        for label, key in (
            ("of training", "coverage_train"),
            ("of held-out", "coverage_heldout"),
            ("of held-out reasoning", "coverage_heldout_reasoning"),
            ("of held-out answers", "coverage_heldout_answer"),
        ):
            rows += _row(found, f"{size}{tokens}: {label}", _figure(f"vocabulary/{size}", key, form="{:.2%}"))
    return rows


def _evaluated(found: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Each drafter or reference that some run has measured or replayed, with each of its sets."""
    for drafter in sorted({name for run in found for name in run.names("evaluation")}):
        for chosen in _union(name for run in found for name in run.names(f"evaluation/{drafter}")):
            yield drafter, chosen


def _levels(found: Sequence[Run], drafter: str, chosen: str) -> list[str]:
    """Concurrencies at which some run has served a drafter, or what was asked of it, on a set."""
    every = (run.figure(f"evaluation/{drafter}", "sets", chosen) or {} for run in found)
    return sorted({level for levels in every for level in levels}, key=int)


def _taus(found: Sequence[Run]) -> list[Row]:
    """Served and replayed tau; of trees the replayed one."""
    rows = []
    for drafter, chosen in _evaluated(found):
        rows += _row(found, f"{drafter}, {chosen}: served", lambda run, of=(drafter, chosen): _served(run, *of))
        replays = {run.name: run.replay(drafter, chosen) or {} for run in found}
        rows += _row(
            found,
            f"{drafter}, {chosen}: replay",
            lambda run, replays=replays: _replayed(_dig(replays[run.name], "summary")),
        )
        trees = {
            run.name: {tree["budget"]: tree["summary"] for tree in replays[run.name].get("trees", ())} for run in found
        }
        for budget in sorted({budget for each in trees.values() for budget in each}):
            rows += _row(
                found,
                f"{drafter}, {chosen}: replay of DDTree-{budget}",
                lambda run, trees=trees, budget=budget: _replayed(trees[run.name].get(budget)),
            )
    return rows


def _served(run: Run, drafter: str, chosen: str) -> str | None:
    """Served tau at the first concurrency, with the tokens that were drafted a round."""
    levels = run.figure(f"evaluation/{drafter}", "sets", chosen)
    if not levels:
        return None
    summary = levels[min(levels, key=int)]["summary"]
    return f"{summary['tau_micro_incl_bonus']:.3f}, chain-{len(summary['joint'])}"


def _replayed(summary: dict | None) -> str | None:
    return summary and comparison.replayed(summary)


def _speeds(found: Sequence[Run]) -> list[Row]:
    """Tokens/s without a drafter, then each drafter's, and its speed-up."""
    plain: dict[str, list[Row]] = {}
    drafted: list[Row] = []
    for drafter, chosen in _evaluated(found):
        for level in _levels(found, drafter, chosen):
            keys = (f"evaluation/{drafter}", "sets", chosen, level)
            label = f"none, {chosen}, concurrency {level}"
            if label not in plain:
                plain[label] = _row(found, label, _figure(*keys, "baseline_tokens_per_second", form="{:.1f} tok/s"))
            drafted += _row(
                found, f"{drafter}, {chosen}, concurrency {level}", lambda run, keys=keys: _speed(run.figure(*keys))
            )
    return [*(row for rows in plain.values() for row in rows), *drafted]


def _speed(level: dict | None) -> str | None:
    return level and f"{level['tokens_per_second']:.1f} tok/s, {comparison.speed(level)}"


def _gates(found: Sequence[Run]) -> list[Row]:
    """The figures by which gates judge: overlap, states against transformers, training, parity."""
    rows = []
    for split in _union(name for run in found for name in run.names("prompts")):
        folder = f"prompts/{split}"
        rows += _row(found, f"{split}: near duplicates in training", _figure(folder, "near_duplicates"))
    for split in _union(name for run in found for name in run.names("hidden_states")):
        layers = (f"hidden_states/{split}", "recomputed", "layers")
        rows += _row(
            found, f"{split}: largest error of a layer", lambda run, of=layers: _largest_error(run.figure(*of))
        )
    for drafter in sorted({name for run in found for name in run.names("drafters")}):
        rows += _drafter_rows(found, drafter)
    for drafter, chosen in _evaluated(found):
        for level in _levels(found, drafter, chosen):
            keys = (f"evaluation/{drafter}", "sets", chosen, level)
            label = f"{drafter}, {chosen}, concurrency {level}"
            rows += _row(found, f"{label}: rounds as replayed", lambda run, keys=keys: _parity(run.figure(*keys)))
            rows += _row(found, f"{label}: texts as without it", lambda run, keys=keys: _identical(run.figure(*keys)))
    return rows


def _drafter_rows(found: Sequence[Run], drafter: str) -> list[Row]:
    folder = f"drafters/{drafter}"
    taus = (("tau of its gate", "tau_replay"), ("tau of the commonest continuations", "tau_most_frequent"))
    rows = _row(found, f"{drafter}: steps to learn a row by heart", _figure(f"{folder}/rehearsal", "steps"))
    rows += _row(found, f"{drafter}: held-out loss", lambda run: _last_loss(run.figure(folder, "heldout")))
    for label, key in taus:
        rows += _row(found, f"{drafter}: {label}", _figure(folder, "acceptance", key, form="{:.3f}"))
    return rows


def _largest_error(layers: dict | None) -> str | None:
    return layers and f"{max(layer['error'] for layer in layers.values()):.2g}"


def _last_loss(epochs: list[dict] | None) -> str | None:
    return epochs[-1] and f"{epochs[-1]['loss']:.3f}" if epochs else None


def _parity(level: dict | None) -> str | None:
    if not level:
        return None
    parity = level["parity"]
    return f"{parity['rounds_equal'] / parity['rounds_compared']:.1%} of {parity['rounds_compared']:,}"


def _identical(level: dict | None) -> str | None:
    return level and f"{level['identical_to_baseline']} of {level['prompts']}"


def _costs(found: Sequence[Run]) -> list[Row]:
    """Seconds of each stage's jobs as each was last run, and bytes of its folder; a file with two names counts once."""
    measured = [_cost(run) for run in found]
    stages = [rule for rule, _ in costs.STAGES if any(any(each[rule]) for each in measured)]
    return [[stage, *(_seconds_and_bytes(*each[stage]) for each in measured)] for stage in (*stages, "gates", "total")]


def _cost(run: Run) -> dict[str, tuple[float, int]]:
    seen: set[int] = set()
    found: dict[str, tuple[float, int]] = {}
    for rule, folder in costs.STAGES:
        size = costs.disk(run.results / folder, seen) if folder else 0
        found[rule] = (costs.benchmark(run.benchmarks, rule)[0], size)
    found["gates"] = (sum(seconds for _, seconds in costs.gates_alone(run.benchmarks)), 0)
    found["total"] = (sum(each[0] for each in found.values()), sum(each[1] for each in found.values()))
    return found


def _seconds_and_bytes(seconds: float, size: int) -> str:
    parts = [f"{seconds:,.0f} s"] * bool(seconds) + [f"{size / 1e6:,.1f} MB"] * bool(size)
    return ", ".join(parts) or NONE
