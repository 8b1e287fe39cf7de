"""Options of torch.compile for a cell, and the counts that torch keeps of its compilations."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import nn

from tasks.spec.axes import select
from tasks.spec.messages import assignments
from tasks.spec.parameters import CUDA_GRAPH_MODES, CompiledParams, Params

_BASIC_PROVENANCE = 2  # of torch's three levels the one that adds least to the compile time
_KEEP_EAGER = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


class CompileOptions(TypedDict):
    """Options of torch.compile."""

    fullgraph: bool
    dynamic: bool
    mode: str | None


def load_compiler() -> None:
    """Import the compiler, so that the first step's time does not include the import."""
    importlib.import_module("torch._inductor.compile_fx")
    dynamo = importlib.import_module("torch._dynamo")
    # By default, torch silently runs the code as eager once it has recompiled too often.
    dynamo.config.fail_on_recompile_limit_hit = True
    # By default, torch remembers its last 64 compilations: a model of many blocks lost its first.
    dynamo.utils.set_compilation_metrics_limit(sys.maxsize)


def compile_options(params: CompiledParams, ours: bool) -> CompileOptions:
    """Return options of torch.compile. ours: the course's model, which must be one graph."""
    load_compiler()
    # fullgraph: a graph break is an error, instead of a slower measurement.
    # dynamic: with None, a second shape would be compiled as a dynamic one, into other kernels.
    return {"fullgraph": ours, "dynamic": False, "mode": params.compile_mode}


def compile_module(module: nn.Module, options: CompileOptions) -> None:
    """Compile a module in place, which leaves the names of its parameters unchanged."""
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**options)
        return
    # torch does not trace the frames of torch's layers: `module.compile` would capture nothing. It
    # does trace them within a function of another package.
    call: Callable[..., object] = module._call_impl

    def call_layer(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call_layer, **options)


def uses_cuda_graphs(params: Params) -> bool:
    """Return True if torch.compile replays the cell's steps as CUDA graphs."""
    if not isinstance(params, CompiledParams) or params.compile == "eager":
        return False
    return params.compile_mode in CUDA_GRAPH_MODES and params.device == "cuda"


def begin_step(params: Params) -> None:
    """Mark the start of a step for CUDA graphs: a replay overwrites the last step's results."""
    if uses_cuda_graphs(params):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def compile_facts() -> dict[str, object]:
    """Return facts about the compilations of this process, from torch's counters."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    frames = get_compilation_metrics()
    reasons = [str(frame.recompile_reason) for frame in frames if frame.recompile_reason]
    inductor = counters["inductor"]
    hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
    # Whether the cache was cold is read from the counters: the cell's axis states the intention.
    warmth = {(True, False): "warm", (False, True): "cold", (True, True): "mixed"}
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    return {
        "compile_graphs": counters["stats"]["unique_graphs"],
        "compile_graph_breaks": sum(counters["graph_break"].values()),
        "compile_break_reasons": "; ".join(counters["graph_break"]) or None,
        "compile_recompiles": len(reasons),
        "compile_recompile_reasons": "; ".join(reasons) or None,
        "compile_cache_hits": hits,
        "compile_cache_misses": misses,
        "compile_cache_seen": warmth.get((hits > 0, misses > 0)),
        "compile_skipped_cuda_graphs": inductor["cudagraph_skips"],
        "compile_threads": threads or torch._inductor.config.compile_threads,
    }


def require_compiled() -> None:
    """Raise RuntimeError if torch compiled nothing and ran everything as eager."""
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        # An environment variable that disables the compiler does so without a warning.
        found = assignments(select(os.environ, _KEEP_EAGER))
        remedy = f": unset {', '.join(found)}" if found else ""
        raise RuntimeError(f"torch.compile has compiled nothing{remedy}")


def enable_provenance() -> None:
    """Make the compiler record, from now on, the Python stacks that each kernel comes from."""
    # The option is internal to torch; a version without it records nothing.
    trace = importlib.import_module("torch._inductor.config").trace
    if hasattr(trace, "provenance_tracking_level"):
        trace.provenance_tracking_level = _BASIC_PROVENANCE


def recorded_provenance() -> list[str]:
    """Return the recorded stacks by kernel of each compiled graph, as JSON."""
    from torch._dynamo.utils import get_compilation_metrics

    # Inductor's own globals are reset by each compilation: that of the backward graph, in the first
    # backward pass, erases the records of the forward graph.
    texts: list[str] = []
    for frame in get_compilation_metrics():
        texts += getattr(frame, "inductor_provenance", None) or ()
    return texts
