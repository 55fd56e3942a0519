# SPDX-License-Identifier: Apache-2.0


rule report:
    """The run's report: data, training, replay, serving, cost of each stage, and how to serve the drafter."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        responses=expand(f"{RESULTS}/responses/{{split}}/manifest.json", split=SPLITS),
        samples=expand(f"{RESULTS}/samples/{{split}}/manifest.json", split=SPLITS),
        states=expand(f"{RESULTS}/hidden_states/{{split}}/manifest.json", split=SPLITS),
        vocabularies=expand(
            f"{RESULTS}/vocabulary/{{size}}/manifest.json",
            size=sorted({size_of(d) for d in S.drafters.values()}),
        ),
        rehearsals=expand(
            f"{RESULTS}/drafters/{{drafter}}/rehearsal/manifest.json",
            drafter=S.drafters,
        ),
        drafters=expand(
            f"{RESULTS}/drafters/{{drafter}}/manifest.json", drafter=S.drafters
        ),
        replays=expand(
            f"{RESULTS}/evaluation/{{drafter}}/{{split}}/replay.json",
            drafter=EVALUATED,
            split=S.evaluation.sets,
        ),
        evaluations=expand(
            f"{RESULTS}/evaluation/{{drafter}}/manifest.json", drafter=EVALUATED
        ),
    output:
        REPORT,
    log:
        f"{LOGS}/report.log",
    conda:
        CONDA
    params:
        spec=report_spec,
        code=code("report"),
    shell:
        "python {SCRIPTS}/report.py --spec {params.spec:q} --code {params.code} --results {RESULTS}"
        " --benchmarks {BENCHMARKS} --plan {LOGS}/plan.json --output {output} 2>&1 | tee {log}"


rule plan:
    """What the whole run will do and cost, stage by stage, printed; `make plan` does the same without Snakemake."""
    log:
        f"{LOGS}/plan.log",
    conda:
        CONDA
    params:
        spec=digest.spec_json(config),
        code=code("plan"),
    shell:
        "python {SCRIPTS}/plan.py --spec {params.spec:q} --code {params.code} 2>&1 | tee {log}"


rule verify:
    """Every byte of the run read again and compared with its manifests; damaged files are taken away."""
    log:
        f"{LOGS}/verify.log",
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("verify"),
        manifests=sum(gates_of_the_run(), []),
    shell:
        "python {SCRIPTS}/verify.py --spec {params.spec:q} --code {params.code} --results {RESULTS}"
        " --manifests {params.manifests} 2>&1 | tee {log}"
