"""torch.compile as the axes of a cell ask for it, and what it did as torch counted it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

from tasks.spec.parameters import CUDA_GRAPH_MODES, CompiledParams, Params

_BASIC_PROVENANCE = 2  # of the three levels the one that adds least to compiling
_KEEP_EAGER = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def load_compiler() -> None:
    """So that the time of the first step is of compiling, in a fresh process as in a forked one. It then counts all it does.

    What it has compiled again and again, up to its limit, is an error in whichever step: it would run that as eager from then on.
    """
    importlib.import_module("torch._inductor.compile_fx")
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.fail_on_recompile_limit_hit = True
    dynamo.utils.set_compilation_metrics_limit(sys.maxsize)  # of itself it keeps the last 64


def compile_options(params: CompiledParams, ours: bool) -> dict[str, Any]:
    """For torch.compile. What is ours must compile whole: a graph break is an error there, not a slower number."""
    load_compiler()
    return {"fullgraph": ours, "dynamic": False, "mode": params.compile_mode}


def uses_cuda_graphs(params: Params) -> bool:
    if not isinstance(params, CompiledParams) or params.compile == "eager":
        return False
    return params.compile_mode in CUDA_GRAPH_MODES and params.device == "cuda"


def begin_step(params: Params) -> None:
    """Tells CUDA graphs that the results of the last step are no longer needed."""
    if uses_cuda_graphs(params):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def compile_facts() -> dict[str, Any]:
    """Graphs, breaks, recompilations with their reasons; cold or warm is read from the counters, not from the intention."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    frames = get_compilation_metrics()
    reasons = [frame.recompile_reason for frame in frames if frame.recompile_reason]
    hits, misses = (
        counters["inductor"]["fxgraph_cache_hit"],
        counters["inductor"]["fxgraph_cache_miss"],
    )
    return {
        "compile_graphs": counters["stats"]["unique_graphs"],
        "compile_graph_breaks": sum(counters["graph_break"].values()),
        "compile_break_reasons": "; ".join(counters["graph_break"]) or None,
        "compile_recompiles": len(reasons),
        "compile_recompile_reasons": "; ".join(map(str, reasons)) or None,
        "compile_cache_hits": hits,
        "compile_cache_misses": misses,
        "compile_cache_seen": _warmth(hits, misses),
        "compile_skipped_cuda_graphs": counters["inductor"]["cudagraph_skips"],
        "compile_threads": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
        or torch._inductor.config.compile_threads,
    }


def require_compiled() -> None:
    """Raises RuntimeError where torch, told to by its environment, ran as eager what it was to compile, without a word."""
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        told = ", ".join(f"{name}={os.environ[name]}" for name in _KEEP_EAGER if name in os.environ)
        raise RuntimeError(f"torch.compile has compiled nothing{f': unset {told}' if told else ''}")


def _warmth(hits: int, misses: int) -> str | None:
    """Of the cache that the compiled code came from, if it keeps count at all."""
    if not hits and not misses:
        return None
    return "cold" if not hits else "warm" if not misses else "mixed"


def keep_provenance() -> None:
    """Has the compiler keep, of what it compiles from now on, the Python stacks that each kernel comes from.

    Torch calls it internal: a version without it keeps nothing.
    """
    trace = importlib.import_module("torch._inductor.config").trace
    if hasattr(trace, "provenance_tracking_level"):
        trace.provenance_tracking_level = _BASIC_PROVENANCE


def kept_provenance() -> list[str]:
    """What was kept: of each compiled graph, the stacks by kernel, as JSON."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        text
        for frame in get_compilation_metrics()
        for text in getattr(frame, "inductor_provenance", None) or ()
    ]
