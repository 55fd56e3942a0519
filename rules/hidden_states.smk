# SPDX-License-Identifier: Apache-2.0


rule capture:
    """Shards of hidden states for one {part} of a {split}: `respond`'s where they fit, computed where not."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/samples/{{split}}/manifest.json",
        samples=ancient(f"{RESULTS}/samples/{{split}}/samples.arrow"),
    output:
        f"{RESULTS}/hidden_states/{{split}}/{{part}}/index.json",
    log:
        f"{LOGS}/capture/{{split}}-{{part}}.log",
    benchmark:
        f"{BENCHMARKS}/capture/{{split}}-{{part}}.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=S.engine.tensor_parallel,
    params:
        spec=lambda wildcards: spec(
            capture_layers=DRAFTER_LAYERS,
            rows=rows_of(wildcards.split),
            engine=ENGINE_NUMERICS,
            trust_remote_code=TRUST,
        ),
        code=code("capture"),
    shell:
        "python {SCRIPTS}/capture.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --manifest {input.manifest} --samples {input.samples} --part {wildcards.part} --engine {ENGINE:q}"
        " --gpus {resources.gpu} --captured {RESULTS}/responses/{wildcards.split}/{wildcards.part}.captured"
        " --output $(dirname {output})"
        " --engine-log {LOGS}/capture/{wildcards.split}-{wildcards.part}.engine.log"
        " --heartbeat {LOGS}/capture/{wildcards.split}-{wildcards.part}.heartbeat.json 2>&1 | tee {log}"


rule validate_hidden_states:
    """Gate of a {split}: every sample has its states, of the declared layers, as the target computes them."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/samples/{{split}}/manifest.json",
        samples=ancient(f"{RESULTS}/samples/{{split}}/samples.arrow"),
        indexes=expand(
            f"{RESULTS}/hidden_states/{{{{split}}}}/{{part}}/index.json", part=PARTS
        ),
    output:
        f"{RESULTS}/hidden_states/{{split}}/manifest.json",
    log:
        f"{LOGS}/validate_hidden_states/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_hidden_states/{{split}}.tsv"
    conda:
        CONDA
    resources:
        gpu=S.engine.tensor_parallel,
    params:
        spec=lambda wildcards: spec(
            capture_layers=DRAFTER_LAYERS,
            dtype=S.engine.dtype,
            temperature=temperature_of(wildcards.split),
            trust_remote_code=TRUST,
        ),
        code=code("validate_hidden_states"),
    shell:
        "python {SCRIPTS}/validate_hidden_states.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --samples {input.samples} --indexes {input.indexes}"
        " --gpus {resources.gpu} --manifest {output} 2>&1 | tee {log}"
