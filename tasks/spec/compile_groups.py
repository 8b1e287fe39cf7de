"""Which cells compile the same: what the first of them leaves in a shared cache, the others find.

Seen with torch 2.13 on the CPU, blocks compiled: another seed, other steps, optimizer, vocabulary or number of layers, and the
passes `forward_backward` and `forward_grad`, found all that `train_step` had left; `forward` did not. Inductor's locks are one a
graph, so that cells which compile different ones do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tasks.spec.axes import Affects, axes_without
from tasks.spec.cell import Cell

_NAMES_OF_DIMENSIONS = frozenset({"size", "year", "d_model", "d_ff", "num_layers", "num_heads"})
_AROUND_THE_BLOCKS = frozenset({"num_layers", "vocab_size"})
# The optimizer is not compiled, and a forward pass with gradients is compiled together with its backward pass.
_GRADIENTS = {"train_step": "forward_backward", "forward_grad": "forward_backward"}


@cache
def shared_graph(cell: Cell) -> str | None:
    """What tells a cell's compiled graphs from another's. None where it compiles nothing, or into a cache of its own."""
    values = cell.params.values()
    if not cell.params.compiled or values.get("compile_cache") == "cold":
        return None
    traced = _spelled_out(cell, values)
    if values.get("compile") == "blocks":
        traced = {name: value for name, value in traced.items() if name not in _AROUND_THE_BLOCKS}
    return repr((cell.task, cell.version, sorted(traced.items())))


def _spelled_out(cell: Cell, values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are traced, a size by its dimensions."""
    untraced = axes_without(type(cell.params), Affects.GRAPH)
    traced = {name: value for name, value in values.items() if name not in untraced}
    traced["pass"] = _GRADIENTS.get(values.get("pass", ""), values.get("pass"))
    dimensions = getattr(cell.params, "dimensions", None)
    if dimensions is None:
        return traced
    return {
        **{name: value for name, value in traced.items() if name not in _NAMES_OF_DIMENSIONS},
        **vars(dimensions),
    }
