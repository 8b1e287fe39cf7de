"""Values of tensors on the `meta` device that follow from no data of the model.

Positions, masks and token ids are integers that a model may examine: `if mask.all():` decides which
kernel runs. Each operation that makes such a tensor from others like it is repeated on the CPU.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from tasks.prediction.operations.shapes import Arguments, Keywords, Operation, tensors_of

_MOST_ELEMENTS = 1 << 22  # masks of 2,048 positions; larger ones would take time and memory


class KnownValues:
    """The tensors on the CPU that hold the values of tensors on the `meta` device."""

    def __init__(self) -> None:
        self._twins: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number in a tensor of one element, or None if it is not known."""
        twin = self._twins.get(tensor)
        return None if twin is None else twin.item()

    def follow(self, func: Operation, args: Arguments, kwargs: Keywords, result: object) -> None:
        """Store the values of an operation's results if those of its arguments are known."""
        if isinstance(result, Tensor) and (result.is_floating_point() or not _may_be_known(result)):
            return  # most results, without a list of them
        made = tensors_of(result)
        if not all(map(_may_be_known, made)):
            return
        given = tensors_of((args, kwargs))
        if any(tensor.is_meta and tensor not in self._twins for tensor in given):
            for tensor in made:
                self._forget(tensor)  # an operation in place has changed it
            return
        with suppress(Exception):  # an operation that the CPU lacks: the values stay unknown
            twins = tensors_of(
                func(*tree_map(self._on_cpu, args), **tree_map(self._on_cpu, kwargs))
            )
            for tensor, twin in zip(made, twins, strict=True):
                self._twins[tensor] = twin

    def _forget(self, tensor: Tensor) -> None:
        """Remove the values of a tensor, and of all tensors that share its storage."""
        if (twin := self._twins.get(tensor)) is None:
            return
        address = twin.untyped_storage().data_ptr()
        for other, values in list(self._twins.items()):
            if values.untyped_storage().data_ptr() == address:
                del self._twins[other]

    def _on_cpu(self, value: object) -> object:
        if isinstance(value, Tensor):
            return self._twins[value] if value.is_meta else value
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value


def _may_be_known(tensor: Tensor) -> bool:
    has_digits = tensor.is_floating_point() or tensor.is_complex()
    return tensor.is_meta and not has_digits and tensor.numel() <= _MOST_ELEMENTS
