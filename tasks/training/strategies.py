"""The strategies by which the ranks of a cell share one training step: the axis `parallel`.

Each rank has built the model with the cell's seed, and trains on its own rows of the global batch.
A strategy may change the model in place, such as its parameters into shards, makes the optimizers,
and says what to call in the forward pass. Our own strategies are those of `model/parallel`; torch's
communicate within the backward pass and the optimizer's step, so that they have no phases of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from model.parallel.collectives import Collectives
from model.parallel.data_parallel import (
    Bucketed,
    Flat,
    GradientAveraging,
    Naive,
    Overlap,
    broadcast_model,
    trained_parameters,
)
from model.parallel.zero1 import Zero1
from tasks.harness.device import Skip
from tasks.harness.model_parts import blocks_of
from tasks.harness.precision import dtype_name
from tasks.spec.axes import Values
from tasks.training.optimizers import make_optimizer, make_optimizers
from tasks.training.parameters import TrainStepParams

_MIB = 2**20
# Torch 2.13 renamed it.
_NAMES = signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


class Strategy:
    """The strategy of a single rank, which communicates with no other.

    module: what to call in the forward pass: the model, or torch's wrapper of it.
    optimizers: whose `step()` makes the update.
    is_separable: True if whole steps can run without communication.
    """

    is_separable = False

    def __init__(self, module: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        self.module = module
        self.optimizers = optimizers

    @property
    def local_optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that hold the state of this rank."""
        return self.optimizers

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def without_communication(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay those of this rank's rows.

        All micro-batches but the last run in it, so that a step communicates once.
        """
        return nullcontext()

    def without_transfers(self) -> AbstractContextManager[None]:
        """Return a context in which a step does what it does, but sends nothing to other ranks."""
        return self.without_communication()

    def communicate(self) -> None:
        """Run the phase `communication`, between the backward pass and the optimizer."""

    def gather(self) -> None:
        """Run the phase `gather`, after the optimizer."""

    def read_facts(self) -> Values:
        """Return what the strategy does, as read back; ddp decides some of it in its second step."""
        return {}


def make_strategy(params: TrainStepParams, model: nn.Module) -> Strategy:
    """Return the strategy of a cell. Raise Skip if the model lacks what it needs.

    All ranks must call it, and torch.distributed must have its default group.
    """
    if params.ranks == 1:
        return Strategy(model, make_optimizers(params, model))
    of_torch = {"ddp": _Ddp, "zero1_torch": _Zero1Torch, "fsdp2": _Fsdp2}
    kinds: dict[str, Callable[[TrainStepParams, nn.Module], Strategy]] = {
        **of_torch,
        "zero1": _Zero1,
    }
    return kinds.get(params.parallel, _Averaging)(params, model)


def checksums(model: nn.Module) -> tuple[float, float]:
    """Return the sum and the sum of squares of all parameters, in fp64.

    They are equal to the bit on ranks whose parameters are. Parameters that are sharded are
    gathered, so that all ranks must call it.
    """
    total = squares = 0.0
    for parameter in model.parameters():
        values = _whole(parameter.detach())
        if values.is_complex():
            values = torch.view_as_real(values)
        elif not values.is_floating_point():
            values = values.double()
        total += float(values.sum(dtype=torch.float64))
        squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    return total, squares


def require_equal_ranks(model: nn.Module) -> None:
    """Raise RuntimeError if the parameters of ranks differ, in any bit. All ranks must call it."""
    own = checksums(model)
    device = next(model.parameters()).device
    # Compared as integers: a NaN differs from itself.
    bits = torch.tensor(own, dtype=torch.float64, device=device).view(torch.int64)
    all_bits = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(all_bits, bits)
    if any(not torch.equal(one, bits) for one in all_bits):
        found = [tuple(one.view(torch.float64).tolist()) for one in all_bits]
        raise RuntimeError(
            "the ranks have different parameters after their steps. Their sums, and sums of "
            f"squares, by rank: {', '.join(map(str, found))}"
        )


def local_tensors(model: nn.Module) -> tuple[Tensor, ...]:
    """Return parameters and buffers as this rank stores them, of sharded ones its shards."""
    found = (*model.parameters(), *model.buffers())
    return tuple(getattr(one, "_local_tensor", one) for one in found)


def _whole(values: Tensor) -> Tensor:
    gather: Callable[[], Tensor] | None = getattr(values, "full_tensor", None)
    return values if gather is None else gather()


def _require_one_dtype(trained: Iterable[nn.Parameter], params: TrainStepParams) -> None:
    names = sorted({dtype_name(parameter.dtype) for parameter in trained})
    if len(names) > 1:
        raise Skip(
            f"parallel: {params.parallel} needs trained parameters of one dtype, and this model has "
            f"{', '.join(names)}"
        )


def _wire(params: TrainStepParams) -> torch.dtype | None:
    return torch.bfloat16 if params.wire == "bf16" else None


class _Averaging(Strategy):
    """Our own ways to average gradients."""

    is_separable = True

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        broadcast_model(model)
        ways: dict[str, Callable[[nn.Module, Collectives], GradientAveraging]] = {
            "naive": Naive,
            "flat": Flat,
            "overlap": Overlap,
            "bucketed": partial(Bucketed, bucket_bytes=params.bucket_mb * _MIB),
        }
        self.collectives = Collectives(_wire(params))
        self._way = ways[params.parallel](model, self.collectives)
        super().__init__(model, make_optimizers(params, model))

    def without_communication(self) -> AbstractContextManager[None]:
        return self.collectives.switched_off()

    def without_transfers(self) -> AbstractContextManager[None]:
        return self.collectives.without_transfers()

    def communicate(self) -> None:
        self._way.communicate()

    def read_facts(self) -> Values:
        if isinstance(self._way, Bucketed):
            return {"bucket_bytes": list(self._way.bucket_bytes)}
        return {}


class _Zero1(Strategy):
    """Our own ZeRO stage 1."""

    is_separable = True

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        broadcast_model(model)
        self.collectives = Collectives(_wire(params))
        self._zero = Zero1(model, self.collectives, partial(make_optimizer, params))
        super().__init__(model, (self._zero.optimizer,))

    def zero_grad(self) -> None:
        self._zero.zero_grad()

    def without_communication(self) -> AbstractContextManager[None]:
        return self.collectives.switched_off()

    def without_transfers(self) -> AbstractContextManager[None]:
        return self.collectives.without_transfers()

    def communicate(self) -> None:
        self._zero.communicate()

    def gather(self) -> None:
        self._zero.gather()


class _TransparentDdp(DistributedDataParallel):
    """DDP with the attributes of the model in it, which a loss may read."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Ddp(Strategy):
    """Torch's DistributedDataParallel, which averages buckets of gradients in the backward pass."""

    is_separable = True

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        # All ranks compute the same buffers. Torch would broadcast them in each step.
        options: Any = {_SYNC_BUFFERS: False}
        is_default = params.bucket_mb == TrainStepParams.model_fields["bucket_mb"].default
        self._ddp = _TransparentDdp(
            model,
            # A given size makes all buckets equal. Without one, the first has only 1 MiB.
            bucket_cap_mb=None if is_default else params.bucket_mb,
            gradient_as_bucket_view=params.bucket_view,
            **options,
        )
        if _wire(params) is not None:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            # Within a function, because torch refuses its own hook for gloo, which can do it.
            self._ddp.register_comm_hook(
                None, lambda state, bucket: bf16_compress_hook(state, bucket)
            )
        super().__init__(self._ddp, self._make_optimizers(params, model))

    def _make_optimizers(self, params: TrainStepParams, model: nn.Module) -> tuple[Optimizer, ...]:
        return make_optimizers(params, model)

    def without_communication(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def read_facts(self) -> Values:
        logged = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        # Its first step has one bucket: it makes others in the order in which gradients came.
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        return {"bucket_bytes": [int(size) for size in str(sizes).split(",") if size.strip()]}


class _Zero1Torch(_Ddp):
    """DDP with torch's ZeroRedundancyOptimizer, in which each rank updates some whole parameters."""

    is_separable = False  # the optimizer broadcasts in any case

    def _make_optimizers(self, params: TrainStepParams, model: nn.Module) -> tuple[Optimizer, ...]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        trained = trained_parameters(model)
        _require_one_dtype(trained, params)
        make: Any = partial(make_optimizer, params)
        self._zero = ZeroRedundancyOptimizer(trained, optimizer_class=make)
        return (self._zero,)

    @property
    def local_optimizers(self) -> tuple[Optimizer, ...]:
        return (self._zero.optim,)


class _Fsdp2(Strategy):
    """Torch's `fully_shard` of each block, and of the model for all other parameters.

    In bf16, parameters are gathered in bf16 and gradients are reduced in fp32, without autocast.
    A rank sends (n-1)/n of the bytes of all gathered parameters and of all gradients, and those of
    the blocks' parameters once more with `reshard`.
    """

    def __init__(self, params: TrainStepParams, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        blocks = blocks_of(model)
        if blocks is None:
            raise Skip(
                "parallel: fsdp2 needs blocks in a torch.nn.ModuleList, and this model has none"
            )
        _require_one_dtype(trained_parameters(model), params)
        mesh = init_device_mesh(params.device, (params.ranks,))
        is_mixed = params.precision == "bf16"
        self._param_dtype = torch.bfloat16 if is_mixed else None
        reduce_dtype = _wire(params) or (torch.float32 if is_mixed else None)
        policy = MixedPrecisionPolicy(self._param_dtype, reduce_dtype)
        for block in blocks.members:
            fully_shard(block, mesh=mesh, reshard_after_forward=params.reshard, mp_policy=policy)
        # The loss is computed in fp32, as with autocast. In chunks, it begins with the head.
        output_dtype = torch.float32 if is_mixed and params.loss != "chunked" else None
        policy = MixedPrecisionPolicy(self._param_dtype, reduce_dtype, output_dtype)
        # Its own parameters stay, as torch recommends: the backward pass begins with the head, and
        # a loss in chunks reads the head after the model's forward pass.
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        assert isinstance(model, FSDPModule)
        self._sharded = model
        super().__init__(model, make_optimizers(params, model))

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def without_communication(self) -> AbstractContextManager[None]:
        return self._without_reduction()

    def read_facts(self) -> Values:
        return {"fsdp_param_dtype": dtype_name(self._param_dtype) if self._param_dtype else None}
