"""Name the running parts of a model: its modules, and functions decorated with `part`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from model.parts import PART_FUNCTIONS, Namer, parts_named_by


@contextmanager
def parts_named(model: nn.Module | None, name: Namer) -> Iterator[None]:
    """Run each module's forward pass and each part function inside of `name(...)`."""
    with ExitStack() as stack:
        stack.enter_context(parts_named_by(name))
        if model is not None:
            for path, module in _uncompiled(model, "", set()):
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


def _uncompiled(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that runs in Python once, under the first of its paths."""
    # A hook on a compiled module or on one within it would make torch compile it again, and ranges
    # within compiled code are dropped.
    if module in seen or module._compiled_call_impl is not None:
        return
    seen.add(module)
    # A module around compiled ones would give its name to the compiled work.
    if all(inner._compiled_call_impl is None for inner in module.modules()):
        yield path, module
    for name, child in module.named_children():
        yield from _uncompiled(child, f"{path}.{name}".removeprefix("."), seen)


def _hook(module: nn.Module, path: str, name: Namer, stack: ExitStack) -> None:
    # A list, because a module may call itself.
    entered: list[AbstractContextManager[Any]] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        entered.append(name(path))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    # always_call: the name must be left also if the module raises.
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
