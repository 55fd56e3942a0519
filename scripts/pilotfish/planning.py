# SPDX-License-Identifier: Apache-2.0
"""What a run will do and cost, stage by stage, before anything runs: jobs, GPUs, rows, tokens, disk and time.

Pure arithmetic on settings, facts of the target and rates; nothing is read here.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from pilotfish import parameters
from pilotfish.constants import Constants
from pilotfish.disk import amount
from pilotfish.facts import Facts
from pilotfish.layers import layers_to_capture
from pilotfish.settings import HELDOUT, Settings

# Stages in their order, with the folder of results/RUN that each fills; as in the report's cost table.
FOLDERS = {
    "prepare_target": "target",
    "collect_prompts": "prompts",
    "collect_evaluation_set": None,  # prompts too, counted there
    "respond": "responses",
    "assemble_samples": "samples",
    "capture": "hidden_states",
    "map_vocabulary": "vocabulary",
    "rehearse": None,  # drafters too, counted there
    "train": "drafters",
    "export": "export",
    "adopt_reference": "references",
    "replay": None,  # evaluation too, counted there
    "serve": "evaluation",
    "gates": None,
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOKEN_ID_BYTES = 8  # of int64, stored beside each token's states
CHECKPOINT_BYTES = 2  # a parameter: drafters are written in bf16
STATE_BYTES = 12  # a parameter of a training state: fp32 weights and AdamW's two moments
PROMPT_BYTES = 6  # a prompt's token, as JSON text
RESPONSE_BYTES = 12  # a token of prompt or response in JSONL: its id, and the text of the response; 9.3 measured
SAMPLE_BYTES = 9  # a token in Arrow: id and mask; 8.4 measured
SERVED_BYTES = 45  # a served token with its rounds; 42 measured
REPLAYED_BYTES = 30  # a replayed token with its rounds; 26 measured
MAP_BYTES = 10  # a token of the target's vocabulary in a map; 9.9 measured
ROWS_PER_SHARD = 64  # as pilotfish.shards, which imports torch
# Of hidden states: about what the disks of one node hold, and an hour of reading an epoch at 3 GB/s.
STORABLE = 10e12
GATES_PER_SPLIT = 4  # of prompts, responses, samples and hidden states
GATES_PER_DRAFTER = 4  # of rehearsal, drafter, export and evaluation


@dataclass(frozen=True)
class Rate:
    """Seconds of a stage: so many a job, and so many a unit of its work; `basis` says where they come from."""

    per_job: float
    per_unit: float
    basis: str  # "assumed" or "measured in run X"

    def seconds(self, jobs: int, units: float) -> float:
        return jobs * self.per_job + units * self.per_unit


@dataclass(frozen=True)
class Length:
    """Mean tokens of a split's prompts and responses, and where they come from."""

    prompt: float
    response: float
    basis: str


@dataclass(frozen=True)
class Rates:
    """Rates by stage, a drafter's training as `train NAME`; lengths by split; and what had to be assumed."""

    stages: dict[str, Rate]
    lengths: dict[str, Length]
    hardware: str = "cpu"  # or "gpu"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Rows and tokens of one split."""

    rows: int
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Work:
    """What a rate is put to: jobs of a stage with `units` of work; bytes kept, and bytes that pass away again.

    Units are bytes of weights for `prepare_target`, rows for prompts, response tokens for `respond`, token-epochs for
    training, steps (see `served_steps`) for `serve`, bytes of states for the gates, and tokens for all else.
    """

    stage: str
    jobs: int = 0
    gpus: int = 0  # a job
    rows: int = 0
    tokens: int = 0
    units: float = 0
    kept: int = 0
    passing: int = 0
    rate: str = ""  # its name, where it is not the stage's


@dataclass(frozen=True)
class Stage:
    """One line of the plan; `seconds` sums over its jobs, `passing` bytes are gone when it ends."""

    name: str
    jobs: int
    gpus: int
    rows: int
    tokens: int
    kept: int
    passing: int
    seconds: float
    basis: str


@dataclass(frozen=True)
class Plan:
    """A run's stages, and the hidden states among its bytes."""

    run: str
    target: str
    stages: tuple[Stage, ...]
    layers: tuple[int, ...]  # h(k) numbers of what is captured
    shares: dict[str, float]  # of all tokens, by split
    state_bytes: int
    state_tokens: int
    bytes_per_token: int
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def kept(self) -> int:
        return sum(stage.kept for stage in self.stages)

    @property
    def gpu_hours(self) -> float:
        return sum(stage.gpus * stage.seconds for stage in self.stages) / 3600

    @property
    def peak(self) -> int:
        """Most bytes on the disk at once: what is kept up to a stage, and what passes in it."""
        return self.still_to_write({stage.name: 1.0 for stage in self.stages}, {})

    def still_to_write(self, pending: dict[str, float], begun: dict[str, int], recaptured: int = 0) -> int:
        """Most bytes at once beyond what lies there now.

        `pending` has the share of each stage that is still to be done, `begun` the bytes of unfinished work there,
        which is gone on with; `recaptured` are states of layers that earlier answers left out.
        """
        most = written = 0
        for stage in self.stages:
            if share := pending.get(stage.name, 0.0):
                coming = round(stage.kept * share) + (recaptured if stage.name == "capture" else 0)
                written += max(0, coming - begun.get(stage.name, 0))
                most = max(most, written + stage.passing)
        return most

    def advice(self, free: int | None = None) -> str | None:
        """What to do where the hidden states are far too large to store; None where they are not."""
        limit = STORABLE if free is None else min(STORABLE, free)
        if self.state_bytes <= limit:
            return None
        return (
            f"{amount(self.state_bytes)} of hidden states are too large to store. A drafter on so much data is "
            "trained online, on states that the target computes as training goes; but hidden states on the fly are "
            "not offered yet. Until then: fewer rows (prompts.train), shorter answers (responses.max_tokens) or fewer "
            "capture layers"
        )

    def as_json(self) -> dict:
        """For logs/RUN/plan.json, which the report compares with what came of it."""
        return {
            "run": self.run,
            "target": self.target,
            "stages": {stage.name: asdict(stage) for stage in self.stages},
            "seconds": self.seconds,
            "kept": self.kept,
            "peak": self.peak,
            "gpu_hours": self.gpu_hours,
        }


def state_bytes_per_token(hidden_size: int, conditioning_layers: int, dtype: str = "bfloat16") -> int:
    """Bytes of one token's stored states: n conditioning layers and the last, H wide, and the token's id.

    2H(n+1) + 8 for two-byte types (SPECS.md, section 8), 4H(n+1) + 8 for float32.
    """
    return DTYPE_BYTES[dtype] * hidden_size * (conditioning_layers + 1) + TOKEN_ID_BYTES


def drafter_parameters(drafter, facts: Facts) -> tuple[int, int]:
    """Parameters in a drafter's checkpoint, and those that are trained; its layers are shaped as the target's."""
    made = Constants.model_construct(
        algorithm=drafter.algorithm,
        capture_layers=tuple(range(conditioning(drafter, facts))),
        draft_vocab_size=drafter.draft_vocab_size or facts.vocab_size,
        target_vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        draft_layers=getattr(drafter, "draft_layers", 1),
    )
    width = facts.intermediate_size
    return parameters.stored(made, width), parameters.trainable(made, width)


def conditioning(drafter, facts: Facts) -> int:
    """How many layers condition a drafter; UserError where the target has no default for it."""
    return len(layers_to_capture([(drafter.algorithm, drafter.capture_layers)], {"layers": facts.layers})) - 1


def captured_layers(settings: Settings, facts: Facts) -> list[int]:
    """All that is stored of each token, the last layer included, for drafters and references together."""
    every = (*settings.drafters.values(), *settings.references.values())
    return layers_to_capture([(each.algorithm, each.capture_layers) for each in every], {"layers": facts.layers})


def rows_by_split(settings: Settings) -> dict[str, int]:
    """Rows that the target answers; of the held-out ones all, though fewer may be served."""
    sets = {name: each.prompts for name, each in settings.evaluation.sets.items() if name != HELDOUT}
    return {"train": settings.prompts.train, HELDOUT: settings.prompts.heldout, **sets}


def splits_of(settings: Settings, lengths: dict[str, Length]) -> dict[str, Split]:
    """Rows and tokens of each split; answers are cut at max_tokens, prompts where nothing is left of the context."""
    made = {}
    for name, rows in rows_by_split(settings).items():
        most = settings.responses.max_tokens
        response = min(lengths[name].response, most)
        prompt = min(lengths[name].prompt, settings.engine.max_model_len - most)
        made[name] = Split(rows, round(rows * prompt), round(rows * response))
    return made


def served_tokens(settings: Settings, lengths: dict[str, Length]) -> int:
    """Tokens that one server writes at one level of concurrency, over all sets."""
    longest = settings.evaluation.max_tokens
    return round(sum(each.prompts * min(lengths[s].response, longest) for s, each in settings.evaluation.sets.items()))


def served_steps(tokens: int, levels: list[int], servers: int) -> float:
    """Steps of all servers: each computes a token of every request under way, so `tokens` / level at each level."""
    return servers * sum(tokens / level for level in levels)


def plan(settings: Settings, facts: Facts, rates: Rates) -> Plan:
    """The plan of a whole run that starts from nothing; UserError where drafters do not fit the target."""
    splits = splits_of(settings, rates.lengths)
    works = [*_data(settings, facts, splits), *_drafters(settings, facts, splits)]
    works += _evaluation(settings, splits, rates.lengths)
    layers = captured_layers(settings, facts)
    each = state_bytes_per_token(facts.hidden_size, len(layers) - 1, settings.engine.dtype)
    stored = _stored_tokens(splits)
    jobs = GATES_PER_SPLIT * len(splits) - 1 + GATES_PER_DRAFTER * len(settings.drafters) + len(_map_sizes(settings))
    jobs += 2 * len(settings.references)
    works.append(Work("gates", jobs=jobs, units=each * stored))
    return Plan(
        run=settings.run,
        target=f"{settings.target.source}: {facts.parameters / 1e9:,.4g}B parameters, H={facts.hidden_size}, "
        f"{facts.layers} layers, vocabulary {facts.vocab_size} ({facts.source})",
        stages=tuple(_stage(name, [w for w in works if w.stage == name], rates) for name in FOLDERS),
        layers=tuple(layers),
        shares=_shares(splits),
        state_bytes=each * stored,
        state_tokens=stored,
        bytes_per_token=each,
        notes=(*rates.notes, *(f"facts of the target: {each}" for each in facts.assumed)),
    )


def _stored_tokens(splits: dict[str, Split]) -> int:
    """A response's last token was never put into the target, so it has no state."""
    return sum(split.tokens - split.rows for split in splits.values())


def _shares(splits: dict[str, Split]) -> dict[str, float]:
    every = sum(split.tokens for split in splits.values())
    return {name: split.tokens / every for name, split in splits.items()}


def _map_sizes(settings: Settings) -> set[int | None]:
    return {drafter.draft_vocab_size for drafter in settings.drafters.values()}


def _data(settings: Settings, facts: Facts, splits: dict[str, Split]) -> Iterator[Work]:
    """From the target to hidden states. Greedy answers leave their states on the way, sampled ones need a capture."""
    rows, tokens = (sum(getattr(split, key) for split in splits.values()) for key in ("rows", "tokens"))
    prompt = sum(split.prompt_tokens for split in splits.values())
    copied = facts.weight_bytes if settings.target.source.startswith("package:") else 0  # others are linked
    yield Work("prepare_target", jobs=1, units=facts.weight_bytes, kept=copied)
    own = rows_by_split(settings)
    mine = own["train"] + own[HELDOUT]
    yield Work("collect_prompts", jobs=1, rows=mine, units=mine, kept=PROMPT_BYTES * prompt)
    yield Work("collect_evaluation_set", jobs=len(splits) - 2, rows=rows - mine, units=rows - mine)
    jobs = len(splits) * settings.responses.parts
    gpus = settings.engine.tensor_parallel
    each = state_bytes_per_token(facts.hidden_size, len(captured_layers(settings, facts)) - 1, settings.engine.dtype)
    states = each * _stored_tokens(splits)
    # Rows wait in files of their own until their shard is complete, which is then written beside them.
    longest = max(split.tokens / split.rows for split in splits.values())
    waiting = round(each * longest * min(rows, settings.engine.max_num_seqs + 2 * ROWS_PER_SHARD))
    greedy = settings.responses.temperature == 0
    text = 2 * RESPONSE_BYTES * tokens  # once more beside the shards, see pilotfish.reuse
    yield Work(
        "respond", jobs, gpus, rows, tokens, sum(split.response_tokens for split in splits.values()),
        text + states if greedy else text, waiting if greedy else 0,
    )  # fmt: skip
    yield Work("assemble_samples", len(splits), 0, rows, tokens, tokens, SAMPLE_BYTES * tokens)
    name = "capture adopting" if greedy else "capture"
    # Shards that fit are linked: they take no room a second time, and no GPU.
    kept, passing = (0, 0) if greedy else (states, waiting)
    yield Work("capture", jobs, 0 if greedy else gpus, rows, tokens, tokens, kept, passing, name)


def _drafters(settings: Settings, facts: Facts, splits: dict[str, Split]) -> Iterator[Work]:
    """Vocabulary maps, rehearsals and trainings; a rehearsal's checkpoint lies in the drafter's folder."""
    train = splits["train"]
    sizes = len(_map_sizes(settings))
    yield Work(
        "map_vocabulary", sizes, 0, train.rows, train.tokens, sizes * train.tokens, sizes * MAP_BYTES * facts.vocab_size
    )
    for name, drafter in settings.drafters.items():
        stored, trained = drafter_parameters(drafter, facts)
        yield Work("rehearse", jobs=1, gpus=settings.engine.tensor_parallel, rows=1)
        tokens = drafter.epochs * train.tokens
        # A new training state is written beside the last one, before that is taken away.
        yield Work(
            "train", 1, 1, drafter.epochs * train.rows, tokens, tokens,
            2 * CHECKPOINT_BYTES * stored, 2 * STATE_BYTES * trained, f"train {name}",
        )  # fmt: skip
        yield Work("export", jobs=1)  # linked


def _evaluation(settings: Settings, splits: dict[str, Split], lengths: dict[str, Length]) -> Iterator[Work]:
    """References, replay of each set and drafter, and all servers on all sets."""
    yield Work("adopt_reference", jobs=len(settings.references))
    evaluated = len(settings.drafters) + len(settings.references)
    sets = [splits[name] for name in settings.evaluation.sets]
    replayed = evaluated * sum(split.tokens for split in sets)
    rows = evaluated * sum(split.rows for split in sets)
    yield Work("replay", evaluated * len(sets), 0, rows, replayed, replayed)
    servers, levels = 1 + evaluated, settings.evaluation.concurrency
    tokens = served_tokens(settings, lengths)
    every = servers * len(levels) * tokens
    yield Work(
        "serve",
        jobs=1,
        gpus=settings.engine.tensor_parallel * (servers if settings.evaluation.together else 1),
        rows=servers * len(levels) * sum(each.prompts for each in settings.evaluation.sets.values()),
        tokens=every,
        units=served_steps(tokens, levels, servers),
        kept=SERVED_BYTES * every + REPLAYED_BYTES * replayed,
    )


def _stage(name: str, works: list[Work], rates: Rates) -> Stage:
    """One line of the plan from its works, each at its own rate."""
    busy = [(work, rates.stages[work.rate or name]) for work in works if work.jobs]
    return Stage(
        name=name,
        jobs=sum(work.jobs for work, _ in busy),
        gpus=max((work.gpus for work, _ in busy), default=0) if rates.hardware == "gpu" else 0,
        rows=sum(work.rows for work, _ in busy),
        tokens=sum(work.tokens for work, _ in busy),
        kept=sum(work.kept for work, _ in busy),
        passing=sum(work.passing for work, _ in busy),
        seconds=sum(rate.seconds(work.jobs, work.units) for work, rate in busy),
        basis=", ".join(dict.fromkeys(rate.basis for _, rate in busy)),
    )
