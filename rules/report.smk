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
            size=sorted({d.draft_vocab_size for d in S.drafters.values()}),
        ),
        rehearsals=expand(
            f"{RESULTS}/drafters/{{drafter}}/rehearsal/manifest.json",
            drafter=S.drafters,
        ),
        drafters=expand(
            f"{RESULTS}/drafters/{{drafter}}/manifest.json", drafter=S.drafters
        ),
        replays=expand(
            f"{RESULTS}/evaluation/{{drafter}}/replay.json", drafter=S.drafters
        ),
        evaluations=expand(
            f"{RESULTS}/evaluation/{{drafter}}/manifest.json", drafter=S.drafters
        ),
    output:
        REPORT,
    log:
        f"{LOGS}/report.log",
    conda:
        CONDA
    params:
        spec=spec(
            run=S.run,
            drafters={
                name: {
                    "size": d.draft_vocab_size,
                    "speculative_tokens": d.speculative_tokens,
                }
                for name, d in S.drafters.items()
            },
        ),
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
