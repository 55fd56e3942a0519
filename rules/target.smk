# SPDX-License-Identifier: Apache-2.0


rule prepare_target:
    """The target's files, linked or dequantised, and a manifest with their checksums and the model's facts."""
    output:
        manifest=f"{RESULTS}/target/manifest.json",
        config=f"{RESULTS}/target/model/config.json",
    log:
        f"{LOGS}/prepare_target.log",
    benchmark:
        f"{BENCHMARKS}/prepare_target.tsv"
    conda:
        CONDA
    params:
        spec=spec(
            source=S.target.source,
            revision=S.target.revision,
            trust_remote_code=TRUST,
            reasoning_parser=S.target.reasoning_parser,
        ),
        code=code("prepare_target"),
    shell:
        "python {SCRIPTS}/prepare_target.py --spec {params.spec:q} --code {params.code}"
        " --model-folder {RESULTS}/target/model --manifest {output.manifest} 2>&1 | tee {log}"
