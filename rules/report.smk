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
        " --benchmarks {BENCHMARKS} --output {output} 2>&1 | tee {log}"


rule verify:
    """Every byte of the run read again and compared with its manifests; damaged files are taken away."""
    log:
        f"{LOGS}/verify.log",
    conda:
        CONDA
    params:
        spec=spec(),
        code=code("verify"),
    shell:
        "python {SCRIPTS}/verify.py --spec {params.spec:q} --code {params.code} --results {RESULTS} 2>&1 | tee {log}"
