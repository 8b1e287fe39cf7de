"""Groups of cells that compile the same graphs: the first one fills the cache for the others."""

from __future__ import annotations

from functools import cache

from tasks.spec.axes import Affects, FrozenValues, Values, axes_without, leave_out
from tasks.spec.cell import Cell

# Seen with torch 2.13 on the CPU with compiled blocks: a cell with another seed, number of steps,
# optimizer, vocabulary or number of layers, or with the pass `forward_backward` or `forward_grad`,
# found everything that `train_step` had compiled. `forward` did not. Inductor locks one graph at a
# time, so cells that compile different graphs do not wait for each other.
_NAMES_OF_DIMENSIONS = frozenset({"size", "year", "d_model", "d_ff", "num_layers", "num_heads"})
# Not part of a block's graph: all blocks share one, and embedding and head are outside.
_AROUND_THE_BLOCKS = frozenset({"num_layers", "vocab_size"})
# The optimizer is not compiled, and a forward pass with gradients is compiled together with its
# backward pass.
_GRADIENTS = {"train_step": "forward_backward", "forward_grad": "forward_backward"}


@cache
def shared_graph(cell: Cell) -> str | None:
    """Return an identity of the graphs that a cell compiles: equal for cells that share them.

    None if the cell compiles nothing, or into a separate cache.
    """
    values = cell.params.values()
    if not cell.params.compiled or values.get("compile_cache") == "cold":
        return None
    traced = _traced_values(cell, values)
    if values.get("compile") == "blocks":
        traced = leave_out(traced, _AROUND_THE_BLOCKS)
    return repr((cell.task, cell.version, sorted(traced.items())))


def _traced_values(cell: Cell, values: FrozenValues) -> Values:
    """Return the parameters that enter the graphs, with a size replaced by its dimensions."""
    traced = leave_out(values, axes_without(type(cell.params), Affects.GRAPH))
    traced["pass"] = _GRADIENTS.get(values.get("pass", ""), values.get("pass"))
    dimensions = getattr(cell.params, "dimensions", None)
    if dimensions is None:
        return traced
    return {**leave_out(traced, _NAMES_OF_DIMENSIONS), **vars(dimensions)}
