# SPDX-License-Identifier: Apache-2.0


rule replay:
    """Exact tau of a {drafter} on the stored responses of a {split}, with neither a server nor a target."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        drafter=drafter_manifest,
        manifest=f"{RESULTS}/samples/{{split}}/manifest.json",
        samples=ancient(f"{RESULTS}/samples/{{split}}/samples.arrow"),
        states=f"{RESULTS}/hidden_states/{{split}}/manifest.json",
    output:
        f"{RESULTS}/evaluation/{{drafter}}/{{split}}/replay.json",
    log:
        f"{LOGS}/replay/{{drafter}}-{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/replay/{{drafter}}-{{split}}.tsv"
    wildcard_constraints:
        drafter=either(EVALUATED),
        split=either(S.evaluation.sets),
    conda:
        CONDA
    threads: 8
    params:
        spec=drafting_spec,
        code=code("replay"),
        checkpoint=checkpoint_of,
    shell:
        "python {SCRIPTS}/replay.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --drafter {input.drafter} --checkpoint {params.checkpoint} --samples {input.samples}"
        " --states {input.states} --output {output} 2>&1 | tee {log}"


rule serve:
    """Measurements of all servers, the engine without a drafter and with each, by turns and under the same flags."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifests=expand(
            f"{RESULTS}/prompts/{{split}}/manifest.json", split=S.evaluation.sets
        ),
        prompts=ancient(
            expand(f"{RESULTS}/prompts/{{split}}.jsonl", split=S.evaluation.sets)
        ),
        drafters=expand(
            f"{RESULTS}/export/{{drafter}}/manifest.json", drafter=S.drafters
        ),
        references=[
            f"{RESULTS}/references/{name}/manifest.json"
            for name in EVALUATED
            if kind_of(name) == "reference"
        ],
    output:
        expand(
            f"{RESULTS}/evaluation/{{server}}/served.json",
            server=("baseline", *EVALUATED),
        ),
    log:
        f"{LOGS}/serve.log",
    benchmark:
        f"{BENCHMARKS}/serve.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=S.engine.tensor_parallel
        * (1 + len(EVALUATED) if S.evaluation.together else 1),
    params:
        spec=serving_spec,
        code=code("serve"),
    shell:
        "python {SCRIPTS}/serve.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --prompts {input.prompts} --drafters {input.drafters} --references {input.references}"
        " --engine {ENGINE:q} --gpus {resources.gpu} --outputs {output} --engine-logs {LOGS}/serve"
        " --heartbeat {LOGS}/serve.heartbeat.json 2>&1 | tee {log}"


rule validate_evaluation:
    """Gate of a {drafter}'s measurements: the trained drafter was served, and its rounds and texts are right."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        drafter=drafter_manifest,
        export=exported_drafter,
        responses=f"{RESULTS}/responses/train/manifest.json",
        baseline=f"{RESULTS}/evaluation/baseline/served.json",
        served=f"{RESULTS}/evaluation/{{drafter}}/served.json",
        replays=expand(
            f"{RESULTS}/evaluation/{{{{drafter}}}}/{{split}}/replay.json",
            split=S.evaluation.sets,
        ),
        manifests=expand(
            f"{RESULTS}/samples/{{split}}/manifest.json", split=S.evaluation.sets
        ),
        samples=ancient(
            expand(
                f"{RESULTS}/samples/{{split}}/samples.arrow", split=S.evaluation.sets
            )
        ),
        states=expand(
            f"{RESULTS}/hidden_states/{{split}}/manifest.json", split=S.evaluation.sets
        ),
    output:
        f"{RESULTS}/evaluation/{{drafter}}/manifest.json",
    log:
        f"{LOGS}/validate_evaluation/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_evaluation/{{drafter}}.tsv"
    wildcard_constraints:
        drafter=either(EVALUATED),
    conda:
        CONDA
    params:
        spec=evaluation_gate_spec,
        code=code("validate_evaluation"),
        export=lambda wildcards, input: (
            f"--export {input.export}" if input.export else ""
        ),
    shell:
        "python {SCRIPTS}/validate_evaluation.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --drafter {input.drafter} {params.export}"
        " --responses {input.responses} --samples {input.samples} --states {input.states}"
        " --baseline {input.baseline} --served {input.served} --replays {input.replays}"
        " --manifest {output} 2>&1 | tee {log}"
