"""What the forward pass saves for the backward pass: each storage once, and which operation of the model saves it.

Where a tensor is saved tells its place in the model. Which operation saved it is known when the backward pass asks for it
back: it is the node of the graph that runs at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tasks.harness.model_parts import first_block, parts_named
from tasks.harness.workload import Workload
from tasks.spec.tables import Sample

LARGEST = 5  # operations that are told apart


@dataclass(slots=True)
class Saved:
    """A storage. place: the module or part that saved it, within the block. operation: its node's name, if it was asked for."""

    nbytes: int
    is_square: bool
    in_block: bool
    place: str
    operation: str = ""


@dataclass(slots=True)
class _Kept:
    """What autograd keeps in place of a tensor: its data alone, or a result that is saved would keep itself alive."""

    tensor: Tensor
    entry: Saved | None


class SavedTensors:
    """Counts what is saved beyond what is there anyway (`Workload.resident`), while `watching`.

    The block is the first of the model's; all that is saved counts as one where it has none.
    """

    def __init__(self, workload: Workload) -> None:
        self._model = workload.model
        self._square = workload.square
        self._resident = {tensor.untyped_storage()._cdata for tensor in workload.resident}
        self._block = first_block(self._model) if self._model is not None else None
        self._modules = (
            {path for path, _ in self._model.named_modules()} if self._model is not None else set()
        )
        self._places: list[tuple[str, str]] = [("", "")]  # module and part, innermost last
        self._inside = int(self._block is None)
        self._saved: dict[
            int, Saved
        ] = {}  # by the identity of the storage, which what is kept keeps alive
        self._residual_bytes: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One step, in which nothing else may be measured: to keep count takes time."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, self._give_back)
        watched = (
            self._block[1].register_forward_hook(self._see_residual)
            if self._block is not None
            else None
        )
        try:
            with parts_named(self._model, self._named), hooks:
                yield
        finally:
            if watched is not None:
                watched.remove()

    def samples(self, instrument: str) -> list[Sample]:
        """In bytes: of all, of the squares, of one block and by operation, the largest first. None where nothing is saved."""
        saved = list(self._saved.values())
        if not saved:
            return []
        sizes = {
            "saved_bytes": _total(saved),
            "saved_block_bytes": _total(one for one in saved if one.in_block),
        }
        if self._residual_bytes is not None:
            sizes["residual_stream_bytes"] = self._residual_bytes
        samples = [
            Sample(instrument, metric, "bytes", nbytes, "steady")
            for metric, nbytes in sizes.items()
        ]
        if self._square is not None:
            squares = [one for one in saved if one.is_square]
            samples.append(
                Sample(instrument, "saved_square_bytes", "bytes", _total(squares), "steady")
            )
            samples.append(Sample(instrument, "saved_squares", "tensors", len(squares), "steady"))
        for rank, (operation, nbytes) in enumerate(self.by_operation()[:LARGEST], start=1):
            samples.append(
                Sample(
                    instrument,
                    "saved_operation_bytes",
                    "bytes",
                    nbytes,
                    "steady",
                    step=rank,
                    note=operation,
                )
            )
        return samples

    def by_operation(self) -> list[tuple[str, int]]:
        """Of the block: `place: node` and bytes, largest first."""
        sizes: dict[str, int] = {}
        for one in self._saved.values():
            if one.in_block:
                name = ": ".join(filter(None, (one.place, one.operation))) or "unknown"
                sizes[name] = sizes.get(name, 0) + one.nbytes
        return sorted(sizes.items(), key=lambda item: (-item[1], item[0]))

    def _keep(self, tensor: Tensor) -> _Kept:
        storage = tensor.untyped_storage()
        again = (
            torch._C._current_autograd_node() is not None
        )  # in the backward pass: of a checkpoint that is re-entered
        known = again or storage._cdata in self._resident or storage._cdata in self._saved
        entry = (
            None
            if known
            else Saved(storage.nbytes(), self._is_square(tensor), self._inside > 0, self._place())
        )
        if entry is not None:
            self._saved[storage._cdata] = entry
        return _Kept(tensor.data, entry)

    def _give_back(self, kept: _Kept) -> Tensor:
        node = torch._C._current_autograd_node()
        if kept.entry is not None and node is not None:
            kept.entry.operation = node.name()
        return kept.tensor

    def _is_square(self, tensor: Tensor) -> bool:
        """Heads and batch may have been folded into one dimension, or one of them be missing."""
        if (
            self._square is None or not tensor.is_floating_point()
        ):  # a mask has one byte where these have numbers
            return False
        return tuple(tensor.shape[-2:]) == self._square[1:] and tensor.numel() == math.prod(
            self._square
        )

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        module, _ = self._places[-1]
        is_block = self._block is not None and name == self._block[0]
        self._places.append((name, "") if name in self._modules else (module, name))
        self._inside += is_block
        try:
            yield
        finally:
            self._inside -= is_block
            self._places.pop()

    def _place(self) -> str:
        module, part = self._places[-1]
        prefix = self._block[0] if self._block is not None else ""
        within = module.removeprefix(prefix).removeprefix(".")
        return " ".join(filter(None, (within, part)))

    def _see_residual(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = (
            next((one for one in output if isinstance(one, Tensor)), None)
            if isinstance(output, tuple | list)
            else output
        )
        if isinstance(first, Tensor):
            self._residual_bytes = first.nbytes


def _total(saved: Iterable[Saved]) -> int:
    return sum(one.nbytes for one in saved)
