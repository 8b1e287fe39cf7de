"""Emulates a GPU on the `meta` device: CUDA's autocast, gradient scaling, fused attention.

It works within torch's dispatcher, where autocast works: before autograd, and for the operations
within composite functions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from functools import partial
from itertools import count
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from tasks.prediction.operations.autocast import (
    CAST,
    CHOOSE,
    AutocastRules,
    autocast_operations,
    include,
    is_included,
    keys_included,
    mapped,
)
from tasks.prediction.operations.kernels import FusedRMSNorm, SdpaCall, fused_attention
from tasks.prediction.operations.shapes import Arguments, Keywords, Operation

_CUDA = "cuda"


@contextmanager
def gpu_emulated(
    labelling: Callable[[str], AbstractContextManager[object]],
    kind: str = "meta",
    capability: float = 9.0,
) -> Iterator[GpuFunctions]:
    """Replace torch's functions that need a GPU, and yield the mode to enter in the forward pass.

    kind: device whose tensors stand for those on a GPU. labelling: `labelling(role)` is entered
    where autocast copies weights. capability: see `fused_attention`.
    """
    emulation = GpuFunctions(labelling, capability)

    # The backward pass leaves all modes. The Python code that it calls, such as a checkpoint's, may
    # be code of a forward pass.
    def apply(node: object, *args: object) -> object:
        with emulation.resumed():
            return call_backward(node, *args)

    def make_hooks(hooks: object, pack: object, unpack: Callable[[object], object]) -> None:
        def unpack_emulated(packed: object) -> object:
            with emulation.resumed():
                return unpack(packed)

        init_hooks(hooks, pack, unpack_emulated)

    call_backward: Callable[..., object] = torch.autograd.function.BackwardCFunction.apply
    init_hooks: Callable[..., None] = torch.autograd.graph.saved_tensors_hooks.__init__
    replaced = {
        "torch.autograd.function.BackwardCFunction.apply": apply,
        "torch.autograd.graph.saved_tensors_hooks.__init__": make_hooks,
        "torch.autocast": emulation.autocast,
        # Checkpoints read the state in the forward pass, and restore it later.
        "torch.amp.autocast": emulation.autocast,
        "torch.amp.autocast_mode.autocast": emulation.autocast,
        "torch.cuda.amp.autocast": emulation.cuda_autocast,
        "torch.cuda.amp.autocast_mode.autocast": emulation.cuda_autocast,
        "torch.amp.is_autocast_available": lambda device_type: True,
        "torch.is_autocast_cache_enabled": lambda: emulation.caches,
        "torch.is_autocast_enabled": lambda device_type=_CUDA: emulation.enabled,
        "torch.get_autocast_dtype": lambda device_type=_CUDA: emulation.dtype,
        "torch.amp.GradScaler": lambda device, enabled=True: _Scaler(kind, enabled=enabled),
        "torch.optim.optimizer._get_foreach_kernels_supported_devices": lambda: [kind],
        # Adagrad of torch 2.11 removes `cuda` from this list.
        "torch.optim.optimizer._get_fused_kernels_supported_devices": lambda: [kind, _CUDA],
    }
    with ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(patch(name, replacement))
        yield emulation


class _Autocast(ContextDecorator):
    """Emulated `torch.autocast`: regions nest, and the outermost empties the cache of weights."""

    def __init__(
        self,
        emulation: GpuFunctions,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = True,
    ) -> None:
        self._emulation = emulation
        self._inside = enabled, dtype or torch.float16, cache_enabled is not False
        self._outside: list[tuple[bool, torch.dtype, bool]] = []

    def __enter__(self) -> Self:
        emulation = self._emulation
        self._outside.append((emulation.enabled, emulation.dtype, emulation.caches))
        emulation.enabled, emulation.dtype, emulation.caches = self._inside
        emulation.depth += 1
        self._follow()
        return self

    def __exit__(self, *_: object) -> None:
        emulation = self._emulation
        emulation.enabled, emulation.dtype, emulation.caches = self._outside.pop()
        emulation.depth -= 1
        self._follow()
        if emulation.depth == 0:
            emulation.cache.clear()

    def _follow(self) -> None:
        include(CAST, self._emulation.enabled and is_included(CHOOSE))


class _Scaler(torch.amp.GradScaler):
    """Gradient scaler that never skips a step: without data no gradient is known to overflow."""

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: object, *args: object, **kwargs: object
    ) -> float | None:
        step: Callable[..., float | None] = optimizer.step
        return step(*args, **kwargs)


class GpuFunctions:
    """Context in which operations cast their inputs and choose kernels like on a GPU.

    enabled, dtype, caches, depth: state of autocast. cache: its copies of weights, by the id of the
    weight; each entry also holds the weight itself, so that no other tensor gets its id.
    unfollowed: operations that a GPU computes in kernels whose memory is not known.
    """

    def __init__(
        self, labelling: Callable[[str], AbstractContextManager[object]], capability: float
    ) -> None:
        self.capability = capability
        self.enabled = False
        self.dtype = torch.float16
        self.caches = True
        self.depth = 0
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.unfollowed: set[str] = set()
        self._labelling = labelling
        self._rules = AutocastRules()
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        keys = (CHOOSE, CAST) if self.enabled else (CHOOSE,)
        self._entered.append(keys_included(*keys))
        self._entered[-1].__enter__()
        _ACTIVE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _ACTIVE.pop()
        self._entered.pop().__exit__(None, None, None)

    # Without a GPU `torch.autocast("cuda")` switches itself off, and the CPU's autocast has other
    # lists.
    def autocast(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = True,
    ) -> _Autocast:
        """Stand in for `torch.autocast`."""
        return _Autocast(self, dtype, enabled, cache_enabled)

    def cuda_autocast(
        self,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool | None = True,
    ) -> _Autocast:
        """Stand in for `torch.cuda.amp.autocast`, whose arguments have another order."""
        return _Autocast(self, dtype, enabled, cache_enabled)

    def resumed(self) -> AbstractContextManager[object]:
        """Return a context in which the emulation is active, in whatever state it is now."""
        return nullcontext() if is_included(CHOOSE) else self

    def call(self, func: Operation, args: Arguments, kwargs: Keywords) -> object:
        """Call an operation with its inputs cast."""
        rule = self._rules.rule(func, args, kwargs, self.dtype)
        if rule.dtypes:
            indices = count()

            def cast(tensor: Tensor) -> Tensor:
                dtype = rule.dtypes.get(next(indices))
                return tensor if dtype is None else self._cast(tensor, dtype)

            args, kwargs = mapped(cast, args), mapped(cast, kwargs)
        if rule.operation is not func:
            # Torch leaves out arguments with their defaults, which the other one may require.
            more = func._schema.arguments[len(args) : rule.count]
            args = (*args, *(one.default_value for one in more if one.name not in kwargs))
        return rule.operation(*args, **kwargs, **rule.keywords)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        is_weight = (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not (is_weight and self.caches and dtype == self.dtype):
            return tensor.to(dtype)
        # Autocast copies each trained weight once in a region.
        if id(tensor) not in self.cache:
            with self._labelling("autocast weight copies"):
                self.cache[id(tensor)] = tensor, tensor.to(dtype)
        return self.cache[id(tensor)][1]


_ACTIVE: list[GpuFunctions] = []  # those that were entered, innermost last


def _without(key: torch._C.DispatchKey) -> AbstractContextManager[object]:
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(key)
    )
    return guard


def _cast_and_call(func: Operation, *args: Any, **kwargs: Any) -> object:
    with _without(CAST):
        return _ACTIVE[-1].call(func, args, kwargs)


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    return fused_attention(SdpaCall(*args, **kwargs), _ACTIVE[-1].capability)


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Return what the GPU's kernel returns: it saves a byte for each element instead of a float."""
    if train and 0 < p < 1 and tensor.numel():
        return torch.native_dropout(tensor, p, train)[0]
    with _without(CHOOSE):
        return torch.dropout(tensor, p, train)


def _normalise(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Call the GPU's kernel. Without a GPU, torch computes a norm in steps that save more."""
    if x.is_meta:
        normalise: Callable[..., tuple[Tensor, Tensor]] = FusedRMSNorm.apply
        results = normalise(x, list(shape), weight)
        return results
    with _without(CHOOSE):
        in_steps: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        return in_steps


def _recur(func: Operation, *args: Any, **kwargs: Any) -> object:
    """Call a recurrent layer step by step. On a GPU it is a kernel of cuDNN with its own memory."""
    _ACTIVE[-1].unfollowed.add(func.overloadpacket.__name__)
    with _without(CHOOSE):
        return func(*args, **kwargs)


def _register(library: Any) -> None:
    """Register the kernels of the two keys. They run only where the keys are included."""
    aten: Any = torch.ops.aten
    for func in autocast_operations():
        library.impl(func, partial(_cast_and_call, func), CAST.name)
    library.impl(aten.scaled_dot_product_attention.default, _attend, CHOOSE.name)
    library.impl(aten.dropout.default, _dropout, CHOOSE.name)
    if hasattr(aten, "_fused_rms_norm"):
        library.impl(aten._fused_rms_norm.default, _normalise, CHOOSE.name)
    for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
        for overload in ("input", "data"):
            func = getattr(packet, overload)
            library.impl(func, partial(_recur, func), CHOOSE.name)


_Library: Any = torch.library.Library
_ATEN, _ALL = _Library("aten", "IMPL"), _Library("_", "IMPL")
_register(_ATEN)
for _key in (CAST, CHOOSE):
    _ALL.fallback(torch.library.fallthrough_kernel, _key.name)
