"""Emulates the other ranks of a cell in one process without data: nothing is sent.

The strategies' own code, and that of torch's DistributedDataParallel, ZeroRedundancyOptimizer and
FSDP2, run unchanged in a group that completes each collective immediately. Checks that read values from
other ranks, such as the shapes of parameters, are left out.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.prediction.operations.shapes import Arguments, Keywords, Operation
from tasks.prediction.tracking import BUFFERS, StorageTracker
from tasks.training.parameters import TrainStepParams

_BACKEND = "emulated"
_META = "meta"


@contextmanager
def ranks_emulated(params: TrainStepParams, rank: int, tracker: StorageTracker) -> Iterator[None]:
    """Make this process one rank of the cell, as far as torch can tell.

    Storages that are made on another CUDA stream are recorded with its number.
    """
    if not hasattr(dist.Backend, _BACKEND.upper()):
        devices = [_META, "cpu", "cuda"]
        make_group: Any = _EmulatedGroup
        dist.Backend.register_backend(
            _BACKEND, lambda store, rank, ranks, timeout: make_group(rank, ranks), devices=devices
        )
    store = c10d.HashStore()
    with ExitStack() as stack:
        # Torch makes it write the rank before each line, once more for each group.
        stack.enter_context(patch("sys.excepthook", sys.excepthook))
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=params.ranks)
        stack.callback(dist.destroy_process_group)
        group = dist.group.WORLD
        assert isinstance(group, _EmulatedGroup)
        group.tracker = tracker
        group.is_waited_for = params.parallel not in ("ddp", "zero1_torch")
        for name, replacement in _replacements(params, tracker).items():
            stack.enter_context(patch(name, replacement, create=True))
        yield


def _replacements(params: TrainStepParams, tracker: StorageTracker) -> dict[str, object]:
    """Return what takes the place of functions of torch that need a GPU or another rank."""
    if params.parallel == "fsdp2":
        # Imported only here, because it takes a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        tracker.sharded = DTensor
        group = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
        return {
            "torch.meta": _Streams(tracker.on_stream, params.ranks),
            "torch.distributed.device_mesh.init_device_mesh": (
                lambda device, shape: init_device_mesh(_META, shape)
            ),
            f"{group}._validate_no_meta_params": lambda group: None,
        }
    rebuild = c10d.Reducer._rebuild_buckets

    def rebuild_buckets(reducer: c10d.Reducer) -> bool:
        with _OwnOrder():  # type: ignore[no-untyped-call]
            return rebuild(reducer)

    ddp = "torch.nn.parallel.distributed"
    return {
        "torch._C._distributed_c10d.Reducer._rebuild_buckets": rebuild_buckets,
        f"{ddp}._verify_param_shape_across_processes": lambda *args, **kwargs: None,
    }


def fullest_rank(sizes: Sequence[int], ranks: int) -> int:
    """Return the rank that ZeroRedundancyOptimizer gives the most elements of parameters.

    sizes: numbers of elements. It gives the largest parameter that is left to the rank with the
    fewest elements (ZeroRedundancyOptimizer._partition_parameters).
    """
    shares = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        held, rank = heapq.heappop(shares)
        heapq.heappush(shares, (held + size, rank))
    return max(shares)[1]


class _EmulatedGroup(dist.ProcessGroup):
    """A group that completes each collective immediately and changes no tensor.

    Torch's `fake` group has no results for the futures of its work, which DDP reads.

    tracker: records the tensors as communication buffers. is_waited_for: False if nobody waits for
        the work of a collective.
    """

    tracker: StorageTracker
    is_waited_for = True

    def getBackendName(self) -> str:  # noqa: N802  torch calls it by this name
        return _BACKEND

    @property
    def pg_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def allreduce(self, *args: Any, **options: Any) -> Any:
        self.tracker.label_unlabelled(args[0], BUFFERS)
        if not self.is_waited_for:
            self.tracker.trace.sent.update(self.tracker.indices_of(args[0]))
        return _completed(args[0])

    def broadcast(self, *args: Any, **options: Any) -> Any:
        return _completed(args[0])

    allgather = broadcast

    def _allgather_base(self, *args: Any, **options: Any) -> Any:
        self.tracker.label_unlabelled(args[:1], BUFFERS)
        return _completed(args[:1])

    def _reduce_scatter_base(self, *args: Any, **options: Any) -> Any:
        self.tracker.label_unlabelled(args[1:2], BUFFERS)
        return _completed(args[:1])

    # Torch 2.13 renamed both.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def barrier(self, *args: Any, **options: Any) -> Any:
        return _completed([])


def _completed(result: object) -> object:
    future: Any = torch.futures.Future()
    future.set_result(list(result) if isinstance(result, tuple) else result)
    work: object = getattr(c10d, "_create_work_from_future")(future)  # noqa: B009  it is untyped
    return work


class _OwnOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which values that are sent to all ranks and read back stay those of this rank."""

    def __torch_dispatch__(
        self,
        func: Operation,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class _PastEvent:
    """A CUDA event that has always happened."""

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    """A CUDA stream, which is only a number: no work is submitted to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _PastEvent:
        return _PastEvent()


class _Streams:
    """The functions of `torch.cuda` that FSDP2 calls.

    on_stream: returns a context in which storages are made on the stream of this number.
    """

    Event = _PastEvent

    def __init__(
        self, on_stream: Callable[[int], AbstractContextManager[None]], ranks: int
    ) -> None:
        self._on_stream = on_stream
        self._ranks = ranks
        self._numbers = count()
        self._current = [self.Stream()]

    def Stream(self, priority: int = 0) -> _Stream:  # noqa: N802  a class in torch.cuda
        return _Stream(next(self._numbers))

    def current_stream(self, device: object = None) -> _Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            with self._on_stream(stream.number):
                yield
        finally:
            self._current.pop()

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._ranks

    def current_device(self) -> int:
        return 0
