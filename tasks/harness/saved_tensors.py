"""Tensors that the forward pass saves for the backward pass, by module and operation.

Each storage counts once. The module is known when a tensor is saved. The operation is known only
when the backward pass reads the tensor again: it is the node of the graph that runs at that moment.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from tasks.harness.model_parts import first_block, parts_named
from tasks.harness.workload import Workload
from tasks.spec.metrics import metric_named
from tasks.spec.tables import Sample

_disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks
LARGEST = 5  # operations with a sample each


@dataclass(slots=True, weakref_slot=True, eq=False)
class Saved:
    """A saved storage. place: its module or part. operation: its node, once known.

    It lives as long as a part of the graph holds the storage.
    """

    nbytes: int
    is_square: bool
    in_block: bool
    place: str
    operation: str = ""


@dataclass(slots=True)
class _Packed:
    """The object that autograd stores instead of a tensor."""

    tensor: Tensor  # detached: a saved result that refers to its own node would never be freed
    entry: Saved | None
    is_first: bool  # of those that saved the storage


class SavedTensors:
    """Counter of tensors that are saved while `watching`, without `Workload.resident`.

    Sizes of a block are those of the model's first block; without blocks, of the whole model.
    Of a step with several micro-batches, the first one counts.
    """

    def __init__(self, workload: Workload) -> None:
        self._model = workload.model
        self._square = workload.square
        self._resident = {tensor.untyped_storage()._cdata for tensor in workload.resident}
        self._modules: set[str] = set()
        self._block_path, self._block = "", None
        if self._model is not None:
            self._modules = set(dict(self._model.named_modules()))
            self._block_path, self._block = first_block(self._model) or ("", None)
        self._places: list[tuple[str, str]] = [("", "")]  # module and part, innermost last
        self._inside = int(self._block is None)
        # By the address of the storage. Parts of a graph that the forward pass drops, such as those
        # of detached results, end before the backward pass, and their addresses are used again.
        self._alive: WeakValueDictionary[int, Saved] = WeakValueDictionary()
        self._saved: list[Saved] | None = None  # when the first forward pass ended
        self._unwatched = ""
        self._residual_bytes: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count during one phase of a step; counting takes time.

        What is alive at the end of the first one counts. A forward pass may differentiate, too.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with ExitStack() as stack:
            if self._block is not None:
                watched = self._block.register_forward_hook(self._see_residual)
                stack.callback(watched.remove)
            refused = patch("torch.autograd.graph.disable_saved_tensors_hooks", self._refused)
            with parts_named(self._model, self._named), hooks, refused:
                yield
        self._saved = self._found()

    def samples(self, instrument: str) -> list[Sample]:
        """Return the sizes of everything, of squares, of one block, and of its largest operations.

        The list is empty if nothing was saved.
        """
        if self._unwatched:
            note = f"not counted: {self._unwatched}"
            return [metric_named(instrument, "saved_bytes").sample(None, "steady", note=note)]
        saved = self._found()
        if not saved:
            return []
        sizes = {
            "saved_bytes": _total(saved),
            "saved_block_bytes": _total(one for one in saved if one.in_block),
        }
        if self._residual_bytes is not None:
            sizes["residual_stream_bytes"] = self._residual_bytes
        squares = [one for one in saved if one.is_square]
        if self._square is not None:
            sizes["saved_square_bytes"] = _total(squares)
        samples = []
        for name, size in sizes.items():
            samples.append(Sample(instrument, name, "bytes", size, "steady"))
        if self._square is not None:
            samples.append(Sample(instrument, "saved_squares", "tensors", len(squares), "steady"))
        for rank, (operation, nbytes) in enumerate(self.by_operation()[:LARGEST], start=1):
            largest = Sample(instrument, "saved_operation_bytes", "bytes", nbytes, "steady")
            samples.append(replace(largest, step=rank, note=operation))
        return samples

    def by_operation(self) -> list[tuple[str, int]]:
        """Return `place: node` and bytes of each operation of the block, largest first."""
        sizes: Counter[str] = Counter()
        for one in self._found():
            if one.in_block:
                place = one.place.removeprefix(self._block_path).removeprefix(".").strip()
                sizes[_name(place, one.operation)] += one.nbytes
        return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))

    def by_module(self) -> dict[str, int]:
        """Return `module: node` and bytes of each operation of the model, for all layers together."""
        sizes: Counter[str] = Counter()
        for one in self._found():
            sizes[_name(of_all_layers(one.place), one.operation)] += one.nbytes
        return dict(sizes)

    def _pack(self, tensor: Tensor) -> _Packed:
        storage = tensor.untyped_storage()
        # After the forward pass, a checkpoint runs it again.
        if storage._cdata in self._resident or self._saved is not None:
            return _Packed(tensor.data, None, False)
        entry = self._alive.get(storage._cdata)
        is_first = entry is None
        if entry is None:
            is_square = self._is_square(tensor)
            entry = Saved(storage.nbytes(), is_square, self._inside > 0, self._place())
            self._alive[storage._cdata] = entry
        return _Packed(tensor.data, entry, is_first)

    def _unpack(self, packed: _Packed) -> Tensor:
        node, entry = torch._C._current_autograd_node(), packed.entry
        if entry is not None and node is not None and (packed.is_first or not entry.operation):
            entry.operation = node.name()
        return packed.tensor

    def _found(self) -> list[Saved]:
        return list(self._alive.values()) if self._saved is None else self._saved

    @contextmanager
    def _refused(self, message: str) -> Iterator[None]:
        """Leave the hooks for code that works without them only, such as torch.func.grad."""
        self._unwatched = message
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with _disable_hooks(message):
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def _is_square(self, tensor: Tensor) -> bool:
        """Return True for a tensor over all pairs of positions."""
        # A mask has the same shape but no floating-point numbers.
        if self._square is None or not tensor.is_floating_point():
            return False
        # Heads and batch may be folded into one dimension, or one of them may be missing.
        has_pairs = tuple(tensor.shape[-2:]) == self._square[1:]
        return has_pairs and tensor.numel() == math.prod(self._square)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        module, _ = self._places[-1]
        is_block = self._block is not None and name == self._block_path
        self._places.append((name, "") if name in self._modules else (module, name))
        self._inside += is_block
        try:
            yield
        finally:
            self._inside -= is_block
            self._places.pop()

    def _place(self) -> str:
        return " ".join(filter(None, self._places[-1]))

    def _see_residual(self, module: nn.Module, inputs: object, output: object) -> None:
        # A block may return a tuple, such as its output and a cache.
        outputs = output if isinstance(output, tuple | list) else [output]
        tensors = [one for one in outputs if isinstance(one, Tensor)]
        if tensors:
            self._residual_bytes = tensors[0].nbytes


class SavedWatcher:
    """Watcher that counts in each phase of a step. It needs no memory itself.

    samples, module_bytes (see `by_module`): of the phases so far. They are complete only after the
        backward pass, which names the operations, and a task may have none.
    """

    def __init__(self, workload: Workload, instrument: str = "memory") -> None:
        self._saved, self._instrument = SavedTensors(workload), instrument
        self._watching = ExitStack()
        self.samples: list[Sample] = []
        self.module_bytes: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        self._watching.enter_context(self._saved.watching())

    def leave(self, phase: str) -> None:
        self._watching.close()
        self.samples[:] = self._saved.samples(self._instrument)
        self.module_bytes = self._saved.by_module()


def of_all_layers(path: str) -> str:
    """Return the path of a module in which `*` stands for numbers: `layers.*.ffn`."""
    return re.sub(r"(?<![^.])\d+(?=[. ]|$)", "*", path)


def _name(place: str, operation: str) -> str:
    return ": ".join(filter(None, (place, operation))) or "unknown"


def _total(saved: Iterable[Saved]) -> int:
    return sum(one.nbytes for one in saved)
