"""The axes of tasks that train a Transformer language model. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from model.config import SIZES, VOCAB_SIZE, VOCABULARIES, Dimensions
from tasks.spec.axes import WORK, Affects, Values, axis
from tasks.spec.parameters import AttentionAxisParams, PositiveInt, pass_axis, work_axis
from tasks.spec.source_digest import HUB
from tasks.training.presets import PRESETS

_NO_GRAPH = Affects.ALL & ~Affects.GRAPH
# A module and a name in it.
_IMPORT_PATH = r"^[^:\s]+:[^:\s]+$"
Compile = Literal["eager", "blocks", "model"]
Pass = Literal["forward", "forward_grad", "forward_backward", "train_step"]
Size = Literal[
    "tiny", "mini", "small", "medium", "large", "xl", "2.7B", "10B",
    "smollm2-135m", "tinyllama-1.1b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b", "llama-3-8b",
]  # fmt: skip
Checkpointing = (
    Literal["none", "blocks", "groups:2", "selective", "selective:2"]
    | Annotated[str, Field(pattern=r"^groups:[1-9][0-9]{0,5}$")]
)
OptimizerName = (
    Literal["course", "foreach", "fused", "loop", "sgd", "adafactor", "muon"]
    | Annotated[str, Field(pattern=_IMPORT_PATH)]
)
Loss = Literal["cross_entropy", "chunked", "model"] | Annotated[str, Field(pattern=_IMPORT_PATH)]

PHASES: dict[Pass, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward_grad": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": ("forward", "backward", "optimizer"),
}

# Axes that mean nothing in inference, with the types of their values: others are refused later.
_OF_BACKWARD = {"checkpointing": str, "gradient_accumulation": int, "loss": str}


class TrainStepParams(AttentionAxisParams):
    """Parameters of a training step.

    The model is named by `size` and `year`, described by its dimensions, or made by your own
    factory.
    """

    size: Size | None = axis(
        None,
        "model by its name in the course: tiny and mini (for trials), small, medium, large, xl, "
        "2.7B, 10B; or the shape of a published model, with its vocabulary unless vocab_size is "
        "set: smollm2-135m, tinyllama-1.1b, llama-3.2-1b, llama-3.2-3b, mistral-7b, llama-3-8b",
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
    num_kv_heads: PositiveInt | None = axis(
        None,
        "heads of keys and values in each block; null: num_heads, or those of the size",
        affects=WORK,
    )
    tie_embeddings: bool = axis(
        False, "true: the head has the weight of the embedding, as some sizes have", affects=WORK
    )
    model: str | None = axis(
        None,
        "your own model: package.module:Factory, from token ids to logits; or hf:NAME, a model of "
        "transformers by a preset, a config class, a folder or its name on the hub",
    )
    model_args: Values = axis(
        {}, "keyword arguments of the factory, or values of the hf: config", affects=WORK
    )
    context_length: PositiveInt = work_axis(512, "length of each sequence", "tokens")
    batch_size: PositiveInt = work_axis(4, "sequences in a step", "sequences")
    vocab_size: PositiveInt = work_axis(VOCAB_SIZE, "size of the vocabulary", "tokens")
    compile: Compile = "eager"
    pass_: Pass = pass_axis("train_step", get_args(Pass))
    optimizer: OptimizerName = axis(
        "course",
        "course: the plain loop of AdamW; foreach, fused and loop: torch's AdamW with or without "
        "these options; sgd (fused), adafactor (a loop), muon (fused AdamW for all but the "
        "matrices of the blocks), or any class: package.module:Class",
        affects=_NO_GRAPH,
    )
    lora: PositiveInt | None = axis(
        None,
        "rank of low-rank adapters of all linear layers in the blocks, with alpha of twice the "
        "rank; all other weights are frozen; null: none",
    )
    optimizer_args: Values = axis(
        {}, "keyword arguments of the optimizer, such as momentum", affects=WORK & ~Affects.GRAPH
    )
    optimizer_step: Literal["after", "in_backward"] = axis(
        "after",
        "after: one step after the backward pass; in_backward: each parameter is updated when its "
        "gradient is complete, and the gradient is freed",
        affects=_NO_GRAPH,
    )
    loss: Loss = axis(
        "cross_entropy",
        "cross_entropy: of all logits together; chunked: of 512 tokens at a time, whose logits the "
        "backward pass computes again; model: what your model returns for labels=…; or "
        "package.module:function of (model, tokens, targets)",
    )
    checkpointing: Checkpointing = axis(
        "none",
        "activations that the backward pass computes again: none; blocks: all of each block; "
        "groups:K, such as groups:2: all of K neighbouring blocks together; selective: all but "
        "matrix products and attention; selective:2: also every second product with a weight",
    )
    gradient_accumulation: PositiveInt = axis(
        1,
        "micro-batches of a step, of batch_size sequences each",
        unit="micro-batches",
        affects=WORK & ~Affects.GRAPH,
    )

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: object) -> object:
        """Give values that mean the same one form, so that they are one cell.

        Axes of a backward pass are dropped from inference, and a named model gets its vocabulary.
        """
        if not isinstance(values, dict):
            return values
        own = dict(values)
        if str(own.get("size")) in VOCABULARIES:
            own.setdefault("vocab_size", VOCABULARIES[str(own["size"])])
        if str(own.get("model")).startswith(HUB):
            own.setdefault("attention", "sdpa")
            preset = PRESETS.get(str(own["model"]).removeprefix(HUB))
            if preset is not None:
                own.setdefault("vocab_size", preset.vocab_size)
        if own.get("checkpointing") == "groups:1":
            own["checkpointing"] = "blocks"
        pass_ = own.get("pass", own.get("pass_", "train_step"))
        if pass_ == "forward":
            for name, kind in _OF_BACKWARD.items():
                if isinstance(own.get(name), kind):
                    del own[name]
        if pass_ != "train_step" and own.get("optimizer_step") == "in_backward":
            del own["optimizer_step"]
        return own

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
        if self.model is not None and (self.num_kv_heads or self.tie_embeddings):
            raise ValueError("num_kv_heads and tie_embeddings are of the built-in model")
        if self.hub_name:
            self._require_of_hub()
        elif self.model is not None and self.attention != "naive":
            raise ValueError("attention is of the course's model: yours computes its own")
        self.dimensions  # noqa: B018  raises ValueError if the dimensions do not fit together
        return self

    def _require_of_hub(self) -> None:
        if self.attention not in ("naive", "sdpa"):
            raise ValueError(
                f"attention: {self.attention} exists for the built-in model only. For hf: models, "
                "use naive or sdpa"
            )
        preset = PRESETS.get(self.hub_name)
        positions = preset.learned_positions if preset is not None else None
        if positions is not None and self.context_length > positions:
            raise ValueError(
                f"context_length: {self.context_length} is too long, {self.hub_name} has "
                f"{positions} positions"
            )

    @model_validator(mode="after")
    def _require_a_backward_pass(self) -> Self:
        if self.gradient_accumulation > 1 and "backward" not in self.phases:
            raise ValueError(
                f"gradient_accumulation: {self.gradient_accumulation} needs a backward pass. Use it "
                "with pass train_step or forward_backward"
            )
        return self

    @model_validator(mode="after")
    def _require_an_optimizer_that_can(self) -> Self:
        if self.optimizer == "course" and self.optimizer_args:
            raise ValueError(
                "optimizer_args: the course's AdamW has none. Choose another optimizer"
            )
        if self.optimizer_step == "after":
            return self
        if self.gradient_accumulation > 1:
            raise ValueError(
                f"gradient_accumulation: {self.gradient_accumulation} cannot be combined with "
                "optimizer_step: in_backward, which would step in every backward pass. Remove one "
                "of them"
            )
        if self.optimizer in ("course", "muon"):
            raise ValueError(
                f"optimizer: {self.optimizer} cannot be combined with optimizer_step: in_backward. "
                "Choose fused, sgd or adafactor"
            )
        if self.precision == "fp16":
            raise ValueError(
                "precision: fp16 cannot be combined with optimizer_step: in_backward, because its "
                "gradients are unscaled after the backward pass. Use bf16"
            )
        return self

    @property
    def hub_name(self) -> str:
        """The name after hf:; empty for other models."""
        model = self.model or ""
        if model.startswith(HUB):
            return model.removeprefix(HUB)
        return ""

    @property
    def is_preset(self) -> bool:
        """True if the model is a preset of this program, whose config is no file."""
        return self.hub_name in PRESETS

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a step. Forward and backward run once for each micro-batch."""
        phases = PHASES[self.pass_]
        if self.optimizer_step == "after":
            return phases
        return phases[:-1]

    @property
    def tokens(self) -> int:
        """Tokens that a step processes."""
        return self.gradient_accumulation * self.batch_size * self.context_length

    @cached_property
    def dimensions(self) -> Dimensions | None:
        """Dimensions of the course's model; None for your own model."""
        if self.size is not None:
            dims = SIZES[self.year][self.size]
        elif self.d_model and self.d_ff and self.num_layers and self.num_heads:
            dims = Dimensions(self.d_model, self.d_ff, self.num_layers, self.num_heads)
        else:
            return None
        if not self.num_kv_heads and not self.tie_embeddings:
            return dims
        kv_heads = self.num_kv_heads or dims.num_kv_heads
        return replace(dims, num_kv_heads=kv_heads, is_tied=self.tie_embeddings or dims.is_tied)
