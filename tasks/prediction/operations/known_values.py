"""Values of tensors on the `meta` device that follow from no data of the model.

A model may examine positions, masks and token ids: `if mask.all():` decides which kernel runs, and
torch's own encoder compares its mask with a causal one. Each operation that makes such a tensor from
constants, or from others like it, is repeated on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from tasks.prediction.operations.shapes import Arguments, Keywords, Operation, tensors_of

_MOST_ELEMENTS = 1 << 24  # masks of 4,096 positions; larger ones would take time and memory
# Arguments that an operation writes to, by the id of the operation because it is slow to hash.
_WRITTEN: dict[int, tuple[tuple[int, str], ...]] = {}
# Their tensor gives a shape alone.
_LIKE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")


class KnownValues:
    """The tensors on the CPU that hold the values of tensors on the `meta` device.

    follows_floats: also from constants of floating point, as in a model. An optimizer makes a state
    of zeros for each parameter, which no code examines.
    """

    def __init__(self) -> None:
        self.follows_floats = True
        self._twins: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> int | float | bool | None:
        """Return the number in a tensor of one element, or None if it is not known."""
        twin = self._twins.get(tensor)
        return None if twin is None else twin.item()

    def follow(self, func: Operation, args: Arguments, kwargs: Keywords, result: object) -> None:
        """Store the values of an operation's results if those of its arguments are known."""
        changed = [one for one in _changed(func, args, kwargs) if one in self._twins]
        if isinstance(result, Tensor) and not changed:
            is_float = result.is_floating_point()
            if not _may_be_known(result) or (is_float and not self._follows(func, args)):
                return  # most results, without a list of them
        made = tensors_of(result)
        if not all(map(_may_be_known, made)):
            self._forget(*changed)
            return
        given = () if _is_like(func) else tensors_of((args, kwargs))
        is_weight = any(tensor.is_floating_point() for tensor in made) and _has_no_value(func)
        if is_weight or any(tensor.is_meta and tensor not in self._twins for tensor in given):
            self._forget(*made, *changed)
            return
        try:
            twins = tensors_of(
                func(*tree_map(self._on_cpu, args), **tree_map(self._on_cpu, kwargs))
            )
            for tensor, twin in zip(made, twins, strict=True):
                self._twins[tensor] = twin
        except Exception:  # an operation that the CPU lacks
            self._forget(*made, *changed)

    def _follows(self, func: Operation, args: Arguments) -> bool:
        """Return False for most operations of floats: their results are not known, and never were."""
        first = args[0] if args else None
        if isinstance(first, (list, tuple)):
            first = first[0] if first else None
        if isinstance(first, Tensor):
            is_new = not first.is_meta or (_is_like(func) and self.follows_floats)
            return is_new or first in self._twins
        return self.follows_floats

    def _forget(self, *tensors: Tensor) -> None:
        """Remove the values of tensors, and of all tensors that share their storages."""
        for tensor in tensors:
            if (twin := self._twins.get(tensor)) is None:
                continue
            address = twin.untyped_storage().data_ptr()
            for other, values in list(self._twins.items()):
                if values.untyped_storage().data_ptr() == address:
                    del self._twins[other]

    def _on_cpu(self, value: object) -> object:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return value
            twin = self._twins.get(value)  # None if a shape alone is wanted
            return torch.empty_like(value, device="cpu") if twin is None else twin
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value


def _changed(func: Operation, args: Arguments, kwargs: Keywords) -> Sequence[Tensor]:
    """Return the tensors that an operation writes to: in place, in lists, or given as `out`."""
    if id(func) not in _WRITTEN:
        _WRITTEN[id(func)] = tuple(_written_arguments(func))
    changed: list[object] = []
    for number, name in _WRITTEN[id(func)]:
        changed.append(args[number] if number < len(args) else kwargs.get(name))
    return tensors_of(changed) if changed else ()


def _written_arguments(func: Operation) -> Iterator[tuple[int, str]]:
    """Yield the position and the name of each argument that the operation writes to."""
    # Its schema does not declare that it updates running means.
    is_norm = func.overloadpacket.__name__.endswith("batch_norm")
    for number, argument in enumerate(func._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or (is_norm and argument.name.startswith("running_")):
            yield number, argument.name


def _is_like(func: Operation) -> bool:
    return func.overloadpacket.__name__ in _LIKE


def _may_be_known(tensor: Tensor) -> bool:
    return tensor.is_meta and tensor.numel() <= _MOST_ELEMENTS


def _has_no_value(func: Operation) -> bool:
    """Return True for an operation that leaves memory as it is, or fills it at random."""
    is_empty = "empty" in func.overloadpacket.__name__
    return is_empty or torch.Tag.nondeterministic_seeded in func.tags
