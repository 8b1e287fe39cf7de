"""Emulates a GPU on the `meta` device: CUDA's autocast, gradient scaling, fused attention.

Functions are recognised by the names of torch's Python functions. Calls inside of a composite
function are not seen, so that the composites that the model uses are listed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
    nullcontext,
)
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tasks.prediction.operations.kernels import SdpaCall, fused_attention
from tasks.prediction.operations.shapes import Arguments, Keywords

# Lists and rules of ATen/autocast_mode.h, torch 2.13: functions whose inputs become the narrow
# dtype, or fp32, and functions whose result becomes fp32.
_LOW = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d",
    "conv3d", "einsum", "linear", "matmul", "mm", "multi_dot", "mv", "prelu", "vecdot",
    "__matmul__", "__rmatmul__", "scaled_dot_product_attention",
}  # fmt: skip
_FP32 = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow",
    "__pow__", "__rpow__", "square", "reciprocal", "rsqrt", "sinh", "softplus", "tan",
    "layer_norm", "group_norm", "cosine_similarity", "nll_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "cdist",
    "dist", "renorm", "logsumexp", "norm",
}  # fmt: skip
_FP32_RESULT = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"}
if torch.__version__ >= "2.12":
    _FP32 |= {"rms_norm"}

_CUDA = "cuda"


@contextmanager
def gpu_emulated(
    labelling: Callable[[str], AbstractContextManager[object]], kind: str = "meta"
) -> Iterator[GpuFunctions]:
    """Replace torch's functions that need a GPU, and yield the mode to enter in the forward pass.

    kind: device whose tensors stand for those on a GPU. labelling: `labelling(role)` is entered
    where autocast copies weights.
    """
    emulation = GpuFunctions(labelling)

    # Without a GPU `torch.autocast("cuda")` switches itself off, and the CPU's autocast has other
    # lists.
    def autocast(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = True,
    ) -> _Autocast:
        return _Autocast(emulation, dtype, enabled, cache_enabled)

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
        "torch.autocast": autocast,
        # Checkpoints read the state in the forward pass, and restore it later.
        "torch.amp.autocast": autocast,
        "torch.amp.autocast_mode.autocast": autocast,
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
        return self

    def __exit__(self, *_: object) -> None:
        emulation = self._emulation
        emulation.enabled, emulation.dtype, emulation.caches = self._outside.pop()
        emulation.depth -= 1
        if emulation.depth == 0:
            emulation.cache.clear()


class _Scaler(torch.amp.GradScaler):
    """Gradient scaler that never skips a step: without data no gradient is known to overflow."""

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: object, *args: object, **kwargs: object
    ) -> float | None:
        step: Callable[..., float | None] = optimizer.step
        return step(*args, **kwargs)


class GpuFunctions(TorchFunctionMode):
    """Mode in which functions cast their inputs and choose kernels like on a GPU.

    enabled, dtype, caches, depth: state of autocast. cache: its copies of weights, by the id of the
    weight; each entry also holds the weight itself, so that no other tensor gets its id.
    """

    def __init__(self, labelling: Callable[[str], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.enabled = False
        self.dtype = torch.float16
        self.caches = True
        self.depth = 0
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._labelling = labelling

    def resumed(self) -> AbstractContextManager[object]:
        """Return a context in which the mode is active, in whatever state it is now."""
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        return nullcontext() if self in modes else self

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.enabled:
            if name == "cross_entropy":
                return self._cross_entropy(*args, **options)
            args, options = self._cast_inputs(name, args, options)
        if func is functional.scaled_dot_product_attention:
            return fused_attention(SdpaCall(*args, **options))
        if func is functional.dropout:
            return _dropout(*args, **options)
        return func(*args, **options)

    def _cast_inputs(
        self, name: str, args: Arguments, options: Keywords
    ) -> tuple[Arguments, Keywords]:
        if name in _LOW:
            return _map(self._low, args), _map(self._low, options)
        if name in _FP32:
            return _map(_fp32, args), _map(_fp32, options)
        if name in _FP32_RESULT and _is_low(args[0]) and options.get("dtype") is None:
            options = {**options, "dtype": torch.float32}
        return args, options

    def _low(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (self.dtype, torch.float64):
            return tensor
        is_weight = (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not (is_weight and self.caches):
            return tensor.to(self.dtype)
        # Autocast copies each trained weight once in a region.
        if id(tensor) not in self.cache:
            with self._labelling("autocast weight copies"):
                self.cache[id(tensor)] = tensor, tensor.to(self.dtype)
        return self.cache[id(tensor)][1]

    def _cross_entropy(self, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        # A composite: its log-softmax has the dtype of the logits, and the loss takes an fp32 copy.
        smoothing = options.pop("label_smoothing", 0.0)
        if smoothing or not _is_low(logits):
            logits = _fp32(logits)
            return functional.cross_entropy(logits, target, label_smoothing=smoothing, **options)
        logarithms = functional.log_softmax(logits, min(1, logits.ndim - 1), dtype=logits.dtype)
        return functional.nll_loss(_fp32(logarithms), target, **options)


def _dropout(
    tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return what the GPU's kernel returns: it saves a byte for each element instead of a float."""
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(tensor, p, training, inplace)
    return torch.native_dropout(tensor, p, training)[0]


def _map(cast: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, list | tuple):
        return [_map(cast, one) for one in value]
    if isinstance(value, dict):
        return {key: _map(cast, one) for key, one in value.items()}
    return value


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if _is_low(tensor) else tensor
