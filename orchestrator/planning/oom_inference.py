"""An out-of-memory that need not be measured: what asks for no less than a cell that ran out, runs out as well.

Only along the axes that a task declares as never taking less memory when they grow (`memory_order`), and only
where all else is equal: the same cell compiled, or with another attention, may fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tasks.spec.axes import memory_orders
from tasks.spec.cell import Cell

Rank = tuple[float, ...]


class OomInference:
    """The cells that ran out of memory."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self._by_rest: dict[str, list[tuple[Rank, Cell]]] = {}
        for cell in cells:
            self.add(cell)

    def add(self, cell: Cell) -> None:
        rest, rank = _place(cell)
        self._by_rest.setdefault(rest, []).append((rank, cell))

    def of(self, cell: Cell) -> Cell | None:
        """A cell that ran out of memory with no more of anything than this one has, or None."""
        rest, rank = _place(cell)
        for lower, witness in self._by_rest.get(rest, ()):
            if all(theirs <= own for theirs, own in zip(lower, rank, strict=True)):
                return witness
        return None


def _place(cell: Cell) -> tuple[str, Rank]:
    """What must be equal to compare two cells, and how far along each growing axis this one is."""
    values, grows = cell.params.values(), memory_orders(type(cell.params))
    ranked = {axis: order for axis, order in grows.items() if values[axis] is not None}
    rest = {name: value for name, value in values.items() if name not in ranked}
    rank = tuple(
        order.index(values[axis]) if order else values[axis] for axis, order in ranked.items()
    )
    return json.dumps([cell.task, cell.version, rest], sort_keys=True), rank
