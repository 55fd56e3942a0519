# SPDX-License-Identifier: Apache-2.0


rule train:
    """Checkpoint of a {drafter}; resumes from its last state when it was interrupted."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        train_manifest=f"{RESULTS}/samples/train/manifest.json",
        heldout_manifest=f"{RESULTS}/samples/heldout/manifest.json",
        train_samples=ancient(f"{RESULTS}/samples/train/samples.arrow"),
        heldout_samples=ancient(f"{RESULTS}/samples/heldout/samples.arrow"),
        train_states=f"{RESULTS}/hidden_states/train/manifest.json",
        heldout_states=f"{RESULTS}/hidden_states/heldout/manifest.json",
    output:
        config=f"{RESULTS}/drafters/{{drafter}}/checkpoint/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/checkpoint/model.safetensors",
        log=f"{RESULTS}/drafters/{{drafter}}/checkpoint/training_log.jsonl",
    log:
        f"{LOGS}/train/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/train/{{drafter}}.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=1,
    params:
        spec=drafter_spec,
        code=code("train"),
    shell:
        "python {SCRIPTS}/train.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --vocabulary {input.map} --train-samples {input.train_samples} --train-states {input.train_states}"
        " --heldout-samples {input.heldout_samples} --heldout-states {input.heldout_states}"
        " --gpus {resources.gpu} --output $(dirname {output.config}) 2>&1 | tee {log}"


rule validate_drafter:
    """Gate of a {drafter}: loss finite and falling, weights finite, map and layers the right ones."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        config=f"{RESULTS}/drafters/{{drafter}}/checkpoint/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/checkpoint/model.safetensors",
        log=f"{RESULTS}/drafters/{{drafter}}/checkpoint/training_log.jsonl",
    output:
        f"{RESULTS}/drafters/{{drafter}}/manifest.json",
    log:
        f"{LOGS}/validate_drafter/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_drafter/{{drafter}}.tsv"
    conda:
        CONDA
    params:
        spec=drafting_spec,
        code=code("validate_drafter"),
    shell:
        "python {SCRIPTS}/validate_drafter.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --vocabulary {input.map} --checkpoint $(dirname {input.config})"
        " --manifest {output} 2>&1 | tee {log}"


rule export:
    """A {drafter} as a folder that `vllm serve` loads as it is."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/drafters/{{drafter}}/manifest.json",
    output:
        config=f"{RESULTS}/export/{{drafter}}/config.json",
        model=f"{RESULTS}/export/{{drafter}}/model.safetensors",
    log:
        f"{LOGS}/export/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/export/{{drafter}}.tsv"
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("export"),
    shell:
        "python {SCRIPTS}/export.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --drafter {input.manifest} --output $(dirname {output.config}) 2>&1 | tee {log}"
