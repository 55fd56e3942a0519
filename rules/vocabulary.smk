# SPDX-License-Identifier: Apache-2.0


rule map_vocabulary:
    """Draft vocabulary of {size} tokens: the most frequent ones of the training responses."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        manifest=f"{RESULTS}/samples/train/manifest.json",
        samples=ancient(f"{RESULTS}/samples/train/samples.arrow"),
    output:
        f"{RESULTS}/vocabulary/{{size}}/map.safetensors",
    log:
        f"{LOGS}/map_vocabulary/{{size}}.log",
    benchmark:
        f"{BENCHMARKS}/map_vocabulary/{{size}}.tsv"
    conda:
        CONDA
    params:
        spec=map_spec,
        code=code("map_vocabulary"),
    shell:
        "python {SCRIPTS}/map_vocabulary.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --manifest {input.manifest} --samples {input.samples}"
        " --output {output} 2>&1 | tee {log}"


rule validate_vocabulary:
    """Gate of a map of {size}: offsets and mask agree, forced tokens are in, counted on the present data."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        train=f"{RESULTS}/samples/train/manifest.json",
        heldout=f"{RESULTS}/samples/heldout/manifest.json",
        train_samples=ancient(f"{RESULTS}/samples/train/samples.arrow"),
        heldout_samples=ancient(f"{RESULTS}/samples/heldout/samples.arrow"),
        map=f"{RESULTS}/vocabulary/{{size}}/map.safetensors",
    output:
        f"{RESULTS}/vocabulary/{{size}}/manifest.json",
    log:
        f"{LOGS}/validate_vocabulary/{{size}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_vocabulary/{{size}}.tsv"
    conda:
        CONDA
    params:
        spec=map_spec,
        code=code("validate_vocabulary"),
    shell:
        "python {SCRIPTS}/validate_vocabulary.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --train-samples {input.train_samples}"
        " --heldout-samples {input.heldout_samples} --map {input.map} --manifest {output} 2>&1 | tee {log}"
