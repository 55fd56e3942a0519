# SPDX-License-Identifier: Apache-2.0
# Settings, paths and the functions that rules use. Imported while planning: neither torch nor pandas.

import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))
# Jobs run with the interpreter that runs Snakemake, unless --sdm conda puts another in front.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

from pilotfish import digest, settings
from pilotfish.errors import UserError

try:
    S = settings.load(config)
    if not Path(S.prompts.path).is_file():
        raise UserError(
            f"prompts.path: no file {S.prompts.path!r} in {Path.cwd()}; check the path"
        )
except UserError as error:
    raise WorkflowError(str(error)) from None

SCRIPTS = os.path.relpath(Path(workflow.basedir) / "scripts")
RESULTS = f"results/{S.run}"
LOGS = f"logs/{S.run}"
BENCHMARKS = f"benchmarks/{S.run}"
REPORT = f"{RESULTS}/report.md"
CONDA = f"../envs/{S.environment}.yaml"
SPLITS = ("train", "heldout")
PARTS = [f"{n:05d}-of-{S.responses.parts:05d}" for n in range(S.responses.parts)]
SERVERS = ("baseline", *S.drafters)

# Snakemake does not track globals in a shell line: how an engine is run changes no artifact's identity,
# and the layers captured along the way none of the text.
ENGINE = S.engine.model_dump_json()
DRAFTER_LAYERS = sorted(
    {d.capture_layers for d in S.drafters.values()}, key=lambda x: x or ()
)
CAPTURE_LAYERS = digest.spec_json(DRAFTER_LAYERS)
# Nor do a gate's limits change what it lets pass.
LIMITS = digest.spec_json(
    S.responses.model_dump(include={"max_truncated", "max_loops", "max_flawed"})
)
ENGINE_NUMERICS = S.engine.model_dump(include={"max_model_len", "dtype", "extra_args"})
TRUST = S.target.trust_remote_code


wildcard_constraints:
    split="|".join(SPLITS),
    part=r"\d{5}-of-\d{5}",
    drafter="|".join(S.drafters),
    server="|".join(SERVERS),
    size=r"\d+",


def code(name):
    """Digest of what the rule's script can reach, so that a comment reruns nothing."""
    return digest.code_digest(Path(workflow.basedir) / "scripts" / f"{name}.py")


def spec(**values):
    """Canonical JSON of the settings that shape a rule's artifact."""
    return digest.spec_json(values)


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


def responses_to_train_on(wildcards):
    """Manifest of the training split's responses, whose mode the other split must share."""
    if wildcards.split == "train":
        return []
    return f"{RESULTS}/responses/train/manifest.json"


def drafter_spec(wildcards):
    """Everything that shapes a drafter's training."""
    chosen = S.drafters[wildcards.drafter].model_dump()
    return spec(**chosen, seed=S.seed, trust_remote_code=TRUST)


def drafter_gate_spec(wildcards):
    """What a trained drafter is held against."""
    names = {"capture_layers", "speculative_tokens", "epochs"}
    names |= {"learning_rate", "warmup_ratio"}
    return spec(**S.drafters[wildcards.drafter].model_dump(include=names))


def rehearsal_spec(wildcards):
    """What shapes a drafter's data, forward and loss, but not how long and how fast it is trained."""
    pace = {"epochs", "learning_rate", "warmup_ratio", "weight_decay", "pack_length"}
    chosen = S.drafters[wildcards.drafter].model_dump(exclude=pace)
    return spec(**chosen, seed=S.seed, trust_remote_code=TRUST)


def drafting_spec(wildcards):
    """What shapes how a trained drafter drafts."""
    chosen = S.drafters[wildcards.drafter]
    return spec(
        name=wildcards.drafter,
        capture_layers=chosen.capture_layers,
        speculative_tokens=chosen.speculative_tokens,
    )


def export_gate_spec(wildcards):
    """What an export must state besides its drafter: k, and positions enough for the engine."""
    return spec(
        speculative_tokens=S.drafters[wildcards.drafter].speculative_tokens,
        max_model_len=S.engine.max_model_len,
    )


def serving_spec(wildcards):
    """What shapes a measurement in a running engine; speed depends on all of the engine's settings."""
    sampling = {
        "max_tokens": S.evaluation.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": S.seed,
    }
    drafter = S.drafters.get(wildcards.server)
    return spec(
        **{
            **response_spec(**sampling),
            "engine": S.engine.model_dump(
                exclude={"port", "start_timeout", "stall_timeout"}
            ),
        },
        server=wildcards.server,
        speculative_tokens=drafter.speculative_tokens if drafter else None,
        prompts=S.evaluation.prompts,
        concurrency=S.evaluation.concurrency,
    )


def evaluation_gate_spec(wildcards):
    """What must have been served: k tokens a round, so many prompts, at these levels."""
    return spec(
        speculative_tokens=S.drafters[wildcards.drafter].speculative_tokens,
        prompts=S.evaluation.prompts,
        concurrency=S.evaluation.concurrency,
    )


def map_gate_spec(wildcards):
    """Of a vocabulary map's gate: the map's size, and the k for which its ceiling on tau is wanted."""
    size = int(wildcards.size)
    wanted = {
        d.speculative_tokens for d in S.drafters.values() if d.draft_vocab_size == size
    }
    return spec(draft_vocab_size=size, speculative_tokens=sorted(wanted))


def vocabulary_of(wildcards):
    """Folder of the vocabulary map that a drafter uses; drafters of one size share it."""
    return f"{RESULTS}/vocabulary/{S.drafters[wildcards.drafter].draft_vocab_size}"


def exported_drafter(wildcards):
    """Manifest of the served drafter's export; none for the baseline."""
    if wildcards.server == "baseline":
        return []
    return f"{RESULTS}/export/{wildcards.server}/manifest.json"


def damaged_manifests():
    """Manifests that `snakemake verify` has taken away, with what they vouched for."""
    noted = Path(f"{RESULTS}/damaged.json")
    if not noted.is_file():
        return []
    names = json.loads(noted.read_text(encoding="utf-8"))["manifests"]
    return [f"{RESULTS}/{name}" for name in names]


def finish():
    """Forget damage that is repaired, or print the report's summary at the end of a run."""
    if repaired := damaged_manifests():
        if all(Path(manifest).is_file() for manifest in repaired):
            Path(f"{RESULTS}/damaged.json").unlink()
            print(
                f"\nRebuilt: {', '.join(repaired)}. Run again: what follows runs only where their bytes differ.",
                file=sys.stderr,
            )
        return
    written = Path(REPORT)
    if written.is_file():
        print(
            written.read_text(encoding="utf-8").partition("\n## Training")[0],
            file=sys.stderr,
        )
        print(f"\nThe whole report: {REPORT}", file=sys.stderr)
