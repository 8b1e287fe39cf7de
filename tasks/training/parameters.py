"""The axes of tasks that train a Transformer language model. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from model.config import SIZES, VOCAB_SIZE, VOCABULARIES, Dimensions
from tasks.spec.axes import MORE_WORK, WORK, Affects, Choice, Values, axis
from tasks.spec.parameters import (
    CUDA_GRAPH_MODES,
    PASS,
    AttentionAxisParams,
    PositiveInt,
    RankedParams,
    check_value,
)
from tasks.spec.source_digest import HUB
from tasks.spec.tables import STEP_PHASES
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
Parallel = Literal[
    "none", "naive", "flat", "overlap", "bucketed", "ddp", "zero1", "zero1_torch", "fsdp2"
]
Batch = Literal["global", "per_gpu"]
Wire = Literal["fp32", "bf16"]
NcclAlgo = Literal["auto", "ring", "tree", "no_nvls"]

PHASES: dict[Pass, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward_grad": ("forward",),
    "forward_backward": ("forward", "backward"),
    "train_step": STEP_PHASES,
}

# Axes that mean nothing in inference, with the types of their values: others are refused later.
_OF_BACKWARD = {"checkpointing": str, "gradient_accumulation": int, "loss": str}
# Axes that mean nothing with one rank.
_OF_RANKS = ("parallel", "batch", "wire", "nccl_algo")
# Axes of some strategies, with those.
_OF_STRATEGIES = {
    "bucket_mb": ("bucketed", "ddp", "zero1_torch"),
    "bucket_view": ("ddp",),
    "reshard": ("fsdp2",),
}
# Our own strategies communicate between torch's calls, and so have phases of it.
_AVERAGING = ("naive", "flat", "overlap", "bucketed")
# Optimizers that treat each element by itself, so that a part of a parameter is enough for them.
_ELEMENTWISE = ("course", "foreach", "fused", "loop", "sgd")


class TrainStepParams(AttentionAxisParams, RankedParams):
    """Parameters of a training step.

    The model is named by `size` and `year`, described by its dimensions, or made by your own
    factory.
    """

    parallel: Parallel = axis(
        "none",
        "strategy of a cell with several ranks: naive, flat, overlap, bucketed and zero1 are the "
        "course's; ddp, zero1_torch and fsdp2 are torch's DistributedDataParallel, "
        "ZeroRedundancyOptimizer and fully_shard; none: one rank",
        choice=Choice.SAME,
    )
    batch: Batch = axis(
        "global",
        "global: batch_size counts the sequences of all ranks together; per_gpu: of each",
        affects=WORK,
        choice=Choice.OTHER_NUMBERS,
    )
    bucket_mb: Annotated[float, Field(gt=0)] = axis(
        25.0,
        "size of a bucket of gradients; with 25, torch's default, the first one of ddp has 1 MiB",
        unit="MiB",
        choice=Choice.SAME,
    )
    bucket_view: bool = axis(
        False, "true: gradients are views of ddp's buckets", choice=Choice.SAME
    )
    reshard: bool = axis(
        True,
        "true: fsdp2 frees a block's parameters after its forward pass, and gathers them again",
        choice=Choice.SAME,
    )
    wire: Wire = axis(
        "fp32",
        "dtype in which gradients are sent: fp32, or theirs if it is narrower; bf16",
        choice=Choice.OTHER_NUMBERS,
    )
    nccl_algo: NcclAlgo = axis(
        "auto",
        "algorithm of NCCL: auto, its own choice; ring; tree; no_nvls: without NVLink SHARP",
        affects=Affects.SPEED,
        choice=Choice.SAME,
    )

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
    num_layers: PositiveInt | None = axis(None, "number of blocks", **MORE_WORK)
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
    context_length: PositiveInt = axis(512, "length of each sequence", unit="tokens", **MORE_WORK)
    batch_size: PositiveInt = axis(
        4, "sequences in a step", unit="sequences", **MORE_WORK, choice=Choice.OTHER_NUMBERS
    )
    vocab_size: PositiveInt = axis(VOCAB_SIZE, "size of the vocabulary", unit="tokens", **MORE_WORK)
    compile: Compile = "eager"
    pass_: Pass = axis(
        "train_step",
        PASS.format(", ".join(get_args(Pass))),
        alias="pass",
        affects=WORK,
        memory_order=get_args(Pass),
    )
    optimizer: OptimizerName = axis(
        "course",
        "course: the plain loop of AdamW; foreach, fused and loop: torch's AdamW with or without "
        "these options; sgd (fused), adafactor (a loop), muon (fused AdamW for all but the "
        "matrices of the blocks), or any class: package.module:Class",
        affects=_NO_GRAPH,
        choice=Choice.OTHER_NUMBERS,
        alike=("course", "foreach", "fused", "loop"),
    )
    lora: PositiveInt | None = axis(
        None,
        "rank of low-rank adapters of all linear layers in the blocks, with alpha of twice the "
        "rank; all other weights are frozen; null: none",
        choice=Choice.OTHER_NUMBERS,
    )
    optimizer_args: Values = axis(
        {},
        "keyword arguments of the optimizer, such as momentum",
        affects=WORK & ~Affects.GRAPH,
        choice=Choice.OTHER_NUMBERS,
    )
    optimizer_step: Literal["after", "in_backward"] = axis(
        "after",
        "after: one step after the backward pass; in_backward: each parameter is updated when its "
        "gradient is complete, and the gradient is freed",
        affects=_NO_GRAPH,
        choice=Choice.SAME,
    )
    loss: Loss = axis(
        "cross_entropy",
        "cross_entropy: of all logits together; chunked: of 512 tokens at a time, whose logits the "
        "backward pass computes again; model: what your model returns for labels=…; or "
        "package.module:function of (model, tokens, targets)",
        choice=Choice.OTHER_NUMBERS,
        alike=("cross_entropy", "chunked"),
    )
    checkpointing: Checkpointing = axis(
        "none",
        "activations that the backward pass computes again: none; blocks: all of each block; "
        "groups:K, such as groups:2: all of K neighbouring blocks together; selective: all but "
        "matrix products and attention; selective:2: also every second product with a weight",
        choice=Choice.SAME,
    )
    gradient_accumulation: PositiveInt = axis(
        1,
        "micro-batches of a step, of batch_size sequences each",
        unit="micro-batches",
        affects=WORK & ~Affects.GRAPH,
        choice=Choice.OTHER_NUMBERS,
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
        _drop_unused_axes_of_ranks(own)
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
        if self.model is not None:
            self._require_of_own_model(self.model)
        elif self.model_args:
            raise ValueError("model_args are of a model of your own: name it with model")
        self.dimensions  # noqa: B018  raises ValueError if the dimensions do not fit together
        return self

    def _require_of_own_model(self, model: str) -> None:
        if not all(model.partition(":")):
            raise ValueError(f"model {model!r} is not of the form package.module:Factory")
        if self.num_kv_heads or self.tie_embeddings:
            raise ValueError("num_kv_heads and tie_embeddings are of the built-in model")
        if not self.hub_name:
            if self.attention != "naive":
                raise ValueError("attention is of the course's model: yours computes its own")
            return
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

    @model_validator(mode="after")
    def _require_a_step_that_ranks_can_share(self) -> Self:
        if self.ranks == 1:
            return self
        axis_name, unit, units = ("processes", "process", "processes")
        if self.device == "cuda":
            axis_name, unit, units = ("gpus", "GPU", "GPUs")
        count = f"{axis_name}: {self.ranks}"
        if self.parallel == "none":
            advice = "Choose a strategy, such as parallel: ddp"
            if "parallel" in self.model_fields_set:
                advice = (
                    f"Remove none from the axis; the cell with {axis_name}: 1 already covers it"
                )
            raise ValueError(
                f"parallel: none requires one {unit}, but {axis_name} is {self.ranks}. {advice}"
            )
        if self.pass_ != "train_step":
            raise ValueError(
                f"pass: {self.pass_} does not communicate, so it cannot use several {units}. Set "
                f"{axis_name}: 1"
            )
        if self.batch == "global" and self.batch_size % self.ranks:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by {self.ranks} {units}. Use a "
                f"multiple of {self.ranks}, or set batch: per_gpu"
            )
        if self.compile == "model":
            raise ValueError(
                f"compile: model with {count} is not supported yet. Use compile: blocks"
            )
        if self.device == "cuda" and self.compile_mode in CUDA_GRAPH_MODES:
            raise ValueError(
                f"compile_mode: {self.compile_mode} with {count} is not supported yet, because it "
                "records CUDA graphs. Use compile_mode: default"
            )
        if reason := self._why_strategy_cannot():
            raise ValueError(reason)
        return self

    def _why_strategy_cannot(self) -> str:
        """Return why the strategy cannot be combined with another axis; empty if it can."""
        parallel = self.parallel
        if self.precision == "fp16" and parallel in ("zero1", "zero1_torch", "fsdp2"):
            return (
                f"precision: fp16 scales gradients, which {parallel} does not support because each "
                "rank has only a part of them. Use bf16"
            )
        if self.wire == "bf16" and parallel == "zero1_torch":
            return (
                "wire: bf16 is not available with zero1_torch, which sends the same data as DDP. Use "
                "parallel: ddp"
            )
        if self.optimizer_step == "in_backward" and parallel != "fsdp2":
            return (
                f"optimizer_step: in_backward cannot be combined with parallel: {parallel}, which "
                "averages gradients after the hook that would use them. Use parallel: fsdp2"
            )
        if parallel == "zero1" and self.optimizer not in _ELEMENTWISE:
            return (
                f"optimizer: {self.optimizer} cannot be combined with parallel: zero1, which cuts "
                f"parameters into parts. Use {', '.join(_ELEMENTWISE)}, or parallel: ddp"
            )
        if parallel == "zero1_torch" and self.optimizer == "muon":
            return (
                "optimizer: muon cannot be combined with parallel: zero1_torch, which distributes "
                "one optimizer, not two. Use parallel: ddp or fsdp2"
            )
        if parallel == "fsdp2" and self.optimizer == "adafactor":
            return (
                "optimizer: adafactor cannot be combined with parallel: fsdp2, because torch has no "
                "Adafactor of sharded parameters. Use fused, or parallel: ddp"
            )
        if parallel == "fsdp2" and self.optimizer == "sgd" and self.optimizer_args.get("fused", 1):
            return (
                "optimizer: sgd cannot be combined with parallel: fsdp2, because torch has no fused "
                "SGD of sharded parameters. Add optimizer_args: {fused: false}"
            )
        if parallel == "fsdp2" and self.checkpointing.startswith("groups"):
            return (
                f"checkpointing: {self.checkpointing} cannot be combined with parallel: fsdp2, which "
                "gathers one block at a time. Use checkpointing: blocks"
            )
        return ""

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
        if self.optimizer_step == "in_backward":
            return phases[:-1]
        if self.parallel in _AVERAGING:
            return *phases[:-1], "communication", phases[-1]
        if self.parallel == "zero1":
            return *phases[:-1], "communication", phases[-1], "gather"
        return phases

    @property
    def global_batch_size(self) -> int:
        """Sequences of a micro-batch, of all ranks together."""
        return self.batch_size * self.ranks if self.batch == "per_gpu" else self.batch_size

    @property
    def rank_batch_size(self) -> int:
        """Sequences of a micro-batch on each rank."""
        return self.global_batch_size // self.ranks

    @property
    def tokens(self) -> int:
        """Tokens that a step processes, on all ranks together."""
        return self.gradient_accumulation * self.global_batch_size * self.context_length

    @property
    def autocasts(self) -> bool:
        return self.parallel != "fsdp2"

    @cached_property
    def dimensions(self) -> Dimensions | None:
        """Dimensions of the course's model; None for your own model."""
        if self.size is not None:
            dims = SIZES[self.year][self.size]
        elif self.d_model and self.d_ff and self.num_layers and self.num_heads:
            dims = Dimensions(self.d_model, self.d_ff, self.num_layers, self.num_heads)
        else:
            return None
        if self.num_kv_heads or self.tie_embeddings:
            kv_heads = self.num_kv_heads or dims.num_kv_heads
            is_tied = self.tie_embeddings or dims.is_tied
            dims = replace(dims, num_kv_heads=kv_heads, is_tied=is_tied)
        if self.size is None or self.num_kv_heads:
            dims.require_whole_heads()
        return dims


def _drop_unused_axes_of_ranks(values: Values) -> None:
    """Remove axes that mean nothing for a cell, so that it is one cell whatever they are.

    A value that the axis cannot have remains and is refused later.
    """
    device, ranks = values.get("device", "cuda"), 1
    if device in ("cuda", "cpu"):
        ranks = values.get("gpus" if device == "cuda" else "processes", 1)
    unused = [*_OF_RANKS] if ranks == 1 else []
    if device != "cuda":
        unused.append("nccl_algo")
    if values.get("precision") == "bf16_pure":
        unused.append("wire")  # gradients have two bytes already
    strategy = "none" if ranks == 1 else values.get("parallel")
    unused += [name for name, users in _OF_STRATEGIES.items() if strategy not in users]
    for name in set(unused) & values.keys():
        with suppress(ValidationError):
            check_value(TrainStepParams, name, values[name])
            del values[name]
