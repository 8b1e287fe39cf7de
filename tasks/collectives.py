"""One collective of several ranks: how long it takes, and which bandwidth that is.

Sizes, factors and the names of the bandwidths are those of nccl-tests (its doc/PERFORMANCE.md). With n
ranks and a tensor of S bytes in t seconds, the algorithm bandwidth is S/t. The bus bandwidth is that
times a factor of n, which makes it comparable with the bandwidth of a link, whatever n is. Where a
switch reduces (NVLink SHARP), less is sent, and the bus bandwidth may exceed that of the link.

Before the first step and after the last one, each element of the result is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from tasks.spec.axes import MORE_WORK, Affects, axis
from tasks.spec.parameters import (
    MEASURED_STEPS,
    PositiveInt,
    RankedParams,
    TimedParams,
)
from tasks.spec.registry import Task

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.harness.workload import PhaseMarker, Workload

Collective = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"
]
# Calls a collective with `async_op`. Returns what has to be waited for, if that is True.
Call: TypeAlias = Callable[..., Any]
PHASE = "collective"
_MEGABYTE = 1e6
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes
# Calls of a step on GPUs, the number that nccl-tests times together. A single small one is faster
# than the host can note its begin and its end.
_CALLS = 20
# Element i of rank r is (i mod 13) + r, so that sums of up to 8 ranks are exact in bf16, which has
# all integers up to 256.
_PERIOD = 13


class CollectivesParams(RankedParams, TimedParams):
    """Parameters of a collective."""

    precision: Literal["fp32"] = "fp32"
    measured_steps: PositiveInt | None = axis(
        20, MEASURED_STEPS, unit="steps", affects=Affects.NONE
    )
    collective: Collective = axis(
        "all_reduce",
        "what all ranks call together: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, "
        "or send_recv with a neighbour",
    )
    size_mb: Annotated[float, Field(gt=0)] = axis(
        100.0,
        "size in 10⁶ bytes, as nccl-tests counts it: of the tensor, of the whole output of "
        "all_gather, of the whole input of reduce_scatter and all_to_all",
        unit="MB",
        **MORE_WORK,
    )
    dtype: Literal["fp32", "fp16", "bf16"] = axis(
        "fp32", "dtype of the elements: fp32, fp16 or bf16"
    )
    call: Literal["sync", "async"] = axis(
        "sync",
        f"a step on GPUs is {_CALLS} calls, on the CPU one: sync, one after another, or async, all begun "
        "and then waited for",
    )

    @model_validator(mode="after")
    def _require_ranks(self) -> Self:
        count = "processes" if self.device == "cpu" else "gpus"
        if self.ranks < 2:
            raise ValueError(f"a collective needs several ranks. Set {count} to 2 or more")
        if self.collective == "send_recv" and self.ranks % 2:
            raise ValueError(f"send_recv needs pairs of ranks. Set {count} to an even number")
        return self

    @property
    def calls(self) -> int:
        """Calls of a step."""
        return _CALLS if self.device == "cuda" else 1

    @property
    def part(self) -> int:
        """Elements of the tensor of S bytes, divided by the ranks."""
        return max(1, int(self.size_mb * _MEGABYTE) // _WIDTHS[self.dtype] // self.ranks)

    @property
    def size_bytes(self) -> int:
        """S of nccl-tests, in bytes."""
        return self.part * self.ranks * _WIDTHS[self.dtype]

    @property
    def bus_factor(self) -> float:
        """The bus bandwidth over the algorithm bandwidth."""
        share = (self.ranks - 1) / self.ranks
        return {"all_reduce": 2 * share, "broadcast": 1.0, "send_recv": 1.0}.get(
            self.collective, share
        )


@dataclass(frozen=True)
class Buffers:
    """The tensors of a collective on one rank, and the call. wanted: what `result` becomes."""

    call: Call
    source: Tensor
    filled: Tensor
    result: Tensor
    wanted: Tensor

    def check(self) -> None:
        """Call the collective on its first inputs. Raise RuntimeError if an element is wrong."""
        self.source.copy_(self.filled)
        self.call(async_op=False)
        if wrong := (self.result != self.wanted).nonzero().flatten().tolist():
            raise RuntimeError(
                f"{len(wrong)} of {self.result.numel()} elements are wrong, the first one is "
                f"number {wrong[0]}: {self.result[wrong[0]]} instead of {self.wanted[wrong[0]]}"
            )


def build(params: CollectivesParams) -> Workload:
    """Allocate the tensors of this rank, and check the result of a first call.

    Raise RuntimeError if it is wrong.
    """
    from tasks.harness.setup import set_up
    from tasks.harness.workload import Workload

    device = set_up(params)
    buffers, is_async = make_buffers(params), params.call == "async"

    def step(phase: PhaseMarker) -> None:
        with phase(PHASE):
            pending = [buffers.call(async_op=is_async) for _ in range(params.calls)]
            if is_async:
                for work in pending:
                    work.wait()

    buffers.check()
    size = params.size_bytes * params.calls
    facts = {
        "collective_calls": params.calls,
        "collective_bytes": size,
        "bus_bytes": round(size * params.bus_factor),
    }
    return Workload(step, (PHASE,), device, None, facts=facts, verify=buffers.check)


def make_buffers(params: CollectivesParams) -> Buffers:
    """Return the tensors of this rank of the default group, and the call on them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import P2POp

    from model.parallel.collectives import all_gather, reduce_scatter
    from tasks.harness.precision import DTYPES

    rank, ranks, part = dist.get_rank(), params.ranks, params.part
    numbers = torch.arange(part * ranks, device=params.device).remainder_(_PERIOD)
    first, own, sums = numbers[:part], numbers[rank * part : (rank + 1) * part], sum(range(ranks))
    peer = rank ^ 1
    wanted = {
        "all_reduce": lambda: numbers * ranks + sums,
        "all_gather": lambda: torch.cat([first + other for other in range(ranks)]),
        "reduce_scatter": lambda: own * ranks + sums,
        "broadcast": lambda: numbers,
        "all_to_all": lambda: torch.cat([own + other for other in range(ranks)]),
        "send_recv": lambda: numbers + peer,
    }[params.collective]().to(DTYPES[params.dtype])
    filled = (first if params.collective == "all_gather" else numbers) + rank
    filled = filled.to(DTYPES[params.dtype])
    source = filled.clone()
    is_in_place = params.collective in ("all_reduce", "broadcast")
    result = source if is_in_place else torch.zeros_like(wanted)

    def exchange(async_op: bool) -> Any:
        swapped = [P2POp(dist.isend, source, peer), P2POp(dist.irecv, result, peer)]
        pending = _Pending(dist.batch_isend_irecv(swapped))
        return pending if async_op else pending.wait()

    calls: dict[str, Call] = {
        "all_reduce": partial(dist.all_reduce, source),
        "all_gather": partial(all_gather, result, source),
        "reduce_scatter": partial(reduce_scatter, result, source),
        "broadcast": partial(dist.broadcast, source, 0),
        "all_to_all": partial(dist.all_to_all_single, result, source),
        "send_recv": exchange,
    }
    return Buffers(calls[params.collective], source, filled, result, wanted)


@dataclass(frozen=True)
class _Pending:
    """Several operations that are waited for together."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def work(params: CollectivesParams) -> float:
    """Return the bytes that a step sends through each link."""
    return params.size_bytes * params.calls * params.bus_factor


TASK = Task("collectives", 1, CollectivesParams, build, work)
