"""Names the parts of the backward pass, on whichever thread it runs: each node by the part whose forward pass made it.

Ranges and module hooks are of the forward pass's thread; autograd has one of its own for each device. Every node of its
graph carries the number that it got when it was made, and parts that are entered and left in between two numbers own those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Say = Callable[[str], None]


class PartTracker:
    """Says on entering and leaving which part it is in, and remembers which numbers each part gave out."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._inside: list[str] = [""]
        self._entered: list[tuple[str, int, list[int]]] = []  # in the order of entering: the part, from, up to before

    @contextmanager
    def name(self, part: str) -> Iterator[None]:
        """For `parts_named`."""
        until: list[int] = []
        self._entered.append((part, _next_number(), until))
        self._inside.append(part)
        self._say(part)
        try:
            yield
        finally:
            until.append(_next_number())
            self._inside.pop()
            self._say(self._inside[-1])

    def owners(self) -> dict[int, str]:
        """The part of each number, the innermost: it was entered last."""
        return {number: part for part, start, (until,) in self._entered for number in range(start, until)}

    @contextmanager
    def backward_named(self) -> Iterator[None]:
        """While it lasts, backward passes say the part of each node before it runs; nothing where a node is of none."""
        run_backward = torch.autograd.backward

        def named(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else tensors
            self._hook([root.grad_fn for root in roots])
            run_backward(tensors, *args, **kwargs)
            self._inside = [""]

        # It is what `loss.backward()` calls, and alone in knowing where the graph begins.
        torch.autograd.backward = named  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = run_backward

    def _hook(self, roots: Iterable[Any]) -> None:
        owners = self.owners()
        for node in _nodes(roots):
            if not hasattr(node, "variable"):  # what keeps a gradient is left alone, and goes with what made it
                node.register_prehook(self._saying(owners.get(node._sequence_nr(), "")))

    def _saying(self, part: str) -> Callable[[Any], None]:
        def enter(gradients: Any) -> None:
            self._inside = [part]  # what a node computes anew may be in parts of its own, and comes back to this
            self._say(part)

        return enter


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
