"""Predicts a cell: tracks its steps without data, replays the trace in a model of the allocator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from tasks import attention
from tasks.attention import AttentionParams
from tasks.harness.device import CpuDevice, Skip, backend_refused, message_of
from tasks.harness.saved_tensors import SavedTensors
from tasks.harness.workload import Workload, run_step
from tasks.prediction.allocator import CachingAllocator, OutOfMemory
from tasks.prediction.closed_form import attention_squares, closed_form, of_parameters
from tasks.prediction.composition import compose
from tasks.prediction.emulation import GpuFunctions, gpu_emulated
from tasks.prediction.records import (
    CLOSED_FORM,
    MARGIN,
    Prediction,
    PredictionRequest,
    Verdict,
    plainly_fits,
    unknown,
    unsupported_reason,
)
from tasks.prediction.trace import Replay, Step, Trace, highest, replay
from tasks.prediction.tracking import StorageTracker
from tasks.process.phase_file import Progress
from tasks.spec.axes import Affects, axes_without
from tasks.spec.parameters import default_values
from tasks.spec.tables import Sample
from tasks.train_step import build_on
from tasks.training.parameters import TrainStepParams

STEADY_STEPS = 5  # after these the model reserves what an H200 does after 25, within 3.5 %

Predictable = TrainStepParams | AttentionParams

_FUSED = ("sdpa", "efficient", "flash", "cudnn", "flex")


class NoData(CpuDevice):
    """The device of tensors without data. Its memory is neither watched nor limited."""

    kind = "meta"
    torch_device = torch.device("meta")


class Predictor:
    """Predicts cells one by one.

    It stores the trace of the last training step, because the trace of `forward_backward` is contained
    in it.
    """

    def __init__(self) -> None:
        self._last: tuple[TrainStepParams, int, Trace] | None = None

    def predict(self, request: PredictionRequest) -> Prediction:
        """Return a prediction, or an unknown one with the reason. Never raise."""
        params = request.cell.params
        if not isinstance(params, TrainStepParams | AttentionParams) or unsupported_reason(
            request.cell
        ):
            return unknown(unsupported_reason(request.cell))
        try:
            trace = self._trace(_as_eager(params), request.workspace_bytes)
            peaks = replay(trace, CachingAllocator(), STEADY_STEPS)
        except Skip as skip:
            return unknown(str(skip))
        except Exception as error:  # a user's model may raise anything
            first_line = (message_of(error).splitlines() or [""])[0]
            name = type(error).__name__
            reason = f"it does not run without data: {name}: {first_line}"[:200]
            if isinstance(params, AttentionParams) or backend_refused(error):
                return unknown(reason)
            return _at_least(params, reason, request.caps_bytes)
        how = "modelled" if params.attention in _FUSED else "tracked"
        verdicts = {cap: judge(trace, peaks, cap) for cap in request.caps_bytes}
        return Prediction(
            how,
            "",
            (
                *_samples(peaks, how),
                *_composition(trace, peaks),
                *trace.saved,
                *_closed_form(params),
            ),
            verdicts,
        )

    def _trace(self, params: Predictable, workspace_bytes: int) -> Trace:
        if isinstance(params, AttentionParams):
            return track(params, workspace_bytes)
        whole = params.model_copy(update={"pass_": "train_step"})
        if (
            params.pass_ == "forward_backward"
            and self._last is not None
            and self._last[:2] == (whole, workspace_bytes)
        ):
            return self._last[2].without("optimizer")
        trace = track(params, workspace_bytes)
        self._last = (params, workspace_bytes, trace)
        return trace


def _as_eager(params: Predictable) -> Predictable:
    """Return the uncompiled cell. Flex attention has the tensors of the efficient kernel."""
    ignored = axes_without(type(params), Affects.MEMORY)
    defaults = default_values(type(params))
    alike: dict[str, Any] = {name: defaults[name] for name in ignored}
    how = "efficient" if params.attention == "flex" else params.attention
    return params.model_copy(update={**alike, "attention": how})


class _Forward(ExitStack):
    """A watcher that enters a mode during the forward pass, and leaves it if that fails."""

    def __init__(self, mode: GpuFunctions) -> None:
        super().__init__()
        self._mode = mode

    def enter(self, phase: str) -> None:
        if phase == "forward":
            self.enter_context(self._mode)

    def leave(self, phase: str) -> None:
        if phase == "forward":
            self.close()


def track(params: Predictable, workspace_bytes: int = 0) -> Trace:
    """Return the trace of a cell's build and two steps, with a GPU's allocations.

    Raise what the workload raises.
    """
    tracker = StorageTracker(workspace_bytes)
    with gpu_emulated(tracker.labelling) as emulation, tracker:
        with emulation:
            workload = _build(params)
        model, optimizer = workload.model, workload.optimizer
        tracker.label(workload.resident, "inputs")
        tracker.label(model.parameters() if model is not None else (), "parameters")
        tracker.follow(workload, outside="loss" if optimizer is not None else "attention")
        saved = SavedTensors(workload)
        steps: tuple[tuple[Step, AbstractContextManager[None]], ...] = (
            ("first", nullcontext()),
            ("steady", saved.watching()),
        )
        for step, watching in steps:
            tracker.begin(step)
            with watching, _Forward(emulation) as forward:
                run_step(workload, Progress(), tracker, forward)
            tracker.label(_state_of(optimizer) if optimizer is not None else (), "optimizer state")
    tracker.trace.saved += saved.samples("prediction")
    return tracker.trace


def _build(params: Predictable) -> Workload:
    return (
        attention.build_on(NoData(), params)
        if isinstance(params, AttentionParams)
        else build_on(NoData(), params)
    )


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def judge(trace: Trace, peaks: Replay, cap_bytes: int) -> Verdict:
    """Return the verdict for a limit on reserved memory, with a margin to both sides."""
    if _survives(trace, peaks, round(cap_bytes * (1 - MARGIN))):
        return "fits"
    return "borderline" if _survives(trace, peaks, round(cap_bytes * (1 + MARGIN))) else "oom"


def _survives(trace: Trace, peaks: Replay, cap_bytes: int) -> bool:
    """Return True if the allocator fits under the limit.

    Near a limit it releases free segments first, so that less may suffice than it would reserve.
    """
    reserved, requested = (
        max(found.reserved for found in peaks.values()),
        max(found.requested for found in peaks.values()),
    )
    if (plain := plainly_fits(reserved, requested, cap_bytes)) is not None:
        return plain
    try:
        replay(trace, CachingAllocator(cap_bytes), STEADY_STEPS)
    except OutOfMemory:
        return False
    return True


def _samples(peaks: Replay, how: str) -> Iterator[Sample]:
    for (step, phase), found in peaks.items():
        sizes = {
            f"peak_{kind}_bytes": getattr(found, kind)
            for kind in ("allocated", "requested", "reserved")
        }
        sizes["held_allocated_bytes"] = found.held_allocated
        for metric, nbytes in sizes.items():
            yield Sample("prediction", metric, "bytes", nbytes, step, phase, note=how)


def _composition(trace: Trace, peaks: Replay) -> Iterator[Sample]:
    """Yield the bytes at the peak of the steady step by role."""
    phase, peak = highest(peaks, "steady")
    for role, nbytes in compose(trace, phase, peak).items():
        yield Sample("prediction", "at_peak_bytes", "bytes", nbytes, "steady", phase, note=role)


def _closed_form(params: Predictable) -> Iterator[Sample]:
    """Yield the terms of the closed form, for cells that have one."""
    if isinstance(params, AttentionParams):
        yield from attention_squares(params)
        return
    found = closed_form(params)
    if found is not None and found.moments:
        yield from found.samples()


def _at_least(params: TrainStepParams, reason: str, caps_bytes: Iterable[int]) -> Prediction:
    """Return a lower bound from the parameters of a model that does not run without data."""
    with suppress(Exception), gpu_emulated(lambda role: nullcontext()) as emulation, emulation:
        model = build_on(NoData(), params).model
        sizes = (
            [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
            if model
            else []
        )
        if sizes:
            found = of_parameters(
                params,
                sum(count for count, _ in sizes),
                sum(count for count, learns in sizes if learns),
            )
            verdicts: dict[int, Verdict] = {cap: "oom" for cap in caps_bytes if found.nbytes > cap}
            return Prediction(
                CLOSED_FORM, reason, (*unknown(reason).samples, *found.samples()), verdicts
            )
    return unknown(reason)
