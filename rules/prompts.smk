# SPDX-License-Identifier: Apache-2.0


rule collect_prompts:
    """Prompts of both splits, chosen by conversation from the configured file."""
    input:
        S.prompts.path,
    output:
        train=f"{RESULTS}/prompts/train.jsonl",
        heldout=f"{RESULTS}/prompts/heldout.jsonl",
    log:
        f"{LOGS}/collect_prompts.log",
    benchmark:
        f"{BENCHMARKS}/collect_prompts.tsv"
    conda:
        CONDA
    params:
        spec=spec(
            train=S.prompts.train,
            heldout=S.prompts.heldout,
            seed=S.seed,
            max_model_len=S.engine.max_model_len,
        ),
        code=code("collect_prompts"),
    shell:
        "python {SCRIPTS}/collect_prompts.py --spec {params.spec:q} --code {params.code} --source {input:q}"
        " --train {output.train} --heldout {output.heldout} 2>&1 | tee {log}"


rule validate_prompts:
    """Gate: shape, ids, repeats and near duplicates; no evaluation prompt among those to train on."""
    input:
        train=f"{RESULTS}/prompts/train.jsonl",
        heldout=f"{RESULTS}/prompts/heldout.jsonl",
    output:
        f"{RESULTS}/prompts/manifest.json",
    log:
        f"{LOGS}/validate_prompts.log",
    benchmark:
        f"{BENCHMARKS}/validate_prompts.tsv"
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("validate_prompts"),
    shell:
        "python {SCRIPTS}/validate_prompts.py --spec {params.spec:q} --code {params.code}"
        " --train {input.train} --evaluation {input.heldout}"
        " --max-near-duplicates {S.prompts.max_near_duplicates} --manifest {output} 2>&1 | tee {log}"
