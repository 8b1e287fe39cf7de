"""Runs compiled modules of a workload without data, as their code would run on a GPU.

A module is compiled at its first call with other shapes, out of sight of the storage tracker; then
its generated code runs.

The blocks of the course's model skip Dynamo, which would take a third of the time. It has nothing
to find out about them: they are alike, and make the same calls each time. What Dynamo decides is
repeated here, so that the generated code is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map

from tasks.harness.compilation import CompileOptions, compile_module
from tasks.prediction.inductor import compile_function, compile_without_gpu, with_inner
from tasks.prediction.operations.autocast import keys_included
from tasks.prediction.operations.emulation import GpuFunctions
from tasks.prediction.operations.shapes import Arguments, Keywords

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


# Compiled blocks by what they take and own: the code, and the names of its parameters and buffers.
CompiledBlocks = dict[tuple[object, ...], tuple[Callable[..., tuple[Tensor]], list[str]]]


# Nodes of all graphs of a model. Inductor takes 0.09 s of CPU time for each, so that the prediction
# of a larger model would take a minute or more.
_MOST_NODES = 450


class ModelTooLarge(RuntimeError):
    """The graphs of a model have too many nodes to be compiled for a prediction."""


class UnexpectedCompilation(RuntimeError):
    """A function was compiled in a step that was expected to find it compiled."""


@contextmanager
def compiling_models(emulation: GpuFunctions, skips_dynamo: bool) -> Iterator[None]:
    """Compile the modules of a model this way while it is built. Optimizers stay eager.

    skips_dynamo: compile the blocks of the course's model without Dynamo.
    """
    compiler = _ModelCompiler(emulation, skips_dynamo)
    with patch("tasks.training.model_sources.compile_module", compiler.compile_module):
        yield


class FunctionCompiler:
    """Compiles functions for a GPU that is not there.

    emulation: mode of the GPU's functions, which the compiler traces.
    """

    def __init__(self, emulation: GpuFunctions) -> None:
        # Cells of one process have the same code: without this, torch would recompile it for other
        # shapes, and give up after eight.
        torch._dynamo.reset()
        self._emulation = emulation
        self._is_compiling = False

    def compile(self, function: Call, **options: object) -> Call:
        """Return the compiled function: takes the place of `torch.compile` without its mode."""
        compiled = _compile(function, **{**options, "backend": self._backend, "mode": None})
        known: set[tuple[object, ...]] = set()

        def call(*args: object, **kwargs: object) -> object:
            with torch.compiler.set_stance("default"), keys_included():
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
            with _compiling():
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


class _ModelCompiler(FunctionCompiler):
    """Compiles the modules of a model, and the blocks of the course's model without Dynamo."""

    def __init__(self, emulation: GpuFunctions, skips_dynamo: bool) -> None:
        super().__init__(emulation)
        self._skips_dynamo = skips_dynamo
        self._blocks: CompiledBlocks = {}
        self._nodes = 0

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[object]) -> object:
        self._nodes += len(gm.graph.nodes)
        if self._nodes > _MOST_NODES:
            raise ModelTooLarge(f"its graphs have more than {_MOST_NODES} nodes")
        return super()._backend(gm, inputs)

    def compile_module(self, module: nn.Module, options: CompileOptions) -> None:
        if options["fullgraph"] and self._skips_dynamo:  # the course's model
            module._compiled_call_impl = partial(self._call_block, module)
            return
        with patch("torch.compile", self.compile):
            compile_module(module, options)

    def _call_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Call a block, which is compiled if no block like it was before."""
        owned = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        shapes = {name: _shape(tensor) for name, tensor in owned.items()}
        key = (torch.is_grad_enabled(), _shape(x), *shapes.items())
        with keys_included():
            if key not in self._blocks:
                self._blocks[key] = self._compile_block(block, x, owned)
            compiled, names = self._blocks[key]
            return compiled(x, *(owned[name] for name in names))[0]

    def _compile_block(
        self, block: nn.Module, x: Tensor, owned: Mapping[str, Tensor]
    ) -> tuple[Callable[..., tuple[Tensor]], list[str]]:
        block_call: Callable[[Tensor], Tensor] = block._call_impl

        def call(x: Tensor, *values: Tensor) -> Tensor:
            with _reparametrize_module(block, dict(zip(names, values, strict=True))):
                return block_call(x)

        with _compiling(), patch.object(Tensor, "__iter__", _iterate):
            uses = _Uses(owned)
            with torch.no_grad(), self._tracing(), uses:
                block_call(x)
            names = uses.names
            x = _copied(x)
            values = [_copied(owned[name]) for name in names]
            compiled = compile_function(call, x, values, self._tracing)
            compiled(x, *values)
        return compiled, names


class _Uses(TorchFunctionMode):
    """Mode that records the order of first use of tensors, in which Dynamo passes them to a graph.

    names: of the tensors that were used.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names: list[str] = []
        self._unused = {id(tensor): name for name, tensor in tensors.items()}

    def __torch_function__(
        self,
        func: Call,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._unused:
                self.names.append(self._unused.pop(id(value)))
        return func(*args, **(kwargs or {}))


def _iterate(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate like Dynamo. Torch itself would call `unbind`, whose backward pass is another one."""
    return iter([tensor[index] for index in range(len(tensor))])


@contextmanager
def _compiling() -> Iterator[None]:
    """Give the compiler torch's own functions, and hide its tensors from the storage tracker."""
    with ExitStack() as stack:
        for name, function in _AUTOCAST.items():
            stack.enter_context(patch(name, function))
        stack.enter_context(_disable_current_modes())
        # Torch recommends tf32 and more; the cell is measured as its config says.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        config: Any = torch._functorch.config
        options = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        stack.enter_context(config.patch(options))
        yield


def _shape(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return value


def _copied(value: Any) -> Any:
    """Return another tensor without data; other values, and those on the CPU, unchanged."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    if is_traceable_wrapper_subclass(value):
        return with_inner(value, _copied)
    copied = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, nn.Parameter):  # Dynamo would compile again for another type
        return nn.Parameter(copied, value.requires_grad)
    return copied.requires_grad_(value.requires_grad)
