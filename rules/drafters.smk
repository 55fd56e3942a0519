# SPDX-License-Identifier: Apache-2.0


rule rehearse:
    """A {drafter} that has learnt one row by heart, exported, and what the engine served with it for that row."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        manifest=f"{RESULTS}/samples/{REHEARSED}/manifest.json",
        samples=ancient(f"{RESULTS}/samples/{REHEARSED}/samples.arrow"),
        states=f"{RESULTS}/hidden_states/{REHEARSED}/manifest.json",
    output:
        config=f"{RESULTS}/drafters/{{drafter}}/rehearsal/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/rehearsal/model.safetensors",
        constants=f"{RESULTS}/drafters/{{drafter}}/rehearsal/constants.json",
        served=f"{RESULTS}/drafters/{{drafter}}/rehearsal/served.json",
    log:
        f"{LOGS}/rehearse/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/rehearse/{{drafter}}.tsv"
    conda:
        CONDA
    threads: 8
    resources:
        gpu=S.engine.tensor_parallel,
    params:
        spec=rehearsal_spec,
        code=code("rehearse"),
    shell:
        "python {SCRIPTS}/rehearse.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --vocabulary {input.map} --samples {input.samples} --states {input.states} --engine {ENGINE:q}"
        " --gpus {resources.gpu} --output $(dirname {output.config})"
        " --engine-log {LOGS}/rehearse/{wildcards.drafter}.engine.log"
        " --heartbeat {LOGS}/rehearse/{wildcards.drafter}.heartbeat.json 2>&1 | tee {log}"


rule validate_rehearsal:
    """Gate of a {drafter}'s rehearsal: the row comes back in full blocks, and what is trained is what is served."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        manifest=f"{RESULTS}/samples/{REHEARSED}/manifest.json",
        samples=ancient(f"{RESULTS}/samples/{REHEARSED}/samples.arrow"),
        states=f"{RESULTS}/hidden_states/{REHEARSED}/manifest.json",
        config=f"{RESULTS}/drafters/{{drafter}}/rehearsal/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/rehearsal/model.safetensors",
        constants=f"{RESULTS}/drafters/{{drafter}}/rehearsal/constants.json",
        served=f"{RESULTS}/drafters/{{drafter}}/rehearsal/served.json",
    output:
        f"{RESULTS}/drafters/{{drafter}}/rehearsal/manifest.json",
    log:
        f"{LOGS}/validate_rehearsal/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_rehearsal/{{drafter}}.tsv"
    conda:
        CONDA
    params:
        spec=rehearsal_spec,
        code=code("validate_rehearsal"),
    shell:
        "python {SCRIPTS}/validate_rehearsal.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --vocabulary {input.map} --samples {input.samples} --states {input.states}"
        " --rehearsal $(dirname {input.config}) --manifest {output} 2>&1 | tee {log}"


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
        rehearsal=f"{RESULTS}/drafters/{{drafter}}/rehearsal/manifest.json",
    output:
        config=f"{RESULTS}/drafters/{{drafter}}/checkpoint/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/checkpoint/model.safetensors",
        constants=f"{RESULTS}/drafters/{{drafter}}/checkpoint/constants.json",
        initial=f"{RESULTS}/drafters/{{drafter}}/checkpoint/initial.json",
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
        " --gpus {resources.gpu} --output $(dirname {output.config})"
        " --heartbeat {LOGS}/train/{wildcards.drafter}.heartbeat.json 2>&1 | tee {log}"


rule validate_drafter:
    """Gate of a {drafter}: trained as declared, its tensors what they should be, better than the simplest guess."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        train_manifest=f"{RESULTS}/samples/train/manifest.json",
        heldout_manifest=f"{RESULTS}/samples/heldout/manifest.json",
        train_samples=ancient(f"{RESULTS}/samples/train/samples.arrow"),
        heldout_samples=ancient(f"{RESULTS}/samples/heldout/samples.arrow"),
        heldout_states=f"{RESULTS}/hidden_states/heldout/manifest.json",
        config=f"{RESULTS}/drafters/{{drafter}}/checkpoint/config.json",
        model=f"{RESULTS}/drafters/{{drafter}}/checkpoint/model.safetensors",
        constants=f"{RESULTS}/drafters/{{drafter}}/checkpoint/constants.json",
        initial=f"{RESULTS}/drafters/{{drafter}}/checkpoint/initial.json",
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
        spec=drafter_gate_spec,
        code=code("validate_drafter"),
    shell:
        "python {SCRIPTS}/validate_drafter.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --vocabulary {input.map} --train-samples {input.train_samples}"
        " --heldout-samples {input.heldout_samples} --heldout-states {input.heldout_states}"
        " --checkpoint $(dirname {input.config})"
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


rule validate_export:
    """Gate of a {drafter}'s export: whole, bit for bit the checkpoint, and the same drafter to a server."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        drafter=f"{RESULTS}/drafters/{{drafter}}/manifest.json",
        vocabulary=lambda wildcards: f"{vocabulary_of(wildcards)}/manifest.json",
        map=lambda wildcards: ancient(f"{vocabulary_of(wildcards)}/map.safetensors"),
        states=f"{RESULTS}/hidden_states/heldout/manifest.json",
        config=f"{RESULTS}/export/{{drafter}}/config.json",
        model=f"{RESULTS}/export/{{drafter}}/model.safetensors",
    output:
        f"{RESULTS}/export/{{drafter}}/manifest.json",
    log:
        f"{LOGS}/validate_export/{{drafter}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_export/{{drafter}}.tsv"
    conda:
        CONDA
    params:
        spec=export_gate_spec,
        code=code("validate_export"),
    shell:
        "python {SCRIPTS}/validate_export.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --drafter {input.drafter} --vocabulary {input.map} --states {input.states}"
        " --export $(dirname {input.config}) --manifest {output} 2>&1 | tee {log}"
