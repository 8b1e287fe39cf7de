"""Out-of-memory results that need no measurement.

A cell that needs at least as much memory as one that ran out of memory runs out of it as well.
Cells are compared only along the axes that a task declares as never needing less memory when they
grow (`memory_order` of an axis), and only where all other values are equal: the same cell compiled
or with another attention implementation may fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import le

from tasks.spec.axes import memory_orders
from tasks.spec.cell import Cell

Rank = tuple[float, ...]  # position along each growing axis


class OomInference:
    """The cells that ran out of memory, and the search for one that is no larger than a cell."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self._by_other_values: dict[str, list[tuple[Rank, Cell]]] = {}
        for cell in cells:
            self.add(cell)

    def add(self, cell: Cell) -> None:
        """Note that a cell ran out of memory."""
        others, rank = _split(cell)
        self._by_other_values.setdefault(others, []).append((rank, cell))

    def find_smaller(self, cell: Cell) -> Cell | None:
        """Return a cell that ran out of memory and needs at most as much as this one, or None."""
        others, rank = _split(cell)
        for smaller, known in self._by_other_values.get(others, ()):
            if all(map(le, smaller, rank)):
                return known
        return None


def _split(cell: Cell) -> tuple[str, Rank]:
    """Return the values that must be equal in a comparison, and the rank along the growing axes."""
    others, rank = dict(cell.params.values()), []
    for axis, order in memory_orders(type(cell.params)).items():
        # An axis without a value, such as the layers of a named size, cannot be compared.
        if others[axis] is not None:
            value = others.pop(axis)
            rank.append(order.index(value) if order else value)
    return json.dumps([cell.task, cell.version, others], sort_keys=True), tuple(rank)
