"""Cells with fewer layers, whose traces together give the trace of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tasks.prediction.layers import Unlike, write_out
from tasks.prediction.replay import Trace
from tasks.training.hugging_face import read_config
from tasks.training.parameters import TrainStepParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Architectures of transformers that build all layers alike, unless `layer_types` names several.
_ALIKE = frozenset({"gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
# Strategies that put parameters of several layers into one tensor, or give whole ones to ranks.
_UNLIKE_STRATEGIES = ("flat", "bucketed", "ddp", "zero1", "zero1_torch")
# Layers, or groups of layers, of the smaller model. Three suffice in most cells. With LoRA the
# first layer differs more, because nothing before it is trained.
_SMALL_MODELS = (3, 4)


def trace_by_layers(
    params: TrainStepParams, trace_of: Callable[[TrainStepParams], Trace]
) -> Trace | None:
    """Return the trace of a cell from those of small models, or None if it must be traced whole.

    trace_of: traces a cell.
    """
    layers = 0 if params.parallel in _UNLIKE_STRATEGIES else _equal_layers(params)
    traces: dict[int, Trace] = {}
    for small, large, more in _sizes(layers, _layers_in_group(params)):
        for size in (small, large):
            if size not in traces:
                traces[size] = trace_of(_with_layers(params, size))
        try:
            return write_out(traces[small], traces[large], more)
        except Unlike:
            continue
    return None


def _sizes(layers: int, group: int) -> Iterator[tuple[int, int, int]]:
    """Yield the layers of two small models, and how many groups the whole one has in addition."""
    incomplete = layers % group  # layers in the last group, if it is shorter
    for groups in _SMALL_MODELS:
        small, large = groups * group + incomplete, (groups + 1) * group + incomplete
        # Otherwise the two take as long as the whole model.
        if small + large + 1 < layers:
            yield small, large, (layers - small) // group


def _layers_in_group(params: TrainStepParams) -> int:
    kind, _, number = params.checkpointing.partition(":")
    return int(number) if kind == "groups" else 1


def _equal_layers(params: TrainStepParams) -> int:
    """Return the number of layers if all are known to be alike, or 0.

    The code of a user may treat each layer differently, so that its cells are traced whole.
    """
    is_torch = params.optimizer.startswith("torch.optim:")
    if ":" in params.loss or (":" in params.optimizer and not is_torch):
        return 0
    if params.hub_name:
        config = read_config(params)
        has_kinds = len(set(_layer_types(config))) > 1
        is_alike = config.model_type in _ALIKE and not has_kinds
        return int(config.num_hidden_layers) if is_alike else 0
    return params.dimensions.num_layers if params.dimensions else 0


def _layer_types(config: PretrainedConfig) -> list[str]:
    return getattr(config, "layer_types", None) or []


def _with_layers(params: TrainStepParams, count: int) -> TrainStepParams:
    """Return the cell with another number of layers."""
    dims = params.dimensions
    if dims is None:
        values: dict[str, Any] = {"num_hidden_layers": count}
        if types := _layer_types(read_config(params)):
            values["layer_types"] = types[:count]
        named: dict[str, Any] = {"model_args": {**params.model_args, **values}}
    else:
        named = {
            "size": None,
            "d_model": dims.d_model,
            "d_ff": dims.d_ff,
            "num_layers": count,
            "num_heads": dims.num_heads,
            "num_kv_heads": dims.num_kv_heads,
            "tie_embeddings": dims.is_tied,
        }
    return params.model_copy(update=named)
