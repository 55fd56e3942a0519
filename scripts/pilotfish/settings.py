# SPDX-License-Identifier: Apache-2.0
"""The configuration as typed models: unknown keys forbidden, numbers are numbers, units in the text."""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pilotfish.errors import UserError

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"  # becomes a folder name and a wildcard
Name = Annotated[str, Field(pattern=NAME)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


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
        if self.revision and (self.source.startswith("package:") or Path(self.source).expanduser().is_dir()):
            raise ValueError("`revision` is only used with a hub id; remove it for a folder or a package")
        return self


class PromptSettings(Strict):
    """Where prompts come from, and how conversations are split."""

    path: str = Field(description="JSONL file, one object a line with `id` and `messages`")
    train: int = Field(gt=0, description="rows to train on")
    heldout: int = Field(gt=0, description="rows never trained on; evaluation uses these")
    max_near_duplicates: float = Field(
        0.1, ge=0, le=1, description="share of the rows to train on that may nearly repeat another before it fails"
    )


class ResponseSettings(Strict):
    """How the target answers the prompts."""

    max_tokens: int = Field(gt=1, description="longest response, in tokens")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 keeps the whole distribution")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="passed to the chat template, e.g. `enable_thinking: false`"
    )
    parts: int = Field(1, gt=0, description="jobs that a split is divided into, each with its own engine")
    max_failed: int = Field(0, ge=0, description="rows a split may lose to refused requests before it fails")
    truncated: Literal["keep", "drop"] = Field(
        "keep", description="answers cut at max_tokens: train on what there is of them, or leave them out"
    )
    max_truncated: float = Field(0.5, ge=0, le=1, description="share of answers that may be cut before it fails")
    max_loops: float = Field(0.1, ge=0, le=1, description="share of answers that may end in a loop before it fails")
    max_flawed: float = Field(
        0.05, ge=0, le=1, description="share of answers that may be left out: broken reasoning, empty, repeated"
    )


class Eagle3Settings(Strict):
    """An EAGLE-3 drafter: one decoder layer over three of the target's hidden states."""

    algorithm: Literal["eagle3"]
    draft_vocab_size: int = Field(gt=0, description="tokens the drafter can propose, the most frequent ones")
    capture_layers: tuple[int, int, int] | None = Field(
        None, description="three h(k) layer numbers; none means {2, L//2, L-3}"
    )
    speculative_tokens: int = Field(3, gt=0, le=16, description="tokens drafted per round, k")
    ttt_steps: int = Field(3, gt=0, le=16, description="training-time test steps")
    ttt_step_loss_decay: float = Field(1.0, gt=0, le=1, description="loss weight of step s is this to the s")
    loss: Literal["kl_div", "ce"] = Field("kl_div", description="against the target's distribution")
    epochs: int = Field(gt=0, description="passes over the training samples")
    learning_rate: float = Field(gt=0, description="peak of the cosine schedule")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of steps that warm up")
    weight_decay: float = Field(0.01, ge=0, description="of AdamW")
    pack_length: int = Field(gt=1, description="tokens per training step; no sample may be longer")

    @model_validator(mode="after")
    def _steps_cover_drafting(self) -> "Eagle3Settings":
        if self.ttt_steps < self.speculative_tokens:
            raise ValueError(
                f"ttt_steps ({self.ttt_steps}) is below speculative_tokens ({self.speculative_tokens}): "
                "the last drafted tokens would never have been trained; raise ttt_steps"
            )
        return self


# A union discriminated by `algorithm:` as soon as there is a second one.
DrafterSettings = Eagle3Settings


class EvaluationSettings(Strict):
    """What is measured in a running engine, with and without each drafter."""

    prompts: int = Field(gt=0, description="held-out conversations served, at most `prompts.heldout`")
    max_tokens: int = Field(gt=1, description="tokens per served answer, at most `responses.max_tokens`")
    concurrency: list[Annotated[int, Field(gt=0)]] = Field(
        [1, 8], min_length=1, description="requests under way at once, one measurement each"
    )


# What a job sets itself, or must have its own way.
MANAGED_ARGUMENTS = {
    *("--host", "--port", "--model", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs"),
    *("--tensor-parallel-size", "--enable-prefix-caching", "--enable-chunked-prefill", "--trust-remote-code"),
    *("--speculative-config", "--kv-transfer-config", "--reasoning-parser", "--enforce-eager"),
}


class EngineSettings(Strict):
    """How vLLM is started; the same for generation, capture and both sides of serving."""

    max_model_len: int = Field(gt=1, description="longest prompt plus response, in tokens")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="of the weights")
    tensor_parallel: int = Field(1, gt=0, description="GPUs per engine; must fit the profile's nodes")
    max_num_seqs: int = Field(64, gt=0, description="requests computed together while generating")
    enforce_eager: bool = Field(False, description="skip compilation: faster start, slower tokens")
    kv_cache_gib: int | None = Field(None, gt=0, description="KV cache on the CPU engine, GiB")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of GPU memory")
    port: int | None = Field(None, gt=1023, lt=65536, description="fixed port; none takes a free one")
    start_timeout: int = Field(1800, gt=0, description="seconds an engine may take to get ready")
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
    seed: int = Field(0, ge=0, description="of the split, the sampling and the training order")
    target: TargetSettings = Field(description="the model being sped up")
    prompts: PromptSettings = Field(description="where prompts come from")
    responses: ResponseSettings = Field(description="how the target answers them")
    drafters: dict[Name, DrafterSettings] = Field(min_length=1, description="drafters to train, by name")
    evaluation: EvaluationSettings = Field(description="what is measured in a running engine")
    engine: EngineSettings = Field(description="how vLLM is started")

    @model_validator(mode="after")
    def _fits_together(self) -> "Settings":
        if "baseline" in self.drafters:
            raise ValueError("drafters.baseline: the name is taken by the engine without a drafter; rename it")
        if len(set(self.evaluation.concurrency)) < len(self.evaluation.concurrency):
            raise ValueError(f"evaluation.concurrency: {self.evaluation.concurrency} repeats a level; name each once")
        if self.evaluation.prompts > self.prompts.heldout:
            raise ValueError(
                f"evaluation.prompts ({self.evaluation.prompts}) exceeds prompts.heldout "
                f"({self.prompts.heldout}); lower it, or hold out more"
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


def load(config: dict) -> Settings:
    """Validate a configuration; a UserError lists every fault with its key and cure.

    Mappings and sequences arrive from YAML as dicts and lists; whole numbers are accepted as floats.
    """
    try:
        return Settings.model_validate_json(json.dumps(config, default=str))
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors())
        raise UserError(f"the configuration has {error.error_count()} fault(s):\n{faults}") from None


def _explain(fault: dict) -> str:
    where = ".".join(str(part) for part in fault["loc"]) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        known = _fields_at(fault["loc"][:-1])
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        cure = f"did you mean `{near[0]}`?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{where}: unknown key; {cure}"
    if fault["type"] == "missing":
        return f"{where}: missing; it has no default, so set it"
    if fault["type"] == "string_pattern_mismatch":
        named = str(fault["loc"][-2] if fault["loc"][-1] == "[key]" else fault["loc"][-1])
        return f"{where}: {fault['input']!r} names a folder: use letters, digits, - and _ only ({named})"
    value = fault["input"]
    if isinstance(value, str) and fault["type"] in ("float_type", "int_type"):
        return f"{where}: {_number_cure(value, whole=fault['type'] == 'int_type')}"
    message = fault["msg"].removeprefix("Value error, ")
    if isinstance(value, dict):
        return f"{where}: {message}" if fault["loc"] else message
    return f"{where}: {message} (found {value!r})"


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


def _fields_at(location: tuple) -> list[str]:
    model: Any = Settings
    for part in location:
        if part in getattr(model, "model_fields", {}):
            model = model.model_fields[part].annotation
        else:  # the name of a drafter
            model = DrafterSettings
    return list(getattr(model, "model_fields", {}))


if __name__ == "__main__":  # PYTHONPATH=scripts python -m pilotfish.settings > config/schema.json
    print(json.dumps(Settings.model_json_schema(), indent=2))
