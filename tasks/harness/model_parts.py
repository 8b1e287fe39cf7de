"""Name the running parts of a model: its modules, and functions decorated with `part`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model: the children of one container."""

    path: str  # of the container
    members: tuple[nn.Module, ...]

    def describe(self) -> str:
        """Return the container, the number of blocks and their class: `layers: 12 Block`."""
        kinds = sorted({type(member).__name__ for member in self.members})
        return f"{self.path or 'model'}: {len(self.members)} {' or '.join(kinds)}"


def blocks_of(model: nn.Module) -> Blocks | None:
    """Return the blocks that hold most of the model's parameters, or None if there are none.

    A block is a child of a ModuleList, or of a ModuleDict or Sequential with children of one class.
    Blocks that are more than one of torch's layers come first, and embeddings do not count: tables
    of values for each token may be larger than all blocks.
    """
    found = itertools.starmap(_blocks, model.named_modules())
    return max(filter(None, found), key=_weight, default=None)


def first_block(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the path and the module of the model's first block, or None without blocks."""
    blocks = blocks_of(model)
    if blocks is None:
        return None
    name = next(iter(dict(model.get_submodule(blocks.path).named_children())))
    return f"{blocks.path}.{name}".lstrip("."), blocks.members[0]


def _blocks(path: str, container: nn.Module) -> Blocks | None:
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return None
    members = tuple(container.children())
    is_uniform = len(set(map(type, members))) == 1
    # Lists of lists are not called, and a dictionary of different modules is a whole model.
    has_lists = any(isinstance(member, nn.ModuleList | nn.ModuleDict) for member in members)
    if has_lists or not members or not (is_uniform or isinstance(container, nn.ModuleList)):
        return None
    return Blocks(path, members)


def _weight(blocks: Blocks) -> tuple[bool, int]:
    """Return the sort key of blocks: the greatest are those of the model."""
    is_composite = False
    sizes: dict[int, int] = {}
    for member in blocks.members:
        is_layer = type(member).__module__.startswith("torch.nn.")
        is_composite |= bool(list(member.children())) or not is_layer
        for module in member.modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                sizes |= {id(one): one.numel() for one in module.parameters(recurse=False)}
    return is_composite, sum(sizes.values())


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
    entered: list[AbstractContextManager[object]] = []

    def enter(module: nn.Module, inputs: object) -> None:
        entered.append(name(path))
        entered[-1].__enter__()

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        entered.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    # always_call: the name must be left also if the module raises.
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
