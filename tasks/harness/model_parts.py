"""Names the parts of a workload while it steps: its modules, and those functions that are parts of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from model.parts import PART_FUNCTIONS, Namer, parts_named_by


@contextmanager
def parts_named(model: nn.Module | None, name: Namer) -> Iterator[None]:
    """While it lasts, each module's forward pass and each part runs inside of `name(...)`.

    Compiled modules are left as they are, and so is what is in them: a hook would have them compiled again. What holds
    them is left out too, or it would pass for what they do.
    """
    with ExitStack() as stack:
        stack.enter_context(parts_named_by(name))
        for path, module in _uncompiled(model, "") if model is not None else ():
            _hook(module, path, name, stack)
        yield


def first_block(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The first of the blocks that a model repeats, with its path; None where it has no ModuleList."""
    return next(((f"{path}.0".lstrip("."), blocks[0]) for path, blocks in _lists(model)), None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What a model repeats: the children of its first ModuleList."""
    return next((list(blocks) for _, blocks in _lists(model)), [])


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            yield path, module


def part_functions() -> Mapping[str, str]:
    """Which functions are parts: their names, as they stand in a Python stack, and the names of the parts."""
    return PART_FUNCTIONS


def _uncompiled(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module that runs in Python, once, under the first of its names."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module._compiled_call_impl is not None:
            return
        seen.add(module)
        if all(inner._compiled_call_impl is None for inner in module.modules()):
            yield path, module
        for name, child in module.named_children():
            yield from walk(child, f"{path}.{name}" if path else name)

    return walk(module, path)


def _hook(module: nn.Module, path: str, name: Namer, stack: ExitStack) -> None:
    entered: list[
        AbstractContextManager[Any]
    ] = []  # a stack: a module may be called from within itself

    def enter(module: nn.Module, inputs: Any) -> None:
        entered.append(name(path))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
