"""The axes of tasks that train a Transformer language model. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import model_validator

from model.config import SIZES, VOCAB_SIZE, Dimensions
from tasks.spec.axes import WORK, Affects, axis
from tasks.spec.parameters import (
    AttentionAxisParams,
    PositiveInt,
    pass_axis,
    work_axis,
)

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
    """Parameters of a training step.

    The model is named by `size` and `year`, described by its dimensions, or made by your own factory.
    """

    size: Size | None = axis(
        None,
        "model by its name in the course: tiny and mini (for trials), small, medium, large, xl, "
        "2.7B, 10B",
        affects=WORK,
    )
    year: Literal[2025, 2026] = axis(2025, "year of the course's sizes: xl differs", affects=WORK)
    d_model: PositiveInt | None = axis(
        None,
        "width of the model; null with `size` or `model`, like the next three",
        unit="elements",
        affects=WORK,
    )
    d_ff: PositiveInt | None = axis(
        None, "inner width of the feed-forward module", unit="elements", affects=WORK
    )
    num_layers: PositiveInt | None = work_axis(None, "number of blocks")
    num_heads: PositiveInt | None = axis(None, "attention heads in each block", affects=WORK)
    model: str | None = axis(
        None, "your own model: package.module:Factory, from token ids to logits"
    )
    model_args: dict[str, Any] = axis({}, "keyword arguments of the factory", affects=WORK)
    context_length: PositiveInt = work_axis(512, "length of each sequence", "tokens")
    batch_size: PositiveInt = work_axis(4, "sequences in a step", "sequences")
    vocab_size: PositiveInt = work_axis(VOCAB_SIZE, "size of the vocabulary", "tokens")
    compile: Compile = "eager"
    pass_: Pass = pass_axis("train_step", get_args(Pass))
    optimizer: Literal["course", "foreach", "fused"] = axis(
        "course",
        "course: the plain loop of AdamW; foreach and fused: torch's AdamW with that option",
        affects=WORK & ~Affects.GRAPH,
    )

    @model_validator(mode="after")
    def _require_one_model(self) -> Self:
        dimensions = (self.d_model, self.d_ff, self.num_layers, self.num_heads)
        ways = [self.size is not None, any(dimensions), self.model is not None]
        if sum(ways) != 1:
            raise ValueError(
                "name the model in exactly one way: size, or d_model with the rest, or model"
            )
        if any(dimensions) and not all(dimensions):
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
        self.dimensions  # noqa: B018  raises ValueError if the dimensions do not fit together
        return self

    @property
    def dimensions(self) -> Dimensions | None:
        """Dimensions of the course's model; None for your own model."""
        if self.size is not None:
            return SIZES[self.year][self.size]
        if self.d_model and self.d_ff and self.num_layers and self.num_heads:
            return Dimensions(self.d_model, self.d_ff, self.num_layers, self.num_heads)
        return None
