"""Options of torch.compile for a cell, and what torch counted while it compiled."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

from tasks.spec.parameters import CUDA_GRAPH_MODES, CompiledParams, Params

_BASIC_PROVENANCE = 2  # of torch's three levels the one that adds least to the compile time
_KEEP_EAGER = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def load_compiler() -> None:
    """Import the compiler, so that the first step's time does not include the import.

    Reaching the limit of recompilations becomes an error: torch would otherwise run the code as eager
    from then on, without a word.
    """
    importlib.import_module("torch._inductor.compile_fx")
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.config.fail_on_recompile_limit_hit = True
    dynamo.utils.set_compilation_metrics_limit(sys.maxsize)  # default: the last 64


def compile_options(params: CompiledParams, ours: bool) -> dict[str, Any]:
    """Return options for torch.compile.

    ours: the course's model, which must compile as one graph: a graph break is an error, not a slower
        measurement.
    """
    load_compiler()
    return {"fullgraph": ours, "dynamic": False, "mode": params.compile_mode}


def uses_cuda_graphs(params: Params) -> bool:
    if not isinstance(params, CompiledParams) or params.compile == "eager":
        return False
    return params.compile_mode in CUDA_GRAPH_MODES and params.device == "cuda"


def begin_step(params: Params) -> None:
    """Tell CUDA graphs that the results of the last step are no longer needed."""
    if uses_cuda_graphs(params):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def compile_facts() -> dict[str, Any]:
    """Return what torch compiled as facts. Cold or warm is read from its counters."""
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
    """Raise RuntimeError if torch ran everything as eager.

    It does so silently if an environment variable disables the compiler.
    """
    from torch._dynamo.utils import counters

    if not counters["stats"]["unique_graphs"]:
        found = [f"{name}={os.environ[name]}" for name in _KEEP_EAGER if name in os.environ]
        remedy = f": unset {', '.join(found)}" if found else ""
        raise RuntimeError(f"torch.compile has compiled nothing{remedy}")


def _warmth(hits: int, misses: int) -> str | None:
    """Return `cold`, `warm` or `mixed`; None if the compiler did not use its cache."""
    if hits and misses:
        return "mixed"
    if hits:
        return "warm"
    return "cold" if misses else None


def keep_provenance() -> None:
    """Make the compiler record the Python stacks that each kernel comes from, from now on.

    The option is internal to torch; a version without it records nothing.
    """
    trace = importlib.import_module("torch._inductor.config").trace
    if hasattr(trace, "provenance_tracking_level"):
        trace.provenance_tracking_level = _BASIC_PROVENANCE


def kept_provenance() -> list[str]:
    """Return the recorded stacks by kernel of each compiled graph, as JSON."""
    from torch._dynamo.utils import get_compilation_metrics

    return [
        text
        for frame in get_compilation_metrics()
        for text in getattr(frame, "inductor_provenance", None) or ()
    ]
