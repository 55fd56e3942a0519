# SPDX-License-Identifier: Apache-2.0
# Pilotfish: train and serve speculative-decoding drafters. Read this page, then rules/, then scripts/.

from snakemake.utils import min_version

min_version("9.27")

# A configuration file stands alone: the embedded default is read only where none is given.
if not workflow.overwrite_configfiles:

    configfile: f"{workflow.basedir}/config/default.yaml"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/responses.smk"
include: "rules/hidden_states.smk"
include: "rules/vocabulary.smk"
include: "rules/drafters.smk"
include: "rules/references.smk"
include: "rules/evaluation.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        # First what `snakemake verify` found damaged: rebuilt alone, it makes nothing that follows run again
        # unless its bytes differ.
        damaged_manifests()
        or [
            REPORT,
            *expand(
                f"{RESULTS}/export/{{drafter}}/{{file}}",
                drafter=S.drafters,
                file=("config.json", "model.safetensors"),
            ),
        ],


onstart:
    begin()


onsuccess:
    finish()
