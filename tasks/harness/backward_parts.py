"""Names the parts of the backward pass: each node by the part whose forward pass made it.

Profiler ranges and module hooks belong to the thread of the forward pass, but autograd runs the backward
pass on a separate thread for each device. Every node of its graph carries a sequence number from when it
was made, so the numbers between entering and leaving a part belong to that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Notify = Callable[[str], None]


@dataclass
class _Range:
    """The sequence numbers of a part: from `start` to before `until`; None while the part runs."""

    part: str
    start: int
    until: int | None = None


class PartTracker:
    """Reports each change of the current part, and records the sequence numbers of each part."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._part = ""
        self._ranges: list[_Range] = []  # in the order of entering

    @contextmanager
    def name(self, part: str) -> Iterator[None]:
        """Enter a part; pass this method to `parts_named`."""
        before, numbers = self._part, _Range(part, _next_number())
        self._ranges.append(numbers)
        self._enter(part)
        try:
            yield
        finally:
            numbers.until = _next_number()
            self._enter(before)

    def owners(self) -> dict[int, str]:
        """Return the innermost part of each sequence number: the one that was entered last."""
        now = _next_number()
        return {
            number: numbers.part
            for numbers in self._ranges
            for number in range(numbers.start, now if numbers.until is None else numbers.until)
        }

    @contextmanager
    def backward_named(self) -> Iterator[None]:
        """Report the part of each node before the backward pass runs it; empty if it has none."""
        run_backward = torch.autograd.backward

        def named(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            before, roots = self._part, [tensors] if isinstance(tensors, Tensor) else tensors
            self._hook([root.grad_fn for root in roots])
            run_backward(tensors, *args, **kwargs)
            self._enter(before)

        # `Tensor.backward` calls this function, and only there the roots of the graph are known.
        torch.autograd.backward = named  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = run_backward

    def _enter(self, part: str) -> None:
        self._part = part
        self._notify(part)

    def _hook(self, roots: Iterable[Any]) -> None:
        owners = self.owners()
        for node in _nodes(roots):
            # A node that accumulates a gradient belongs to the part that computed the gradient.
            if not hasattr(node, "variable"):
                node.register_prehook(self._entering(owners.get(node._sequence_nr(), "")))

    def _entering(self, part: str) -> Callable[[Any], None]:
        return lambda gradients: self._enter(part)


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of the graphs behind these roots once."""
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
