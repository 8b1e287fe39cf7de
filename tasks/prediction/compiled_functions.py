"""Functions that an optimizer or a model compiles itself, run without data.

Some optimizers, such as those of torchao, call `torch.compile` for the function that changes one
parameter. Its code allocates less than the same function run eagerly, so that the allocator
reserves less. Such a function is compiled for a GPU that is not there. A function that runs
outside of optimizers, or that needs a GPU to be compiled, runs eagerly: an upper bound in most
cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

if TYPE_CHECKING:
    from tasks.prediction.compiled_calls import FunctionCompiler

Call = Callable[..., Any]
_compile: Call = torch.compile
_RUN_EAGERLY = ("eager", "aot_eager")  # backends that generate no code
# Phases in which optimizers step. The code of models would be traced with the emulated autocast.
_COMPILED_PHASES = ("backward", "optimizer")


class CompiledFunctions:
    """Watcher of a step that compiles functions while an optimizer steps.

    eager: names of the functions that ran, or will run, eagerly although they are compiled on a GPU.
    """

    def __init__(self, compiler: FunctionCompiler | None) -> None:
        self.eager: set[str] = set()
        self._compiler = compiler
        self._phase = ""
        # By the code of the function. Dynamo, too, finds compiled functions by their code.
        self._compiled: dict[tuple[object, ...], Call] = {}

    def enter(self, phase: str) -> None:
        self._phase = phase

    def leave(self, phase: str) -> None:
        self._phase = ""

    def compile(self, function: Call | None = None, **options: Any) -> Call:
        """Return a function that is compiled when it is called: takes the place of `torch.compile`."""
        if function is None:  # a decorator with options
            return partial(self.compile, **options)
        if options.get("backend") in _RUN_EAGERLY or options.get("disable"):
            return function
        if isinstance(function, nn.Module):  # `torch.compile` returns a module
            self.eager.add(type(function).__name__)
            return _compile(function, **options)  # type: ignore[no-any-return]

        @wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if torch.compiler.is_dynamo_compiling():  # it is part of another function's graph
                return function(*args, **kwargs)
            if self._phase in _COMPILED_PHASES and self._compiler and _is_default(options):
                try:
                    return self._find(self._compiler, function, options)(*args, **kwargs)
                except Exception:  # whatever torch's compiler cannot do without a GPU
                    pass
            self.eager.add(getattr(function, "__name__", repr(function)))
            return function(*args, **kwargs)

        return call

    def _find(self, compiler: FunctionCompiler, function: Call, options: Mapping[str, Any]) -> Call:
        key = (getattr(function, "__code__", function), *sorted(options.items()))
        if key not in self._compiled:
            # Each shape is compiled separately. On a GPU the second one may get code for all
            # shapes, which allocates buffers of the same sizes.
            self._compiled[key] = compiler.compile(function, **{**options, "dynamic": False})
        return self._compiled[key]


@contextmanager
def functions_compiled(compiler: FunctionCompiler | None) -> Iterator[CompiledFunctions]:
    """Follow the functions that are given to `torch.compile` from now on.

    compiler: of functions of optimizers. None: all run eagerly.
    """
    functions = CompiledFunctions(compiler)
    with patch("torch.compile", functions.compile):
        yield functions


def _is_default(options: Mapping[str, Any]) -> bool:
    """Return True if the code is that of a compiled cell: no CUDA graphs, no other backend."""
    is_inductor = options.get("backend", "inductor") == "inductor"
    return is_inductor and options.get("mode") in (None, "default") and not options.get("options")
