"""Remembers what operations gave on the `meta` device: its kernels are Python, and every layer asks the same of them.

With it a cell of the course takes a second or two to track, and a tenth of the operations are asked of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Made:
    """What an operation makes: tensors of these shapes, or one alone."""

    shapes: tuple[_Shape, ...]
    alone: bool


_IN_PLACE, _ASK = "in place", "ask"


class ShapeMemory:
    """Answers a call from memory where inputs of the same shapes made new tensors, or changed the first of them.

    Anything else, such as a view, is left to torch, which is quick with it.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Made | str] = {}

    def call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Iterable[Tensor]]:
        """The result, and the tensors in it that may have a storage of their own."""
        key = (
            id(func),
            *map(_signature, args),
            *map(_signature, kwargs.items()),
        )  # an operation is slow to hash
        found = self._known.get(key)
        if type(found) is _Made:
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device="meta")
                for size, stride, dtype in found.shapes
            ]
            return (made[0] if found.alone else made), made
        if found is _IN_PLACE:
            return args[0], ()
        result = func(*args, **kwargs)
        if found is None:
            self._known[key] = _summary(func, args, result)
        return result, tensors_of(result)


def tensors_of(result: Any) -> Iterable[Tensor]:
    return (
        (result,)
        if isinstance(result, Tensor)
        else [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
    )


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.is_meta, value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), value


def _summary(func: Any, args: tuple[Any, ...], result: Any) -> _Made | str:
    if args and result is args[0]:
        return _IN_PLACE
    results = result if isinstance(result, tuple | list) else (result,)
    if not (
        results
        and all(isinstance(one, Tensor) and one.is_meta for one in results)
        and _are_new(func, args, results)
    ):
        return _ASK
    return _Made(
        tuple((one.shape, one.stride(), one.dtype) for one in results), isinstance(result, Tensor)
    )


def _are_new(func: Any, args: tuple[Any, ...], results: Iterable[Tensor]) -> bool:
    """The schema alone does not tell: `_unsafe_view` gives the storage it was given, and says nothing of it."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
    shared = given & {tensor.untyped_storage()._cdata for tensor in results}
    return not shared and not any(returned.alias_info for returned in func._schema.returns)
