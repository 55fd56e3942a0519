# SPDX-License-Identifier: Apache-2.0


rule adopt_reference:
    """A published drafter, the {reference}, in the format that replay and server read; its tensors as they came."""
    input:
        target=f"{RESULTS}/target/manifest.json",
    output:
        config=f"{RESULTS}/references/{{reference}}/config.json",
        model=f"{RESULTS}/references/{{reference}}/model.safetensors",
        record=f"{RESULTS}/references/{{reference}}/adopted.json",
    log:
        f"{LOGS}/adopt_reference/{{reference}}.log",
    benchmark:
        f"{BENCHMARKS}/adopt_reference/{{reference}}.tsv"
    conda:
        CONDA
    params:
        spec=adoption_spec,
        code=code("adopt_reference"),
    shell:
        "python {SCRIPTS}/adopt_reference.py --spec {params.spec:q} --code {params.code} --target {input.target}"
        " --output $(dirname {output.config}) 2>&1 | tee {log}"


rule validate_reference:
    """Gate of a {reference}: whole, bit for bit the published one, made for this target, and as it was declared."""
    input:
        target=f"{RESULTS}/target/manifest.json",
        config=f"{RESULTS}/references/{{reference}}/config.json",
        model=f"{RESULTS}/references/{{reference}}/model.safetensors",
        record=f"{RESULTS}/references/{{reference}}/adopted.json",
    output:
        f"{RESULTS}/references/{{reference}}/manifest.json",
    log:
        f"{LOGS}/validate_reference/{{reference}}.log",
    benchmark:
        f"{BENCHMARKS}/validate_reference/{{reference}}.tsv"
    conda:
        CONDA
    params:
        spec=reference_gate_spec,
        code=code("validate_reference"),
    shell:
        "python {SCRIPTS}/validate_reference.py --spec {params.spec:q} --code {params.code}"
        " --target {input.target} --reference $(dirname {input.config}) --manifest {output} 2>&1 | tee {log}"
