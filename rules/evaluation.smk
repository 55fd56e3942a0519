# SPDX-License-Identifier: Apache-2.0


rule replay:
    """Exact tau of a {drafter} on the stored held-out responses, with neither a server nor a target."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        drafter=f"{RESULTS}/drafters/{{drafter}}/manifest.json",
        manifest=f"{RESULTS}/samples/heldout/manifest.json",
        samples=ancient(f"{RESULTS}/samples/heldout/samples.arrow"),
        states=f"{RESULTS}/hidden_states/heldout/manifest.json",
    output:
        f"{RESULTS}/evaluation/{{drafter}}/replay.json",
    log:
        f"{LOGS}/replay/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/replay/{{drafter}}.tsv"
    conda:
        CONDA
    threads: 8
    params:
        spec=drafting_spec,
        code=code("replay"),
    shell:
        "python {SCRIPTS}/replay.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --drafter {input.drafter} --samples {input.samples} --states {input.states}"
        " --output {output} 2>&1 | tee {log}"


rule serve:
    """Measurements of a {server}: the engine with a drafter, or `baseline`, under the same flags."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/prompts/manifest.json",
        prompts=ancient(f"{RESULTS}/prompts/heldout.jsonl"),
        drafter=exported_drafter,
    output:
        f"{RESULTS}/evaluation/{{server}}/served.json",
    log:
        f"{LOGS}/serve/{{server}}.log",
    benchmark:
        f"{BENCHMARKS}/serve/{{server}}.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=S.engine.tensor_parallel,
    params:
        spec=serving_spec,
        code=code("serve"),
        drafter=lambda wildcards, input: (
            f"--drafter {Path(input.drafter).parent}" if input.drafter else ""
        ),
    shell:
        "python {SCRIPTS}/serve.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --prompts {input.prompts} {params.drafter} --engine {ENGINE:q}"
        " --gpus {resources.gpu} --output {output}"
        " --engine-log {LOGS}/serve/{wildcards.server}.engine.log 2>&1 | tee {log}"


rule validate_evaluation:
    """Gate of a {drafter}'s measurements: the trained drafter was served, and its rounds and texts are right."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        drafter=f"{RESULTS}/drafters/{{drafter}}/manifest.json",
        export=f"{RESULTS}/export/{{drafter}}/manifest.json",
        responses=f"{RESULTS}/responses/train/manifest.json",
        baseline=f"{RESULTS}/evaluation/baseline/served.json",
        served=f"{RESULTS}/evaluation/{{drafter}}/served.json",
        replay=f"{RESULTS}/evaluation/{{drafter}}/replay.json",
        manifest=f"{RESULTS}/samples/heldout/manifest.json",
        samples=ancient(f"{RESULTS}/samples/heldout/samples.arrow"),
        states=f"{RESULTS}/hidden_states/heldout/manifest.json",
    output:
        f"{RESULTS}/evaluation/{{drafter}}/manifest.json",
    log:
        f"{LOGS}/validate_evaluation/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_evaluation/{{drafter}}.tsv"
    conda:
        CONDA
    params:
        spec=evaluation_gate_spec,
        code=code("validate_evaluation"),
    shell:
        "python {SCRIPTS}/validate_evaluation.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --drafter {input.drafter} --export {input.export}"
        " --responses {input.responses} --samples {input.samples} --states {input.states}"
        " --baseline {input.baseline} --served {input.served} --replay {input.replay}"
        " --manifest {output} 2>&1 | tee {log}"
