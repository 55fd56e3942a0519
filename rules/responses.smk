# SPDX-License-Identifier: Apache-2.0


rule respond:
    """The target's answers to one {part} of a {split}; of greedy ones the hidden states are captured in the same pass."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=prompts_manifest,
        prompts=ancient(f"{RESULTS}/prompts/{{split}}.jsonl"),
    output:
        f"{RESULTS}/responses/{{split}}/{{part}}.jsonl",
    log:
        f"{LOGS}/respond/{{split}}-{{part}}.log",
    benchmark:
        f"{BENCHMARKS}/respond/{{split}}-{{part}}.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=S.engine.tensor_parallel,
    params:
        spec=spec(
            **response_spec(
                max_tokens=S.responses.max_tokens,
                temperature=S.responses.temperature,
                top_p=S.responses.top_p,
            )
        ),
        code=code("respond"),
    shell:
        "python {SCRIPTS}/respond.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --prompts {input.prompts} --part {wildcards.part} --engine {ENGINE:q}"
        " --capture-layers {CAPTURE_LAYERS:q} --gpus {resources.gpu} --max-failed {S.responses.max_failed}"
        " --output {output} --captured {RESULTS}/responses/{wildcards.split}/{wildcards.part}.captured"
        " --engine-log {LOGS}/respond/{wildcards.split}-{wildcards.part}.engine.log"
        " --heartbeat {LOGS}/respond/{wildcards.split}-{wildcards.part}.heartbeat.json 2>&1 | tee {log}"


rule validate_responses:
    """Gate of a {split}: every prompt answered or accounted for; text and reasoning true to the ids."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=prompts_manifest,
        prompts=ancient(f"{RESULTS}/prompts/{{split}}.jsonl"),
        responses=expand(
            f"{RESULTS}/responses/{{{{split}}}}/{{part}}.jsonl", part=PARTS
        ),
        reference=responses_to_train_on,
    output:
        manifest=f"{RESULTS}/responses/{{split}}/manifest.json",
        left_out=f"{RESULTS}/responses/{{split}}/left_out.jsonl",
    log:
        f"{LOGS}/validate_responses/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_responses/{{split}}.tsv"
    conda:
        CONDA
    params:
        spec=spec(truncated=S.responses.truncated, trust_remote_code=TRUST),
        code=code("validate_responses"),
        reference=lambda wildcards, input: (
            f"--reference {input.reference}" if input.reference else ""
        ),
    shell:
        "python {SCRIPTS}/validate_responses.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --prompts {input.prompts} --responses {input.responses}"
        " --limits {LIMITS:q} {params.reference} --manifest {output.manifest} 2>&1 | tee {log}"


rule assemble_samples:
    """Samples of a {split}: exact token ids and loss mask, in one memory-mapped Arrow file."""
    input:
        manifest=f"{RESULTS}/responses/{{split}}/manifest.json",
        left_out=ancient(f"{RESULTS}/responses/{{split}}/left_out.jsonl"),
        responses=ancient(
            expand(f"{RESULTS}/responses/{{{{split}}}}/{{part}}.jsonl", part=PARTS)
        ),
    output:
        f"{RESULTS}/samples/{{split}}/samples.arrow",
    log:
        f"{LOGS}/assemble_samples/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/assemble_samples/{{split}}.tsv"
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("assemble_samples"),
    shell:
        "python {SCRIPTS}/assemble_samples.py --spec {params.spec:q} --code {params.code}"
        " --manifest {input.manifest} --responses {input.responses} --output {output} 2>&1 | tee {log}"


rule validate_samples:
    """Gate of a {split}: prompt ids then response ids byte for byte, mask exactly on the response."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/responses/{{split}}/manifest.json",
        left_out=ancient(f"{RESULTS}/responses/{{split}}/left_out.jsonl"),
        responses=ancient(
            expand(f"{RESULTS}/responses/{{{{split}}}}/{{part}}.jsonl", part=PARTS)
        ),
        samples=f"{RESULTS}/samples/{{split}}/samples.arrow",
    output:
        f"{RESULTS}/samples/{{split}}/manifest.json",
    log:
        f"{LOGS}/validate_samples/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_samples/{{split}}.tsv"
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("validate_samples"),
    shell:
        "python {SCRIPTS}/validate_samples.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --manifest-of-responses {input.manifest} --responses {input.responses}"
        " --samples {input.samples}"
        " --manifest {output} 2>&1 | tee {log}"
