"""Names the running parts of a model: its modules, and functions decorated with `part`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from model.parts import PART_FUNCTIONS, Namer, parts_named_by


@contextmanager
def parts_named(model: nn.Module | None, name: Namer) -> Iterator[None]:
    """Run each module's forward pass and each part inside of `name(...)`.

    Compiled modules and their children get no hook, because a hook would make torch compile them again.
    Modules that contain compiled ones get none either, or they would be named for the compiled work.
    """
    with ExitStack() as stack:
        stack.enter_context(parts_named_by(name))
        for path, module in _uncompiled(model, "") if model is not None else ():
            _hook(module, path, name, stack)
        yield


def first_block(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the path and the first of the model's blocks, or None without a ModuleList."""
    return next(((f"{path}.0".lstrip("."), blocks[0]) for path, blocks in _lists(model)), None)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: the children of its first ModuleList."""
    return next((list(blocks) for _, blocks in _lists(model)), [])


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            yield path, module


def part_functions() -> Mapping[str, str]:
    """Return the parts' names by the names of their functions, as a Python stack shows them."""
    return PART_FUNCTIONS


def _uncompiled(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that runs in Python once, under the first of its paths."""
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
    # A stack, because a module may call itself.
    entered: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        entered.append(name(path))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
