"""Name the parts of the backward pass: each node by the part whose forward pass made it.

Profiler ranges and module hooks belong to the thread of the forward pass, but autograd runs the
backward pass on a separate thread for each device. Every node of its graph carries a sequence
number from when it was made, so the numbers between entering and leaving a part belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node


@dataclass
class _Range:
    """The sequence numbers of a part: from `start` to before `until`; None while the part runs."""

    part: str
    start: int
    until: int | None = None


class PartTracker:
    """Tracker that reports each change of the part, and records the sequence numbers of each."""

    def __init__(self, notify: Callable[[str], None]) -> None:
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
        owners: dict[int, str] = {}
        for numbers in self._ranges:
            until = _next_number() if numbers.until is None else numbers.until
            owners.update(dict.fromkeys(range(numbers.start, until), numbers.part))
        return owners

    @contextmanager
    def backward_named(self) -> Iterator[None]:
        """Report the part of each node before the backward pass runs it; empty if it has none."""
        run_backward: Callable[..., None] = torch.autograd.backward

        def named(tensors: Tensor | Sequence[Tensor], *args: object, **kwargs: object) -> None:
            before = self._part
            self._hook([tensors] if isinstance(tensors, Tensor) else tensors)
            run_backward(tensors, *args, **kwargs)
            self._enter(before)

        # `Tensor.backward` calls this function, the only place where the graph's roots are known.
        torch.autograd.backward = named  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = run_backward

    def _enter(self, part: str) -> None:
        self._part = part
        self._notify(part)

    def _hook(self, roots: Iterable[Tensor]) -> None:
        owners = self.owners()
        for node in _nodes(root.grad_fn for root in roots):
            # A node that accumulates a gradient belongs to the part that computed the gradient, so
            # it gets no hook. It is the only kind of node with a `variable`.
            if not hasattr(node, "variable"):
                # The hook runs on the thread that runs the node, so that thread reports the part.
                node.register_prehook(self._entering(owners.get(node._sequence_nr(), "")))

    def _entering(self, part: str) -> Callable[[object], None]:
        return lambda gradients: self._enter(part)


def _nodes(roots: Iterable[Node | None]) -> Iterator[Node]:
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
