# SPDX-License-Identifier: Apache-2.0
"""The configuration as typed models: unknown keys forbidden, numbers are numbers, units in the text."""

import difflib
import json
import os
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator

from pilotfish.data_settings import HELDOUT, EvaluationSet, PromptSettings
from pilotfish.drafter_settings import DRAFTERS, DrafterSettings, ReferenceSettings
from pilotfish.errors import UserError
from pilotfish.evaluation_sets import HUMAN_EVAL
from pilotfish.sources import HUB
from pilotfish.strict import Name, Strict, absurdities, repeated_keys

SHOWN = 20  # faults listed in an error
LONGEST_SHOWN = 200  # characters of a value in an error


class TargetSettings(Strict):
    """The model being sped up."""

    source: str = Field(
        description="a Hugging Face folder, a hub id such as `Qwen/Qwen3-8B`, or `package:NAME` for a GGUF "
        "model inside an installed Python package"
    )
    revision: str | None = Field(None, description="commit, tag or branch of a hub id; none means its main")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model; think first")
    reasoning_parser: str | None = Field(
        None, description="vLLM reasoning parser that splits reasoning from answer, e.g. `deepseek_r1`"
    )

    @model_validator(mode="after")
    def _revision_needs_hub(self) -> "TargetSettings":
        if self.revision and (self.source.startswith("package:") or os.path.isdir(os.path.expanduser(self.source))):
            raise ValueError("`revision` is only used with a hub id; remove it for a folder or a package")
        return self


class ResponseSettings(Strict):
    """How the target answers the prompts."""

    max_tokens: int = Field(gt=1, description="longest response, in tokens")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 keeps the whole distribution")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="passed to the chat template, e.g. `enable_thinking: false`"
    )
    parts: int = Field(1, gt=0, le=99_999, description="jobs that a split is divided into, each with its own engine")
    max_failed: int = Field(0, ge=0, description="rows a split may lose to refused requests before it fails")
    truncated: Literal["keep", "drop"] = Field(
        "keep", description="answers cut at max_tokens: train on what there is of them, or leave them out"
    )
    max_truncated: float = Field(0.5, ge=0, le=1, description="share of answers that may be cut before it fails")
    max_loops: float = Field(0.1, ge=0, le=1, description="share of answers that may end in a loop before it fails")
    max_flawed: float = Field(
        0.05, ge=0, le=1, description="share of answers that may be left out: broken reasoning, empty, repeated"
    )


class EvaluationSettings(Strict):
    """What is measured, by replay and in a running engine, with and without each drafter."""

    sets: dict[Name, EvaluationSet] = Field(description="evaluation sets by name; `heldout` is always among them")
    max_tokens: int = Field(gt=1, description="tokens per served answer, at most `responses.max_tokens`")
    concurrency: list[Annotated[int, Field(gt=0)]] = Field(
        [1, 8], min_length=1, description="requests under way at once, one measurement each"
    )
    together: bool = Field(
        True,
        description="all servers up at once, requests in turn, so that the machine's drift cancels; false where "
        "the GPUs do not suffice: one server after the other",
    )

    @model_validator(mode="after")
    def _named_sets(self) -> "EvaluationSettings":
        if len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency {_shown(self.concurrency)} repeats a level; name each once")
        if HELDOUT not in self.sets:
            raise ValueError(
                "sets lacks `heldout`, which training is measured on; add `heldout: {prompts: N}`, N of the "
                "prompts.heldout rows"
            )
        if self.sets[HELDOUT].source is not None:
            raise ValueError(
                "sets.heldout is split off prompts.sources, so `source` is not used; remove it, or rename the set"
            )
        for name, chosen in self.sets.items():
            if name in ("train", "baseline"):
                raise ValueError(f"sets.{name}: the name is taken; rename the set")
            if name != HELDOUT and chosen.source is None:
                raise ValueError(f"sets.{name} needs a `source`: a file, `{HUMAN_EVAL}` or `{HUB}ORG/NAME`")
        return self


# What a job sets itself, or must have its own way.
MANAGED_ARGUMENTS = {
    *("--host", "--port", "--model", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs"),
    *("--tensor-parallel-size", "--enable-prefix-caching", "--enable-chunked-prefill", "--trust-remote-code"),
    *("--speculative-config", "--kv-transfer-config", "--reasoning-parser", "--enforce-eager"),
    *("--scheduler-cls", "--worker-extension-cls"),
}


class StartTimeouts(Strict):
    """Seconds that each stage of an engine's start may take, counted from the stage before."""

    process: int = Field(300, gt=0, description="until vLLM has resolved its configuration")
    weights: int = Field(3600, gt=0, description="until the weights are loaded; 24 minutes are normal for 547 GB")
    compile: int = Field(1800, gt=0, description="until kernels are compiled or tuned, and the KV cache is laid out")
    ready: int = Field(300, gt=0, description="until the server answers")


class EngineSettings(Strict):
    """How vLLM is started; the same for generation, capture and both sides of serving."""

    max_model_len: int = Field(gt=1, description="longest prompt plus response, in tokens")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="of the target as served and of its states; a drafter is trained in fp32 if this is"
    )
    tensor_parallel: int = Field(1, gt=0, description="GPUs per engine; must fit the profile's nodes")
    max_num_seqs: int = Field(64, gt=0, description="requests computed together while generating")
    enforce_eager: bool = Field(False, description="skip compilation: faster start, slower tokens")
    kv_cache_gib: int | None = Field(None, gt=0, description="KV cache on the CPU engine, GiB")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of GPU memory")
    port: int | None = Field(
        None, gt=1023, lt=65536, description="fixed port, of several servers the first one's; none takes free ones"
    )
    start_timeouts: StartTimeouts = Field(StartTimeouts(), description="limits on the stages of an engine's start")
    restarts: int = Field(2, ge=0, description="engines started anew when one is lost in the middle of its work")
    stall_timeout: int = Field(900, gt=0, description="seconds without a finished row before giving up")
    extra_args: list[str] = Field([], description="further vLLM arguments, for example `--enable-expert-parallel`")

    @model_validator(mode="after")
    def _own_arguments(self) -> "EngineSettings":
        for argument in self.extra_args:
            if argument.partition("=")[0] in MANAGED_ARGUMENTS:
                raise ValueError(
                    f"engine.extra_args: {argument} is set by Pilotfish; remove it, or use its own setting"
                )
        return self


class Settings(Strict):
    """A whole run."""

    run: Name = Field(description="names results/RUN, logs/RUN and benchmarks/RUN")
    environment: Literal["cpu", "gpu"] = Field("cpu", description="envs/NAME.yaml, for `--sdm conda` only")
    seed: int = Field(0, ge=0, lt=2**32, description="of the split, the sampling and the training order")
    target: TargetSettings = Field(description="the model being sped up")
    prompts: PromptSettings = Field(description="where prompts come from")
    responses: ResponseSettings = Field(description="how the target answers them")
    drafters: dict[Name, DrafterSettings] = Field(min_length=1, description="drafters to train, by name")
    references: dict[Name, ReferenceSettings] = Field(
        {}, description="published drafters for the same target, by name, evaluated beside those trained here"
    )
    evaluation: EvaluationSettings = Field(description="what is measured in a running engine")
    engine: EngineSettings = Field(description="how vLLM is started")

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        for name in ("baseline", *self.references):
            if name in self.drafters:
                taken = "a reference" if name in self.references else "the engine without a drafter"
                raise ValueError(f"drafters.{name}: the name is taken by {taken}; rename one")
        if (served := self.evaluation.sets[HELDOUT].prompts) > self.prompts.heldout:
            raise ValueError(
                f"evaluation.sets.heldout.prompts ({served}) exceeds prompts.heldout ({self.prompts.heldout}); "
                "lower it, or hold out more"
            )
        if self.evaluation.max_tokens > self.responses.max_tokens:
            raise ValueError(
                f"evaluation.max_tokens ({self.evaluation.max_tokens}) exceeds responses.max_tokens "
                f"({self.responses.max_tokens}): replay would have nothing to compare with; lower it"
            )
        if self.responses.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"responses.max_tokens ({self.responses.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len}); raise the latter"
            )
        return self

    def files(self) -> dict[str, str]:
        """The files of prompts that are named here, by their settings."""
        sets = {f"evaluation.sets.{name}.source": chosen.file for name, chosen in self.evaluation.sets.items()}
        sets |= {f"prompts.sources.{n}.source": each.file for n, each in enumerate(self.prompts.sources)}
        return {setting: file for setting, file in sets.items() if file}


def read(path: Path) -> dict:
    """A configuration file as YAML gives it; UserError where it is none, or where a key stands twice.

    YAML itself, and so Snakemake, keeps the last of two and says nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
        twice = list(islice(repeated_keys(yaml.compose(text, yaml.SafeLoader)), SHOWN))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({error}); check the path and the file") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds no settings; copy config/default.yaml and change it")
    if twice:
        raise UserError("\n".join(f"{path}, line {line}: {key[:100]!r} is set twice; keep one" for key, line in twice))
    return config


def load(config: dict) -> Settings:
    """Validate a configuration; a UserError lists every fault with its key and cure.

    Mappings and sequences arrive from YAML as dicts and lists; whole numbers are accepted as floats.
    """
    if absurd := list(islice(absurdities(config), SHOWN)):
        raise UserError("the configuration is refused:\n" + "\n".join(f"  {each}" for each in absurd))
    try:
        return Settings.model_validate_json(json.dumps(config, default=str))
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors()[:SHOWN])
        more = "\n  ..." if error.error_count() > SHOWN else ""
        raise UserError(f"the configuration has {error.error_count()} fault(s):\n{faults}{more}") from None


def _shown(value: object) -> str:
    """A value as it stands in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _explain(fault: dict) -> str:
    path, model = _located(fault["loc"])
    where = ".".join(path) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        known = list(getattr(model, "model_fields", {}))
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        cure = f"did you mean `{near[0]}`?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{where}: unknown key; {cure}"
    if fault["type"].startswith("union_tag"):
        return f"{where}.algorithm: {_shown(fault['input'].get('algorithm'))}; choose {' or '.join(DRAFTERS)}"
    if fault["type"] == "missing":
        return f"{where}: missing; it has no default, so set it"
    if fault["type"] == "string_pattern_mismatch":
        named = str(fault["loc"][-2] if fault["loc"][-1] == "[key]" else fault["loc"][-1])
        return f"{where}: {_shown(fault['input'])} names a folder: use letters, digits, - and _ only ({named})"
    value = fault["input"]
    if isinstance(value, str) and fault["type"] in ("float_type", "int_type"):
        return f"{where}: {_number_cure(value, whole=fault['type'] == 'int_type')}"
    message = fault["msg"].removeprefix("Value error, ")
    if isinstance(value, dict):
        return f"{where}: {message}" if fault["loc"] else message
    return f"{where}: {message} (found {_shown(value)})"


def _number_cure(text: str, whole: bool) -> str:
    """What to write instead of a text that stands where a number is needed."""
    try:
        number = float(text)
    except ValueError:
        return f"the text {text!r} where a number is needed"
    if "e" not in text.lower():
        return f"the string {text!r} where a number is needed; remove the quotes"
    if whole and number.is_integer():
        return f"{text!r} is a string to YAML; write {int(number)}"
    mantissa, exponent = f"{number:e}".split("e")
    mantissa = f"{mantissa.rstrip('0')}0" if mantissa.rstrip("0").endswith(".") else mantissa.rstrip("0")
    return f"{text!r} is a string to YAML; write {mantissa}e{int(exponent):+d}, with a dot"


def _located(location: tuple) -> tuple[list[str], Any]:
    """The keys of a fault's place as the user wrote them, and the model that the last key stands in.

    pydantic names the member of a union on the way as well: a drafter's algorithm, or a type.
    """
    path: list[str] = []
    inner: Any = Settings
    model = inner
    for part in location:
        fields = getattr(inner, "model_fields", {})
        if part in fields:
            model, inner = inner, fields[part].annotation
        elif get_origin(inner) is Annotated:
            if part in DRAFTERS:
                inner = DRAFTERS[part]
                continue
        elif get_origin(inner) is list and isinstance(part, int):
            inner = get_args(inner)[0]
        elif get_origin(inner) is dict:  # a name
            inner = get_args(inner)[1]
        elif get_origin(inner) in (Union, UnionType) and not isinstance(part, int):  # a type
            continue
        else:
            model = inner
        path.append(str(part))
    return path, model


if __name__ == "__main__":  # PYTHONPATH=scripts python -m pilotfish.settings > config/schema.json
    print(json.dumps(Settings.model_json_schema(), indent=2))
