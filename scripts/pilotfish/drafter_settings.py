# SPDX-License-Identifier: Apache-2.0
"""Settings of a drafter, by its algorithm, and of a published one that is only evaluated."""

from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, model_validator

from pilotfish.strict import Strict

GAMMAS = ((16, 7.0), (10, 5.0), (0, 4.0))  # of the DFlash paper: the smallest block size of each
MOST_DRAFTED = 63  # tokens a round
TOKENS_PER_ANCHOR = 6  # of the DFlash paper: 512 anchors in 3,072 tokens
Budgets = list[Annotated[int, Field(gt=0, le=1024)]]


class TrainingSettings(Strict):
    """How any drafter is trained."""

    epochs: int = Field(gt=0, description="passes over the training samples")
    learning_rate: float = Field(gt=0, description="peak of the cosine schedule")
    warmup_ratio: float = Field(0.03, ge=0, lt=1, description="share of steps that warm up")
    weight_decay: float = Field(0.01, ge=0, description="of AdamW")
    tokens_per_batch: int = Field(gt=1, description="tokens per training step; no sample may be longer")


class Eagle3Settings(TrainingSettings):
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

    @model_validator(mode="after")
    def _steps_cover_drafting(self) -> "Eagle3Settings":
        if self.ttt_steps < self.speculative_tokens:
            raise ValueError(
                f"ttt_steps ({self.ttt_steps}) is below speculative_tokens ({self.speculative_tokens}): "
                "the last drafted tokens would never have been trained; raise ttt_steps"
            )
        return self

    def written_out(self) -> dict[str, Any]:
        """All values, those included that follow from others."""
        return self.model_dump()


class DFlashSettings(TrainingSettings):
    """A DFlash drafter: a block of tokens in one pass, over five of the target's hidden states."""

    algorithm: Literal["dflash"]
    draft_vocab_size: int | None = Field(
        None, gt=0, description="tokens the drafter can propose, the most frequent ones; none means all of the target's"
    )
    capture_layers: tuple[int, ...] | None = Field(
        None, description="h(k) layer numbers; none means five, the outputs of layers round(linspace(1, L-3, 5))"
    )
    draft_layers: int = Field(5, gt=0, le=16, description="decoder layers of the drafter")
    block_size: int = Field(
        16, gt=1, le=MOST_DRAFTED + 1, description="tokens of a block: a known one, and those to draft"
    )
    anchors: int | Literal["auto"] = Field(
        "auto", description="blocks trained per batch; auto is one for six tokens, so 512 at 3,072"
    )
    mask_token: int | str | None = Field(
        None, description="token in the place of those to draft; none takes the tokenizer's own, or an unused id"
    )
    gamma: float | None = Field(
        None, gt=0, description="slot j weighs exp(-(j-1)/gamma); none is 7 / 5 / 4 from block size 16 / 10 / 2 on"
    )
    loss: Literal["hard", "soft"] | dict[Literal["hard", "soft"], Annotated[float, Field(gt=0)]] = Field(
        "hard", description="cross-entropy on the data's token, or on the target's distribution, or weights of both"
    )
    noise: float = Field(
        0.0, ge=0, description="on the hidden states seen in training, in their standard deviations; never on labels"
    )
    learning_rate: float = Field(6.0e-4, gt=0, description="peak of the cosine schedule")
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="share of steps that warm up")
    tree_budgets: Budgets = Field([8], description="node budgets of the draft trees to replay, the root not counted")

    @computed_field(description="tokens drafted per round, k: the whole block but the known token")  # type: ignore[prop-decorator]
    @property
    def speculative_tokens(self) -> int:
        return self.block_size - 1

    @model_validator(mode="after")
    def _sensible(self) -> "DFlashSettings":
        if self.anchors != "auto" and self.anchors < 1:
            raise ValueError(f"anchors ({self.anchors}) must be 1 or more, or auto")
        if not self.loss:
            raise ValueError("loss: an empty mix; give `hard`, `soft` or both a weight")
        return self

    def written_out(self) -> dict[str, Any]:
        """All values, those included that follow from others: anchors, gamma, and the loss as weights."""
        gamma = self.gamma or next(value for least, value in GAMMAS if self.block_size >= least)
        anchors = -(-self.tokens_per_batch // TOKENS_PER_ANCHOR) if self.anchors == "auto" else self.anchors
        loss = {self.loss: 1.0} if isinstance(self.loss, str) else self.loss
        return {**self.model_dump(), "gamma": gamma, "anchors": anchors, "loss": loss}


DRAFTERS = {"eagle3": Eagle3Settings, "dflash": DFlashSettings}  # by algorithm
DrafterSettings = Annotated[Eagle3Settings | DFlashSettings, Field(discriminator="algorithm")]


class ReferenceSettings(Strict):
    """A published drafter for the same target, evaluated beside those that are trained here."""

    source: str = Field(description="a folder, or a hub id; in the format of speculators, SGLang or z-lab")
    revision: str | None = Field(None, description="commit, tag or branch of a hub id; none means its main")
    algorithm: Literal["eagle3", "dflash"] = Field(description="what it is")
    capture_layers: tuple[int, ...] = Field(min_length=1, description="h(k) layer numbers that it sees")
    speculative_tokens: int = Field(
        gt=0, le=MOST_DRAFTED, description="tokens drafted per round, k; of DFlash block size - 1"
    )
    tree_budgets: Budgets = Field([], description="node budgets of the draft trees to replay, the root not counted")

    @model_validator(mode="after")
    def _trees_need_blocks(self) -> "ReferenceSettings":
        if self.tree_budgets and self.algorithm != "dflash":
            raise ValueError(f"tree_budgets: {self.algorithm} drafts chains, no trees; remove it")
        return self
