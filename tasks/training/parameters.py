"""The axes of tasks that train a Transformer language model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from model.config import SIZES, VOCAB_SIZE, Dimensions
from tasks.spec.parameters import AttentionAxisParams, PositiveInt

Compile = Literal["eager", "blocks", "model"]
Pass = Literal["forward", "forward_grad", "forward_backward", "train_step"]
Size = Literal["tiny", "mini", "small", "medium", "large", "xl", "2.7B", "10B"]

PHASES: dict[Pass, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward_grad": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
}


class TrainStepParams(AttentionAxisParams):
    """The model is named by `size` and `year`, spelled out by its dimensions, or brought along as a factory."""

    more_memory_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "context_length": (),
        "batch_size": (),
        "vocab_size": (),
        "num_layers": (),
        "pass": tuple(PHASES),
    }

    size: Size | None = Field(None, description="a size of the course")
    year: Literal[2025, 2026] = Field(2025, description="which course year's sizes: xl differs")
    d_model: PositiveInt | None = None
    d_ff: PositiveInt | None = None
    num_layers: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    model: str | None = Field(
        None, description="your own model: package.module:Factory, from token ids to logits"
    )
    model_args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory"
    )
    context_length: PositiveInt = 512
    batch_size: PositiveInt = 4
    vocab_size: PositiveInt = VOCAB_SIZE
    compile: Compile = "eager"
    pass_: Pass = Field("train_step", alias="pass")
    optimizer: Literal["course", "foreach", "fused"] = "course"

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        spelled = (self.d_model, self.d_ff, self.num_layers, self.num_heads)
        ways = [self.size is not None, any(spelled), self.model is not None]
        if sum(ways) != 1:
            raise ValueError(
                "name the model in exactly one way: size, or d_model with the rest, or model"
            )
        if any(spelled) and not all(spelled):
            raise ValueError("d_model, d_ff, num_layers and num_heads go together")
        if self.size is not None and self.size not in SIZES[self.year]:
            raise ValueError(
                f"size {self.size} is not of {self.year}, which has {', '.join(SIZES[self.year])}"
            )
        if self.model is not None and not all(self.model.partition(":")):
            raise ValueError(f"model {self.model!r} is not of the form package.module:Factory")
        if self.model_args and self.model is None:
            raise ValueError("model_args are of a model of your own: name it with model")
        if self.model is not None and self.attention != "naive":
            raise ValueError("attention is of the course's model: yours computes its own")
        self.dimensions  # noqa: B018  raises where they do not fit together
        return self

    @property
    def dimensions(self) -> Dimensions | None:
        """None for a model that somebody brought along."""
        if self.size is not None:
            return SIZES[self.year][self.size]
        if self.d_model and self.d_ff and self.num_layers and self.num_heads:
            return Dimensions(self.d_model, self.d_ff, self.num_layers, self.num_heads)
        return None
