# SPDX-License-Identifier: Apache-2.0
"""Print what a run will do and cost, stage by stage, before anything runs; neither weights nor torch are loaded.

python scripts/plan.py config/default.yaml
python scripts/plan.py my.yaml --hardware gpu --facts '{"hidden_size": 7168, "layers": 61, ...}'
"""

import argparse
import json
from pathlib import Path

from pilotfish import cli, disk, facts, plan_page, planning, rates, settings
from pilotfish.errors import UserError


def main() -> None:
    arguments = _arguments()
    chosen = settings.load(_configuration(arguments))
    results = Path("results") / chosen.run
    given = facts.of_mapping(_json("--facts", arguments.facts)) if arguments.facts else None
    target = given or facts.of_target(chosen.target.source, chosen.target.revision, results / "target/model")
    hardware = arguments.hardware or chosen.environment
    made = planning.plan(chosen, target, rates.gather(Path(), chosen, target, hardware))
    print(plan_page.render(made, disk.free_bytes(results)), end="")


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("config", nargs="?", type=Path, default=Path("config/default.yaml"), help="configuration, YAML")
    made.add_argument("--spec", help="the configuration as a JSON object, instead of a file")
    made.add_argument("--code", default="by-hand", help="digest of the code; not used")
    made.add_argument("--hardware", choices=("cpu", "gpu"), help="what it is to run on; else the `environment` setting")
    made.add_argument("--facts", help="JSON of the target's facts: hidden_size, layers, vocab_size, parameters, ...")
    return made.parse_args()


def _configuration(arguments: argparse.Namespace) -> dict:
    if arguments.spec:
        return _json("--spec", arguments.spec)
    return settings.read(arguments.config)


def _json(option: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{option}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{option}: a JSON object is needed, in braces")
    return value


if __name__ == "__main__":
    cli.run(main)
