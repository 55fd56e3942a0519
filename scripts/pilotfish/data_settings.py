# SPDX-License-Identifier: Apache-2.0
"""Settings of prompts: where those to train on come from, and those to evaluate on."""

import re
from typing import Literal

from pydantic import Field, model_validator

from pilotfish.evaluation_sets import HUMAN_EVAL
from pilotfish.sources import HUB
from pilotfish.strict import Strict

HELDOUT = "heldout"  # the evaluation set that is split off the training prompts
COMMIT = "[0-9a-f]{40}"


class Source(Strict):
    """Where prompts or conversations come from."""

    source: str | None = Field(
        None,
        description="a file of JSON lines or of one JSON list, in gzip or zstd too, or Parquet; or `hub:ORG/NAME` for "
        "a Hugging Face dataset; of an evaluation set also `package:human-eval`, and `heldout` has none",
    )
    field: str | None = Field(
        None,
        description="field of each row with the prompt's text or messages; none means the shapes of OpenAI, ShareGPT, "
        "UltraChat and Alpaca, and texts in `prompt` or `question`",
    )
    split: str | None = Field(None, description="of a hub dataset, e.g. `test`; its first rows are taken")
    config: str | None = Field(None, description="of a hub dataset that has several, its configuration's name")
    revision: str | None = Field(
        None, description="of a hub dataset: its commit, 40 hex digits, since branches and tags move"
    )

    @property
    def file(self) -> str | None:
        """The file that is read, if one is."""
        source = self.source
        return source if source and source != HUMAN_EVAL and not source.startswith(HUB) else None

    @model_validator(mode="after")
    def _options_of_the_source(self) -> "Source":
        source = self.source or ""
        if source.startswith("package:") and source != HUMAN_EVAL:
            raise ValueError(f"source {source!r} is not known; the one package is `{HUMAN_EVAL}`")
        if source.startswith(HUB) and not re.fullmatch(r"[\w.-]+/[\w.-]+", source.removeprefix(HUB)):
            raise ValueError(f"source {source!r} is no dataset's id; write `{HUB}ORG/NAME`")
        needed = {"split", "revision"} if source.startswith(HUB) else set()
        welcome = {"field", "config", *needed} if needed else {"field"} if self.file else set()
        for name in ("field", "split", "revision", "config"):
            given = getattr(self, name) is not None
            if given and name not in welcome:
                raise ValueError(f"`{name}` is not used {f'with source {source!r}' if source else 'here'}; remove it")
            if not given and name in needed:
                raise ValueError(f"`{name}` is missing; a hub dataset needs it ({_described(name)})")
        if self.revision and not re.fullmatch(COMMIT, self.revision):
            raise ValueError(f"revision {self.revision!r} may move; give the commit, 40 hex digits")
        return self


def _described(name: str) -> str:
    return str(Source.model_fields[name].description)


class PromptSource(Source):
    """One of the sources that training and held-out prompts are drawn from."""

    source: str = Field(description=_described("source"))
    weight: float = Field(1.0, gt=0, description="its share of the prompts, beside the weights of the other sources")
    rows: int | None = Field(
        None, gt=0, description="of a hub dataset: how many of its first rows are read, and drawn from"
    )
    max_bad: int = Field(
        0,
        ge=0,
        description="rows that may be left out: no prompts, repeated ids, far too long; each is told in the log",
    )

    @model_validator(mode="after")
    def _rows_of_the_hub(self) -> "PromptSource":
        if self.source == HUMAN_EVAL:
            raise ValueError(f"`{HUMAN_EVAL}` is for evaluation alone; name a file or `{HUB}ORG/NAME`")
        if self.source.startswith(HUB) and self.rows is None:
            raise ValueError("`rows` is missing; say how many of the dataset's first rows are to be read")
        if self.rows is not None and not self.source.startswith(HUB):
            raise ValueError(f"`rows` is not used with source {self.source!r}; remove it")
        return self


class PromptSettings(Strict):
    """Where prompts come from, and how conversations are split."""

    sources: list[PromptSource] = Field(min_length=1, description="what the prompts are drawn from, mixed by weight")
    answers: Literal["anew", "last", "given"] = Field(
        "anew",
        description="of conversations that are trained on: `anew`, the target gives every answer, turn by turn and "
        "each turn a row; `last`, the data's stay and the target gives the last; `given`, it gives none, and each of "
        "the data's is a row. Of held-out prompts, and in evaluation, it always gives the last",
    )
    train: int = Field(gt=0, description="rows to train on")
    heldout: int = Field(gt=0, description="rows never trained on, the evaluation set `heldout`")
    max_near_duplicates: float = Field(
        0.1, ge=0, le=1, description="share of the rows to train on that may nearly repeat another before it fails"
    )


class EvaluationSet(Source):
    """Prompts to evaluate on; each set is answered, captured and checked as the training prompts are."""

    prompts: int = Field(
        gt=0, description="prompts of the set; of `heldout` those that are served, at most `prompts.heldout`"
    )
