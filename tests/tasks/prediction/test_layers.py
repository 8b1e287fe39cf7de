"""Traces that are written out from two small models, against those of the whole model."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.harness.device import Skip
from tasks.prediction import resizing
from tasks.prediction.layers import TraceSection, Unlike, align, write_out
from tasks.prediction.predictor import NoData, track
from tasks.prediction.replay import Label, TensorLifetime, Trace
from tasks.prediction.resizing import trace_by_layers
from tasks.spec.tables import Sample
from tasks.training.model_sources import build_model
from tasks.training.parameters import PHASES, TrainStepParams

WORKSPACE_BYTES = 1 << 25
SHAPE: dict[str, Any] = {
    "device": "cuda", "d_model": 64, "d_ff": 128, "num_heads": 4, "context_length": 32,
    "vocab_size": 500, "batch_size": 2,
}  # fmt: skip
ATTENTION = (
    "naive",
    "torch_softmax",
    "weights_only",
    "recompute",
    "math",
    "efficient",
    "flash",
    "cudnn",
    "sdpa",
)
PRECISION = ("fp32", "bf16", "fp16", "bf16_pure")
OPTIONS: list[dict[str, Any]] = [
    *({"optimizer": name} for name in ("foreach", "fused", "loop", "sgd", "adafactor", "muon")),
    {"optimizer": "torch.optim:RMSprop", "optimizer_args": {"momentum": 0.9}},
    *({"checkpointing": how} for how in ("blocks", "selective", "selective:2")),
    *({"checkpointing": "groups:2", "num_layers": layers} for layers in (18, 19)),
    {"gradient_accumulation": 3, "checkpointing": "selective"},
    *({"optimizer": name, "optimizer_step": "in_backward"} for name in ("fused", "adafactor")),
    {"num_kv_heads": 1, "tie_embeddings": True},
    {"lora": 4, "checkpointing": "blocks", "num_layers": 12},
    {"loss": "chunked", "context_length": 384},
]  # fmt: skip


def params_of(**values: Any) -> TrainStepParams:
    return TrainStepParams.model_validate(SHAPE | values)


def require_equal_traces(**values: Any) -> None:
    """Compare the trace of the whole model with the one that is written out."""
    params = params_of(**values)
    trace_of = partial(track, workspace_bytes=WORKSPACE_BYTES)
    try:
        whole = trace_of(params)
    except Skip:
        pytest.skip("there is no such kernel")
    assert trace_by_layers(params, trace_of) == whole


def test_a_trace_by_layers_equals_the_whole_trace_of_nine_layers() -> None:
    require_equal_traces(num_layers=9, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("pass_", PHASES)
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("attention", ATTENTION)
def test_traces_by_layers_equal_whole_traces_for_every_attention(
    attention: str, precision: str, pass_: str
) -> None:
    for layers in (9, 12):
        kind = {"attention": attention, "precision": precision, "pass": pass_}
        require_equal_traces(num_layers=layers, **kind)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("values", OPTIONS, ids=str)
def test_traces_by_layers_equal_whole_traces_for_training_options(
    values: dict[str, Any], precision: str
) -> None:
    require_equal_traces(**{"num_layers": 9, "precision": precision} | values)


def trace_of_sizes(layers: Sequence[int]) -> Trace:
    """Return a trace whose layers keep one storage each, of these sizes, and use another one."""
    trace = Trace()
    forward, backward = array("q"), array("q")
    for number, size in enumerate(layers):
        trace.sizes_bytes += [size, 8]
        trace.labels += [Label("forward", "residual", "")] * 2
        forward.extend([2 * number, 2 * number + 1, ~(2 * number + 1)])
        backward.insert(0, ~(2 * number))
    trace.spans["steady"] += [
        TensorLifetime("forward", forward),
        TensorLifetime("backward", backward),
    ]
    trace.saved.append(Sample("prediction", "saved_bytes", "bytes", sum(layers), "steady"))
    return trace


def test_layers_are_released_in_reverse() -> None:
    small, large = trace_of_sizes([4] * 3), trace_of_sizes([4] * 4)
    assert write_out(small, large, 7) == trace_of_sizes([4] * 10)


@pytest.mark.parametrize("sizes", [[4, 5, 4, 5], [4, 4, 4, 5], [4, 4, 5, 4]], ids=str)
def test_unlike_layers_are_refused(sizes: list[int]) -> None:
    with pytest.raises(Unlike):
        write_out(trace_of_sizes(sizes[:3]), trace_of_sizes(sizes), 7)


def test_a_law_that_a_layer_breaks_is_refused() -> None:
    small, large = trace_of_sizes([4] * 3), trace_of_sizes([4] * 4)
    released = large.spans["steady"][1].events
    released[1], released[2] = released[2], released[1]
    with pytest.raises(Unlike):
        write_out(small, large, 7)


def test_unlike_models_are_traced_whole() -> None:
    traced = []

    def trace_of(params: TrainStepParams) -> Trace:
        assert params.dimensions is not None
        traced.append(params.dimensions.num_layers)
        return trace_of_sizes([4 + number % 2 for number in range(params.num_layers or 0)])

    for params in (params_of(num_layers=20), TrainStepParams(device="cuda", size="medium")):
        traced.clear()
        assert trace_by_layers(params, trace_of) is None
        assert traced == [3, 4, 5]


def hugging_face_config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model_type": "qwen3", "num_hidden_layers": 30} | values)


@pytest.mark.parametrize(
    ("layers", "values"),
    [
        (30, {"num_layers": 30}),
        (12, {"size": "small"}),
        (0, {"num_layers": 30, "optimizer": "my.package:Optimizer"}),
        (30, {"num_layers": 30, "optimizer": "torch.optim:NAdam"}),
        (0, {"num_layers": 30, "loss": "my.package:loss"}),
        (0, {"model": "my.package:Model"}),
    ],
    ids=str,
)
def test_code_of_the_user_is_traced_whole(layers: int, values: dict[str, Any]) -> None:
    named = {"size", "model"} & values.keys()
    own = {} if named else {"d_model": 64, "d_ff": 128, "num_heads": 4}
    params = TrainStepParams.model_validate({"device": "cuda", **own, **values})
    assert resizing._equal_layers(params) == layers


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        (30, {}),
        (30, {"layer_types": ["full_attention"] * 30}),
        (0, {"layer_types": ["full_attention", "sliding_attention"] * 15}),
        (0, {"model_type": "mixtral"}),
    ],
    ids=["plain", "one kind", "two kinds", "experts"],
)
def test_models_by_name_need_a_config_with_one_kind_of_layer(
    layers: int, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "read_config", lambda params: hugging_face_config(**config))
    params = TrainStepParams.model_validate({"device": "cuda", "model": "hf:qwen3-0.6b"})
    assert resizing._equal_layers(params) == layers
    small = resizing._with_layers(params, 3)
    assert small.model_args["num_hidden_layers"] == 3
    assert len(small.model_args.get("layer_types", "any")) == 3


def test_a_small_model_has_the_options_of_the_large_one() -> None:
    large = TrainStepParams(device="cuda", size="llama-3.2-1b", compile="blocks", lora=4)
    assert large.values()["compile"] == "blocks"  # computed once, and inherited by copies
    small = resizing._with_layers(large.model_copy(update={"compile": "eager"}), 3)
    dims = replace(large.dimensions, num_layers=3) if large.dimensions else None
    assert small.dimensions == dims
    assert (small.compile, small.lora, small.vocab_size) == ("eager", 4, 128_256)


def test_all_layers_of_the_built_in_model_are_alike() -> None:
    model = build_model(params_of(num_layers=4), NoData())
    blocks = [
        [(name, type(module), vars(module).keys()) for name, module in block.named_modules()]
        for block in model.layers  # type: ignore[union-attr]
    ]
    assert blocks == [blocks[0]] * 4


def expanded(sections: Sequence[TraceSection], symbols: Sequence[int], more: int) -> list[int]:
    """Return the sequence of these sections. The symbols are of their items, each once."""
    items, begin = [], 0
    for section in sections:
        block = symbols[begin : begin + section.length]
        items += list(block) * (section.repetitions + section.growth * more)
        begin += section.length
    return items


@pytest.mark.parametrize("seed", range(40))
def test_made_up_sequences_are_aligned(seed: int) -> None:
    chance = random.Random(seed)
    sections: list[TraceSection] = []
    for _ in range(chance.randint(1, 3)):
        sections.append(TraceSection(chance.randint(0, 4), 1, 0))
        sections.append(TraceSection(chance.randint(1, 6), 3, 1))
    sections.append(TraceSection(chance.randint(0, 4), 1, 0))
    # Few symbols, so that the part behind a block often begins like the block.
    symbols = [chance.randrange(6) for _ in range(sum(section.length for section in sections))]
    small, large = expanded(sections, symbols, 0), expanded(sections, symbols, 1)
    found = align(small, large)
    once = []
    position = 0
    for section in found:
        once += small[position : position + section.length]
        position += section.length * section.repetitions
    assert expanded(found, once, 5) == expanded(sections, symbols, 5)
