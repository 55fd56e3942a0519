# SPDX-License-Identifier: Apache-2.0


rule collect_prompts:
    """Prompts of both splits, drawn from their sources by weight and conversation."""
    input:
        [source.file for source in S.prompts.sources if source.file],
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
            answers=S.prompts.answers,
            sources=[source.model_dump() for source in S.prompts.sources],
        ),
        code=code("collect_prompts"),
    shell:
        "python {SCRIPTS}/collect_prompts.py --spec {params.spec:q} --code {params.code}"
        " --train {output.train} --heldout {output.heldout} 2>&1 | tee {log}"


rule collect_evaluation_set:
    """Prompts of an evaluation set {split} that has a source of its own: a package, a file or the hub."""
    input:
        file_of_set,
    output:
        f"{RESULTS}/prompts/{{split}}.jsonl",
    log:
        f"{LOGS}/collect_evaluation_set/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/collect_evaluation_set/{{split}}.tsv"
    wildcard_constraints:
        split=either(SETS_WITH_SOURCE),
    conda:
        CONDA
    params:
        spec=evaluation_set_spec,
        code=code("collect_evaluation_set"),
    shell:
        "python {SCRIPTS}/collect_evaluation_set.py --spec {params.spec:q} --code {params.code}"
        " --set {wildcards.split} --output {output} 2>&1 | tee {log}"


rule validate_prompts:
    """Gate of an evaluation set {split} beside the training prompts: shape, ids, repeats, and nothing of it in them."""
    input:
        train=f"{RESULTS}/prompts/train.jsonl",
        evaluation=f"{RESULTS}/prompts/{{split}}.jsonl",
    output:
        f"{RESULTS}/prompts/{{split}}/manifest.json",
    log:
        f"{LOGS}/validate_prompts/{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_prompts/{{split}}.tsv"
    wildcard_constraints:
        split=either(S.evaluation.sets),
    conda:
        CONDA
    params:
        spec=lambda wildcards: spec(setting=setting_of_set(wildcards)),
        code=code("validate_prompts"),
    shell:
        "python {SCRIPTS}/validate_prompts.py --spec {params.spec:q} --code {params.code}"
        " --train {input.train} --evaluation {input.evaluation}"
        " --max-near-duplicates {S.prompts.max_near_duplicates} --manifest {output} 2>&1 | tee {log}"
