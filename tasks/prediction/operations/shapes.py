"""Stores the results of operations on the `meta` device: its kernels are Python, and slow.

Every layer calls the same operations with the same shapes, so that a tenth of the calls reach
torch. With it a cell of the course takes a second or two to track.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

# Arguments of an operation that torch dispatches. Their types are those that the operation takes.
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = Mapping[str, Any]
# An operation as torch dispatches it, and its result: a tensor, a number, or several of them.
Operation: TypeAlias = OpOverload[..., Any]
_LISTS = (list, tuple)  # `list | tuple` would be made again for each argument
_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _NewTensors:
    """The result of an operation: new tensors of these shapes, or a single one."""

    shapes: tuple[_Shape, ...]
    is_single: bool


_META = torch.device("meta")
# Results that are the first argument, and results that only torch knows, such as views.
_IN_PLACE, _CALL_TORCH = "in place", "call torch"


class ShapeMemory:
    """Results of operations by the shapes of their arguments.

    Calls that make new tensors or change their first argument are answered without torch. All
    others, such as views, are left to torch, which is quick with them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _NewTensors | str] = {}

    def call(
        self, func: Operation, args: Arguments, kwargs: Keywords
    ) -> tuple[object, Iterable[Tensor]]:
        """Return the result, and the tensors in it that may have a new storage."""
        # An operation is slow to hash, so its id stands for it. `torch.empty(shape)` depends on the
        # default dtype, which no argument names.
        key: list[object] = [id(func), torch.get_default_dtype()]
        _add_signature(key, args)
        for name, value in kwargs.items():
            key.append(name)
            _add_signature(key, (value,))
        signature = tuple(key)
        found = self._known.get(signature)
        if type(found) is _NewTensors:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=_META)
                for size, stride, dtype in found.shapes
            ]
            return (made[0] if found.is_single else made), made
        if found is _IN_PLACE:
            return args[0], ()
        result = func(*args, **kwargs)
        if found is None:
            self._known[signature] = _summary(func, args, result)
        return result, tensors_of(result)


def tensors_of(result: object) -> Sequence[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(result, Tensor):
        return (result,)
    return [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]


def _add_signature(key: list[object], values: Iterable[object]) -> None:
    """Add all properties of values to a key that the result of an operation may depend on."""
    # One flat list instead of nested tuples, because this runs for each argument.
    for value in values:
        kind = type(value)
        key.append(kind)
        if isinstance(value, Tensor):
            key += value.is_meta, value.dtype, value.shape, value.stride()
        elif isinstance(value, _LISTS):
            key.append(len(value))
            _add_signature(key, value)
        else:
            key.append(value)


def _summary(func: Operation, args: Arguments, result: object) -> _NewTensors | str:
    if any(map(is_traceable_wrapper_subclass, tensors_of((args, result)))):
        return _CALL_TORCH  # what it holds is made by its class
    if args and result is args[0]:
        # A tensor with data, such as an optimizer's count of steps, must change in each call, and
        # so must a shape (`unsqueeze_`).
        is_meta = all(tensor.is_meta for tensor in tensors_of(args))
        changes_shape = torch.Tag.inplace_view in func.tags
        return _IN_PLACE if is_meta and not changes_shape else _CALL_TORCH
    results = result if isinstance(result, tuple | list) else (result,)
    for one in results:
        if not isinstance(one, Tensor) or not one.is_meta:
            return _CALL_TORCH
    if not results or not _are_new(func, args, results):
        return _CALL_TORCH
    shapes = tuple((one.shape, one.stride(), one.dtype) for one in results)
    return _NewTensors(shapes, isinstance(result, Tensor))


def _are_new(func: Operation, args: Arguments, results: Iterable[Tensor]) -> bool:
    # The schema alone is not enough: `_unsafe_view` returns the storage that it was given, and does
    # not declare that.
    shared = _addresses(tensors_of(args)) & _addresses(results)
    return not shared and not any(returned.alias_info for returned in func._schema.returns)


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
