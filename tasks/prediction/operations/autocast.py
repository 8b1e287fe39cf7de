"""Finds out what CUDA's autocast does to an operation: it calls torch's autocast.

Its code needs no GPU: it reads dtypes and devices, and then calls the operation again. Here it
reads those of tensors without data that claim to be on a GPU. Therefore no list of functions is
copied from torch, and another version is followed as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tasks.prediction.operations.shapes import Arguments, Keywords, Operation, tensors_of

# Dispatch keys of devices that are not there: their kernels run before those of autograd, and
# within torch's composite functions. The first one casts, and the second one chooses kernels.
_KEYS: Any = torch._C.DispatchKey
CAST: torch._C.DispatchKey = _KEYS.AutocastPrivateUse1
CHOOSE: torch._C.DispatchKey = _KEYS.AutocastIPU

_CUDA = "cuda"
_GPU = torch.device(_CUDA, 0)
_LOW = (torch.float16, torch.bfloat16)
_TO = torch.ops.aten._to_copy.default


def autocast_operations() -> Iterator[Operation]:
    """Yield the operations that CUDA's autocast of this version of torch changes."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


@dataclass
class Rule:
    """The changes that autocast makes to a call.

    dtypes: of the tensors among the arguments, in their order, if it casts them.
    operation: what it calls instead. keywords: what it adds to the call.
    count: of the positional arguments of that call, those with defaults included.
    """

    operation: Operation
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    count: int = 0


class AutocastRules:
    """Rules for operations by the dtypes of their tensors, each asked for once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Rule] = {}

    def rule(self, func: Operation, args: Arguments, kwargs: Keywords, low: torch.dtype) -> Rule:
        """Return the rule for a call in a region with this narrow dtype."""
        dtypes = [tensor.dtype for tensor in tensors_of((args, kwargs))]
        key = (id(func), low, _has_dtype(args, kwargs), *dtypes)
        if key not in self._known:
            self._known[key] = _ask(func, args, kwargs, low)
        return self._known[key]


class _Answered(Exception):
    """Ends a call: autocast has done its part."""


class _Claim(Tensor):
    """A tensor without data that claims to be on a GPU, and records what autocast does with it."""

    rule: Rule
    place: int  # among the tensors of the call

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype, rule: Rule, place: int) -> _Claim:
        made: Callable[..., _Claim] = torch.Tensor._make_wrapper_subclass
        claim = made(cls, tensor.shape, tensor.stride(), dtype=dtype, device=_GPU)
        claim.rule, claim.place = rule, place
        return claim

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operation,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Tensor:
        claims = [one for one in tensors_of((args, kwargs)) if isinstance(one, _Claim)]
        rule, added = claims[0].rule, kwargs or {}
        # A second conversion is one of the operation itself.
        if func is _TO and claims[0].place not in rule.dtypes:
            rule.dtypes[claims[0].place] = added["dtype"]
            return cls.of(args[0], added["dtype"], rule, claims[0].place)
        if func.overloadpacket is rule.operation.overloadpacket and "dtype" in added:
            rule.operation, rule.keywords = func, {"dtype": added["dtype"]}
            rule.count = len(args)
        raise _Answered


def _ask(func: Operation, args: Arguments, kwargs: Keywords, low: torch.dtype) -> Rule:
    """Return what autocast does to a call. Raise what it refuses."""
    rule, without = _watch(func, args, kwargs, low), _watch(func, args, kwargs, None)
    other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
    tensors = tensors_of((args, kwargs))
    converted = [
        place
        for place, dtype in rule.dtypes.items()
        if tensors[place].dtype == low or without.dtypes.get(place) == dtype
    ]
    if converted:
        # The operation may convert them itself. Autocast does so, too, unless it casts to the narrow
        # dtype, which they have. A cast to another dtype shows the difference.
        with suppress(RuntimeError):  # functions of several dtypes refuse the other narrow one
            asked = _watch(func, args, kwargs, other)
            for place in converted:
                if asked.dtypes.get(place) == other:
                    del rule.dtypes[place]
    if _has_dtype(args, kwargs):
        rule.operation, rule.keywords = func, {}
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
    is_unchanged = not rule.dtypes and not rule.keywords
    if takes_dtype and is_unchanged and tensors[0].dtype in _LOW and not _has_dtype(args, kwargs):
        # It sets the dtype of a composite, which was handed on to a function within that.
        rule.keywords = {"dtype": torch.float32}
    return rule


def _watch(func: Operation, args: Arguments, kwargs: Keywords, low: torch.dtype | None) -> Rule:
    """Call an operation in torch's own autocast until all inputs are cast; None: without it."""
    rule = Rule(func)
    indices = count()

    def claim(tensor: Tensor) -> Tensor:
        return _Claim.of(tensor, tensor.dtype, rule, next(indices))

    claimed, options = mapped(claim, args), mapped(claim, kwargs)
    before = torch._C.is_autocast_enabled(_CUDA), torch._C.get_autocast_dtype(_CUDA)
    torch._C._ensureCUDADeviceGuardSet()
    with _disable_current_modes(), keys_included():
        torch.set_autocast_enabled(_CUDA, low is not None)
        torch.set_autocast_dtype(_CUDA, low or before[1])
        try:
            func(*claimed, **options)
        except (_Answered, NotImplementedError):  # a composite made a tensor on the GPU
            pass
        except RuntimeError as error:
            if "autocast" in str(error):  # it refuses some functions, and some pairs of dtypes
                raise
        finally:
            torch.set_autocast_enabled(_CUDA, before[0])
            torch.set_autocast_dtype(_CUDA, before[1])
    return rule


def _has_dtype(args: Arguments, kwargs: Keywords) -> bool:
    is_given = any(isinstance(value, torch.dtype) for value in args)
    return is_given or kwargs.get("dtype") is not None


@contextmanager
def keys_included(*keys: torch._C.DispatchKey) -> Iterator[None]:
    """Include these of the two keys in the dispatch of this thread, and exclude the others."""
    before = [(key, is_included(key), _is_excluded(key)) for key in (CAST, CHOOSE)]
    try:
        for key, _, _ in before:
            include(key, key in keys)
        yield
    finally:
        for key, was_included, was_excluded in before:
            torch._C._dispatch_tls_set_dispatch_key_included(key, was_included)
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)


def include(key: torch._C.DispatchKey, is_wanted: bool) -> None:
    """Include a key in the dispatch of this thread, or exclude it, as torch does by default."""
    torch._C._dispatch_tls_set_dispatch_key_included(key, is_wanted)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not is_wanted)


def is_included(key: torch._C.DispatchKey) -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(key)


def _is_excluded(key: torch._C.DispatchKey) -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, one) for one in value)
    if isinstance(value, dict):
        return {key: mapped(change, one) for key, one in value.items()}
    return value
