"""Names the parts of the backward pass, on whichever thread it runs: each node by the part whose forward pass made it.

Ranges and module hooks are of the forward pass's thread; autograd has one of its own for each device. Every node of its
graph carries the number that it got when it was made, and parts that are entered and left in between two numbers own those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Say = Callable[[str], None]


@dataclass
class _Range:
    """The numbers from `start` up to before `until` were given out within a part, which is not left where that is None."""

    part: str
    start: int
    until: int | None = None


class PartTracker:
    """Says on entering and leaving which part it is in, and remembers which numbers each part gave out."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._part = ""
        self._ranges: list[_Range] = []  # in the order of entering

    @contextmanager
    def name(self, part: str) -> Iterator[None]:
        """For `parts_named`."""
        before, numbers = self._part, _Range(part, _next_number())
        self._ranges.append(numbers)
        self._enter(part)
        try:
            yield
        finally:
            numbers.until = _next_number()
            self._enter(before)

    def owners(self) -> dict[int, str]:
        """The part of each number, the innermost: it was entered last."""
        now = _next_number()
        return {
            number: numbers.part
            for numbers in self._ranges
            for number in range(numbers.start, now if numbers.until is None else numbers.until)
        }

    @contextmanager
    def backward_named(self) -> Iterator[None]:
        """While it lasts, backward passes say the part of each node before it runs; nothing where a node is of none."""
        run_backward = torch.autograd.backward

        def named(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            before, roots = self._part, [tensors] if isinstance(tensors, Tensor) else tensors
            self._hook([root.grad_fn for root in roots])
            run_backward(tensors, *args, **kwargs)
            self._enter(before)

        # It is what `loss.backward()` calls, and alone in knowing where the graph begins.
        torch.autograd.backward = named  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = run_backward

    def _enter(self, part: str) -> None:
        self._part = part
        self._say(part)

    def _hook(self, roots: Iterable[Any]) -> None:
        owners = self.owners()
        for node in _nodes(roots):
            if not hasattr(
                node, "variable"
            ):  # what keeps a gradient is left alone, and goes with what made it
                node.register_prehook(self._entering(owners.get(node._sequence_nr(), "")))

    def _entering(self, part: str) -> Callable[[Any], None]:
        return lambda gradients: self._enter(part)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graphs behind some roots, once."""
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
