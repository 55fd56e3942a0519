# SPDX-License-Identifier: Apache-2.0
# Settings, paths and the functions that rules use. Imported while planning: neither torch nor pandas.

import os
import shutil
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))
# By which a job knows that its run was killed: on a cluster, the Snakemake that runs it on its own node.
os.environ["PILOTFISH_RUN"] = str(os.getpid())
# Jobs run with the interpreter that runs Snakemake, unless --sdm conda puts another in front.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

from pilotfish import (
    digest,
    facts,
    fitting,
    one_run,
    planning,
    rates,
    repairs,
    settings,
)
from pilotfish.errors import UserError

try:
    for file in workflow.configfiles:
        # Snakemake merged them, and says nothing of a key that stands twice.
        settings.read(Path(file))
    S = settings.load(config)
    for setting, file in S.files().items():
        if not os.path.isfile(file):
            raise UserError(
                f"{setting}: no file {file!r} in {Path.cwd()}; check the path"
            )
    for folder in (".", "results", f"results/{S.run}"):
        if Path(folder).is_dir() and not os.access(folder, os.W_OK):
            raise UserError(
                f"{Path(folder).absolute()}: cannot be written; give yourself the right to, or run in another folder"
            )
except UserError as error:
    raise WorkflowError(str(error)) from None

# A job on another node may be unable to see that the run's own lock is held.
if workflow.is_main_process:
    one_run.clear_stale_locks()

SCRIPTS = os.path.relpath(Path(workflow.basedir) / "scripts")
RESULTS = f"results/{S.run}"
LOGS = f"logs/{S.run}"
BENCHMARKS = f"benchmarks/{S.run}"
REPORT = f"{RESULTS}/report.md"
CONDA = f"../envs/{S.environment}.yaml"
SETS_WITH_SOURCE = [name for name in S.evaluation.sets if name != settings.HELDOUT]
SPLITS = ("train", settings.HELDOUT, *SETS_WITH_SOURCE)
PARTS = [f"{n:05d}-of-{S.responses.parts:05d}" for n in range(S.responses.parts)]
WHOLE = "whole"  # for a number: the draft vocabulary that is all of the target's
# All that is held against the engine without a drafter: this run's drafters, and published ones.
EVALUATED = {**S.drafters, **S.references}

# Snakemake does not track globals in a shell line: how an engine is run changes no artifact's identity,
# and the layers captured along the way none of the text.
ENGINE = S.engine.model_dump_json()
DRAFTER_LAYERS = sorted(
    {
        (d.algorithm, d.capture_layers)
        for d in (*S.drafters.values(), *S.references.values())
    },
    key=lambda pair: (pair[0], pair[1] or ()),
)
CAPTURE_LAYERS = digest.spec_json(DRAFTER_LAYERS)
# Nor do a gate's limits change what it lets pass.
LIMITS = digest.spec_json(
    S.responses.model_dump(include={"max_truncated", "max_loops", "max_flawed"})
)
ENGINE_NUMERICS = S.engine.model_dump(include={"max_model_len", "dtype", "extra_args"})
TRUST = S.target.trust_remote_code
# Whether the training rows' answers are the data's; a rehearsal needs what the target says.
GIVEN = S.prompts.answers == "given"
REHEARSED = settings.HELDOUT if GIVEN else "train"


def either(names):
    """Wildcard constraint: one of these names; nothing where there are none."""
    return "|".join(names) or "(?!)"


wildcard_constraints:
    split=either(SPLITS),
    part=r"\d{5}-of-\d{5}",
    drafter=either(S.drafters),
    reference=either(S.references),
    size=rf"\d+|{WHOLE}",


def code(name):
    """Digest of what the rule's script can reach, so that a comment reruns nothing."""
    return digest.code_digest(Path(workflow.basedir) / "scripts" / f"{name}.py")


def spec(**values):
    """Canonical JSON of the settings that shape a rule's artifact."""
    return digest.spec_json(values)


def setting_of_set(wildcards):
    """The setting of an evaluation set with a source of its own; None for what is split off the training prompts."""
    if wildcards.split in SETS_WITH_SOURCE:
        return f"evaluation.sets.{wildcards.split}"
    return None


def file_of_set(wildcards):
    """The file that an evaluation set is read from; none of a package's or the hub's."""
    return S.evaluation.sets[wildcards.split].file or []


def evaluation_set_spec(wildcards):
    """What shapes the prompts of an evaluation set with a source of its own."""
    chosen = S.evaluation.sets[wildcards.split].model_dump()
    return spec(**chosen, seed=S.seed, max_model_len=S.engine.max_model_len)


def prompts_manifest(wildcards):
    """Manifest of a split's prompts; one gate compares those to train on with the held-out ones."""
    checked = settings.HELDOUT if wildcards.split == "train" else wildcards.split
    return f"{RESULTS}/prompts/{checked}/manifest.json"


def rows_of(split):
    """Prompts of a split; of the held-out ones not all need be served."""
    if split in SETS_WITH_SOURCE:
        return S.evaluation.sets[split].prompts
    return getattr(S.prompts, split)


def response_spec(**sampling):
    """What shapes answers: the engine's numerics, the template's arguments and the sampling."""
    given = {"chat_template_kwargs": S.responses.chat_template_kwargs, **sampling}
    return {
        "trust_remote_code": TRUST,
        "reasoning_parser": S.target.reasoning_parser,
        "seed": S.seed,
        "engine": ENGINE_NUMERICS,
        "sampling": given,
    }


def temperature_of(split):
    """At which a split's answers were drawn; None of answers that the data give."""
    return None if GIVEN and split == "train" else S.responses.temperature


def responses_to_train_on(wildcards):
    """Manifest of the training split's responses, whose mode the other split must share."""
    if wildcards.split == "train":
        return []
    return f"{RESULTS}/responses/train/manifest.json"


def drafter_spec(wildcards):
    """Everything that shapes a drafter's training, all values written out."""
    return spec(**shape_of(wildcards.drafter))


def shape_of(drafter, *others):
    """The settings of a drafter that shape what is trained, without those named besides."""
    chosen = S.drafters[drafter].written_out()
    kept = {
        name: value
        for name, value in chosen.items()
        if name not in ("tree_budgets", *others)
    }
    return {**kept, "seed": S.seed, "trust_remote_code": TRUST}


def drafter_gate_spec(wildcards):
    """What a trained drafter is held against."""
    names = {"algorithm", "capture_layers", "speculative_tokens", "epochs"}
    names |= {"learning_rate", "warmup_ratio"}
    return spec(**S.drafters[wildcards.drafter].model_dump(include=names))


def rehearsal_spec(wildcards):
    """What shapes a drafter's data, forward and loss, but not how long and how fast it is trained."""
    pace = ("epochs", "learning_rate", "warmup_ratio", "weight_decay")
    return spec(**shape_of(wildcards.drafter, *pace, "tokens_per_batch", "anchors"))


def kind_of(name):
    """Whether a drafter is this run's own, or a published one."""
    return "drafter" if name in S.drafters else "reference"


def drafting_spec(wildcards):
    """What shapes how a drafter, or a reference, drafts."""
    chosen = EVALUATED[wildcards.drafter]
    return spec(
        name=wildcards.drafter,
        kind=kind_of(wildcards.drafter),
        algorithm=chosen.algorithm,
        capture_layers=chosen.capture_layers,
        speculative_tokens=chosen.speculative_tokens,
        tree_budgets=getattr(chosen, "tree_budgets", ()),
    )


def export_gate_spec(wildcards):
    """What an export must state besides its drafter: k, and positions enough for the engine."""
    return spec(
        speculative_tokens=S.drafters[wildcards.drafter].speculative_tokens,
        max_model_len=S.engine.max_model_len,
    )


def served_prompts():
    """Prompts that are served of each evaluation set."""
    return {name: chosen.prompts for name, chosen in S.evaluation.sets.items()}


def serving_spec(wildcards):
    """What shapes measurements in running engines; speed depends on all of the engine's settings."""
    sampling = {
        "max_tokens": S.evaluation.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": S.seed,
    }
    engine = S.engine.model_dump(
        exclude={"port", "start_timeouts", "restarts", "stall_timeout"}
    )
    return spec(
        **{**response_spec(**sampling), "engine": engine},
        servers={name: each.speculative_tokens for name, each in EVALUATED.items()},
        sets=served_prompts(),
        concurrency=S.evaluation.concurrency,
        together=S.evaluation.together,
    )


def evaluation_gate_spec(wildcards):
    """What must have been served: k tokens a round, so many prompts of each set, at these levels."""
    return spec(
        kind=kind_of(wildcards.drafter),
        speculative_tokens=EVALUATED[wildcards.drafter].speculative_tokens,
        sets=served_prompts(),
        concurrency=S.evaluation.concurrency,
    )


def map_spec(wildcards):
    """Of a vocabulary map: how many tokens it holds, all of the target's where that is None."""
    size = None if wildcards.size == WHOLE else int(wildcards.size)
    return spec(draft_vocab_size=size)


def size_of(drafter):
    """A drafter's vocabulary map by its size; drafters of one size share it."""
    return str(drafter.draft_vocab_size or WHOLE)


def vocabulary_of(wildcards):
    """Folder of the vocabulary map that a drafter uses."""
    return f"{RESULTS}/vocabulary/{size_of(S.drafters[wildcards.drafter])}"


def exported_drafter(wildcards):
    """Manifest of a drafter's export; a reference has none, since it is served as it was adopted."""
    if kind_of(wildcards.drafter) == "reference":
        return []
    return f"{RESULTS}/export/{wildcards.drafter}/manifest.json"


def drafter_manifest(wildcards):
    """What vouches for a drafter's checkpoint: its own gate, or its adoption."""
    folder = {"drafter": "drafters", "reference": "references"}
    return f"{RESULTS}/{folder[kind_of(wildcards.drafter)]}/{wildcards.drafter}/manifest.json"


def checkpoint_of(wildcards):
    """Folder of a drafter's config.json and weights."""
    folder = os.path.dirname(drafter_manifest(wildcards))
    return f"{folder}/checkpoint" if kind_of(wildcards.drafter) == "drafter" else folder


def report_spec(wildcards):
    """What the report tells of, by name and in order."""
    evaluated = {
        name: {
            "kind": kind_of(name),
            "algorithm": each.algorithm,
            "speculative_tokens": each.speculative_tokens,
            **({"size": size_of(each)} if name in S.drafters else {}),
        }
        for name, each in EVALUATED.items()
    }
    sets = [settings.HELDOUT, *sorted(SETS_WITH_SOURCE)]
    return spec(run=S.run, evaluated=evaluated, sets=sets)


def adoption_spec(wildcards):
    """Which published drafter a reference is, and the tokens a round that its configuration will state."""
    names = {"source", "revision", "speculative_tokens"}
    return spec(**S.references[wildcards.reference].model_dump(include=names))


def reference_gate_spec(wildcards):
    """What a published drafter was declared to be, and the positions that the engine needs of it."""
    names = {"algorithm", "capture_layers", "speculative_tokens"}
    declared = S.references[wildcards.reference].model_dump(include=names)
    return spec(**declared, max_model_len=S.engine.max_model_len)


def begin():
    """Before the first job: refuse a run that cannot fit on the disk, else note its plan for the report."""
    if workflow.touch:
        return
    if workflow.executor_plugin.name == "slurm" and not shutil.which("sbatch"):
        raise WorkflowError(
            "no `sbatch` on PATH: start the run on a node that submits jobs to Slurm, "
            "perhaps after `module load slurm`"
        )
    needed = list(workflow.dag.needrun_jobs())
    jobs = [(job.rule.name, job.wildcards_dict) for job in needed]
    try:
        workflow.running = one_run.hold()  # closed with the run
        one_run.refuse_the_future({str(file) for job in needed for file in job.input})
        if not any(rule in planning.FOLDERS for rule, _ in jobs):
            return
        try:
            target = facts.of_target(
                S.target.source, S.target.revision, Path(f"{RESULTS}/target/model")
            )
        except UserError as error:
            # The rule that prepares the target says it better, should it fail too.
            print(f"The disk is not checked: {error}", file=sys.stderr)
            return
        plan = planning.plan(S, target, rates.gather(Path(), S, target, S.environment))
        fitting.check(plan, S, Path(RESULTS), jobs)
        fitting.note(plan, config, Path(LOGS))
    except UserError as error:
        raise WorkflowError(str(error)) from None


def gates_of_the_run():
    """The manifests of a finished run, stage by stage: none needs one of its own or of a later stage."""
    stages = [
        ["target"],
        [f"prompts/{name}" for name in S.evaluation.sets],
        ["responses/train"],
        [f"responses/{split}" for split in SPLITS if split != "train"],
        [f"samples/{split}" for split in SPLITS],
        [
            *(f"vocabulary/{size_of(drafter)}" for drafter in S.drafters.values()),
            *(f"hidden_states/{split}" for split in SPLITS),
        ],
        [
            *(f"drafters/{name}/rehearsal" for name in S.drafters),
            *(f"references/{name}" for name in S.references),
        ],
        [f"drafters/{name}" for name in S.drafters],
        [f"export/{name}" for name in S.drafters],
        [f"evaluation/{name}" for name in EVALUATED],
    ]
    return [
        [f"{RESULTS}/{folder}/manifest.json" for folder in stage] for stage in stages
    ]


def damaged_manifests():
    """What `snakemake verify` found damaged and this run rebuilds."""
    return repairs.due(Path(RESULTS), gates_of_the_run())


def finish():
    """Forget damage that is repaired, or print the report's summary at the end of a run."""
    if repaired := damaged_manifests():
        if said := repairs.finish(Path(RESULTS), repaired):
            print(f"\n{said}", file=sys.stderr)
    elif Path(REPORT).is_file():
        written = Path(REPORT).read_text(encoding="utf-8")
        print(written.partition("\n## Training")[0], file=sys.stderr)
        print(f"\nThe whole report: {REPORT}", file=sys.stderr)
