"""Finds the sums of gradients that autograd makes in place, unless a mode watches it.

Where several operations use a tensor, autograd adds their gradients. It writes the sum into the
first of them if nothing else refers to it (`can_accumulate_inplace` in torch/csrc/autograd/
input_buffer.cpp). While a dispatch mode is active it makes a new tensor instead. For a weight that
the embedding and the head share, the prediction would have one gradient too many.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.prediction.operations.shapes import Arguments, Keywords, Operation

ADD = torch.ops.aten.add.Tensor
ADD_IN_PLACE = torch.ops.aten.add_.Tensor


def in_backward() -> bool:
    """Return True while autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_made_in_place(args: Arguments) -> bool:
    """Return True if autograd, without a mode, would write this sum into its first term.

    args: of an addition in a backward pass. Where other code adds, the first term has fewer
        references (Python) or more (it is used again).
    """
    if len(args) != 2 or torch.is_grad_enabled():
        return False
    return _references(args[0]) == references_of_gradient()


def _references(tensor: object) -> tuple[int, int]:
    """Return how many references torch has to a tensor and to its storage."""
    if not isinstance(tensor, Tensor):
        return 0, 0
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@cache
def references_of_gradient() -> tuple[int, int]:
    """Return the references to a gradient that only autograd refers to, as a mode sees it.

    Arguments have further references, whose number depends on the version of torch.
    """
    seen = _SeenSum()  # type: ignore[no-untyped-call]
    with torch.enable_grad(), seen:
        weight = torch.ones(2, 2, device="meta", requires_grad=True)
        (weight * 2 + weight * 3).sum().backward()  # type: ignore[no-untyped-call]
    return seen.references


class _SeenSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the references to the first argument of an addition in a backward pass."""

    references = (0, 0)

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if func is ADD and in_backward():
            self.references = _references(args[0])
        return func(*args, **(kwargs or {}))
