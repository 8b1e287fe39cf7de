"""Runs compiled modules of a workload without data, as their code would run on a GPU.

A module is compiled at its first call with other shapes, out of sight of the storage tracker; then
its generated code runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tasks.harness.compilation import CompileOptions, compile_module
from tasks.prediction.inductor import compile_without_gpu
from tasks.prediction.operations.emulation import GpuFunctions

Call = Callable[..., object]
_compile: Callable[..., Call] = torch.compile
# Functions of autocast that the emulation replaces. Dynamo and AOTAutograd need torch's own.
_AUTOCAST: dict[str, object] = {
    "torch.autocast": torch.autocast,
    "torch.amp.autocast": torch.amp.autocast,
    "torch.amp.autocast_mode.autocast": torch.amp.autocast_mode.autocast,
    "torch.is_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "torch.is_autocast_enabled": torch.is_autocast_enabled,
    "torch.get_autocast_dtype": torch.get_autocast_dtype,
}


class UnexpectedCompilation(RuntimeError):
    """A function was compiled in a step that was expected to find it compiled."""


@contextmanager
def compiling_models(emulation: GpuFunctions) -> Iterator[None]:
    """Compile the modules of a model this way while it is built. Optimizers stay eager."""
    # Cells of one process have the same code: without this, torch would recompile it for other
    # shapes, and give up after eight.
    torch._dynamo.reset()
    compiler = _Compiler(emulation)
    with patch("tasks.training.model_sources.compile_module", compiler.compile_module):
        yield


class _Compiler:
    """Compiles modules for a GPU that is not there.

    emulation: mode of the GPU's functions, which the compiler traces.
    """

    def __init__(self, emulation: GpuFunctions) -> None:
        self._emulation = emulation
        self._is_compiling = False

    def compile_module(self, module: nn.Module, options: CompileOptions) -> None:
        with patch("torch.compile", self._replacement):
            compile_module(module, options)

    def _replacement(self, function: Call, **options: object) -> Call:
        options.pop("mode", None)
        compiled = _compile(function, backend=self._backend, **options)
        known: set[tuple[object, ...]] = set()

        def call(*args: object, **kwargs: object) -> object:
            with torch.compiler.set_stance("default"), _without_function_modes():
                key = (torch.is_grad_enabled(), *map(_shape, tree_leaves((args, kwargs))))
                if key not in known:
                    self._compile_for(compiled, args, kwargs)
                    known.add(key)
                return compiled(*args, **kwargs)

        return call

    def _compile_for(
        self, compiled: Call, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        self._is_compiling = True
        try:
            with ExitStack() as stack:
                for name, function in _AUTOCAST.items():
                    stack.enter_context(patch(name, function))
                stack.enter_context(_disable_current_modes())
                # Torch recommends tf32 and more; the cell is measured as its config says.
                stack.enter_context(warnings.catch_warnings(action="ignore"))
                config: Any = torch._functorch.config
                stack.enter_context(config.patch(force_non_lazy_backward_lowering=True))
                compiled(*tree_map(_copied, args), **tree_map(_copied, kwargs))
        finally:
            self._is_compiling = False

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[object]) -> object:
        if not self._is_compiling:
            raise UnexpectedCompilation("a function was compiled again in a later step")
        return compile_without_gpu(gm, inputs, self._tracing)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        # AOTAutograd traces without autocast's cache of weights.
        caches, self._emulation.caches = self._emulation.caches, False
        try:
            with self._emulation.resumed():
                yield
        finally:
            self._emulation.caches = caches


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Leave the mode of the GPU's functions: Dynamo would trace its code."""
    if not _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        yield
        return
    with _pop_mode_temporarily(), _without_function_modes():
        yield


def _shape(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return value


def _copied(value: object) -> object:
    """Return another tensor without data; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    copied = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return copied.requires_grad_(value.requires_grad)
