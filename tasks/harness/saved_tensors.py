"""Tensors that the forward pass saves for the backward pass, by module and operation.

Each storage counts once. The module is known when a tensor is saved. The operation is known only
when the backward pass reads the tensor again: it is the node of the graph that runs at that moment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tasks.harness.model_parts import first_block, parts_named
from tasks.harness.workload import Workload
from tasks.spec.tables import Sample

LARGEST = 5  # operations with a sample each


@dataclass(slots=True)
class Saved:
    """A saved storage. place: module or part in its block. operation: its node, once known."""

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
        # By the address of the storage. Autograd holds the storages, so no address is reused.
        self._saved: dict[int, Saved] = {}
        self._is_complete = False
        self._residual_bytes: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count during one step. Nothing else may be measured in it: counting takes time."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with ExitStack() as stack:
            if self._block is not None:
                watched = self._block.register_forward_hook(self._see_residual)
                stack.callback(watched.remove)
            with parts_named(self._model, self._named), hooks:
                yield

    def samples(self, instrument: str) -> list[Sample]:
        """Return the sizes of everything, of squares, of one block, and of its largest operations.

        The list is empty if nothing was saved.
        """
        saved = list(self._saved.values())
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
        for one in self._saved.values():
            if one.in_block:
                name = ": ".join(filter(None, (one.place, one.operation))) or "unknown"
                sizes[name] += one.nbytes
        return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))

    def _pack(self, tensor: Tensor) -> _Packed:
        storage = tensor.untyped_storage()
        # Within the backward pass: a checkpoint runs its forward pass again.
        is_recomputed = torch._C._current_autograd_node() is not None
        is_counted = storage._cdata in self._resident or storage._cdata in self._saved
        entry = None
        if not (is_recomputed or is_counted or self._is_complete):
            is_square = self._is_square(tensor)
            entry = Saved(storage.nbytes(), is_square, self._inside > 0, self._place())
            self._saved[storage._cdata] = entry
        return _Packed(tensor.data, entry)

    def _unpack(self, packed: _Packed) -> Tensor:
        node = torch._C._current_autograd_node()
        self._is_complete |= node is not None  # the backward pass of the first micro-batch
        if packed.entry is not None and node is not None:
            packed.entry.operation = node.name()
        return packed.tensor

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
        module, part = self._places[-1]
        within = module.removeprefix(self._block_path).removeprefix(".")
        return " ".join(filter(None, (within, part)))

    def _see_residual(self, module: nn.Module, inputs: object, output: object) -> None:
        # A block may return a tuple, such as its output and a cache.
        outputs = output if isinstance(output, tuple | list) else [output]
        tensors = [one for one in outputs if isinstance(one, Tensor)]
        if tensors:
            self._residual_bytes = tensors[0].nbytes


def _total(saved: Iterable[Saved]) -> int:
    return sum(one.nbytes for one in saved)
