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
        spec=spec(train=S.prompts.train, heldout=S.prompts.heldout, seed=S.seed),
        code=code("collect_prompts"),
    shell:
        "python {SCRIPTS}/collect_prompts.py --spec {params.spec:q} --code {params.code} --source {input:q}"
        " --train {output.train} --heldout {output.heldout} 2>&1 | tee {log}"


rule validate_prompts:
    """Gate: schema, unique ids, no conversation on both sides."""
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
        " --splits {input.train} {input.heldout} --manifest {output} 2>&1 | tee {log}"
