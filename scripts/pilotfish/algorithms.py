# SPDX-License-Identifier: Apache-2.0
"""The algorithms that a drafter can be of, each a module that builds, feeds and scores its own.

An algorithm's module has: `build(spec, target, layers, maps)`, a fresh model in fp32; `view(sample, states)`, what the
trainer takes of a sample, with `EXTRA` tokens beside the states' own; `collator(spec, tokens, hidden, layers, dtype)`,
which packs views; `call_arguments(spec)`, those of the model's forward beside the batch; and `accuracy(metrics,
batch, spec)`, the share of drafted tokens that are right with all before them, by place in the draft.
"""

from collections.abc import Mapping
from types import ModuleType

from pilotfish import dflash, eagle3

MODULES = {"eagle3": eagle3, "dflash": dflash}


def of(spec: Mapping) -> ModuleType:
    """The module of a drafter's algorithm."""
    return MODULES[spec["algorithm"]]
