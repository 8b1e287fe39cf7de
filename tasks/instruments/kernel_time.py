"""How long the kernels of each phase take together, whatever the host does: what of a step is the same on another machine.

A step that waits for its host takes what that takes; its kernels take what the GPU does. Each phase of a few steps is watched
by torch.profiler on its own, which then sees the device alone: no operator, no trace. It comes after everything that is timed,
since a process is slower once it has profiled, and before the instrument `kernels`, which tells of one step what its kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # it is where torch's own profiler takes it from
from torch.profiler import ProfilerActivity, profile

from tasks.harness.device import Device
from tasks.harness.gc_pause import uncollected
from tasks.harness.stage import Session, Stage
from tasks.spec.order_statistics import FEWEST
from tasks.spec.tables import Sample

_STEPS = FEWEST  # of which the median has an interval
_ENOUGH_MS = 1000.0  # of kernels, after which no further step is watched: those of a long step are alike from one to the next
_NS_PER_MS = 1e6
REFUSED = "CUPTI is refused here, see the log and `sweep doctor`"
_UNSEEN = "the profiler saw no kernels"


class KernelTimer:
    """Watches a phase from when the device has nothing to do any more until it has done all of it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.phases: list[tuple[str, float]] = []

    def enter(self, phase: str) -> None:
        self._device.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def leave(self, phase: str) -> None:
        self._device.synchronize()
        self._profile.stop()
        self.phases.append((phase, kernel_ms(self._profile)))


def kernel_ms(profiled: profile) -> float:
    """The sum of what each kernel, copy and fill took."""
    results = profiled.profiler.kineto_results if profiled.profiler else None
    on_device = (
        [event for event in results.events() if event.device_type() == DeviceType.CUDA]
        if results
        else []
    )
    return sum(event.duration_ns() for event in on_device) / _NS_PER_MS


def require_kernels(work: Callable[[], object]) -> None:
    """Raises RuntimeError where the profiler sees nothing of this on the device."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        work()
    if not kernel_ms(watched):
        raise RuntimeError(_UNSEEN)


def time_kernels(session: Session) -> Iterator[Sample]:
    """Of each phase, and of the step their sum."""
    if session.workload.device.kind != "cuda":
        yield Sample("kernel_time", "kernel_time", "ms", None, note="of kernels only a GPU tells")
        return
    if session.steps == 0:
        session.step()  # what a first step does is done once
    watched_ms = 0.0
    with uncollected():
        for number in range(_STEPS):
            samples = _step(session, number)
            yield from samples
            watched_ms += samples[-1].value or 0.0
            if watched_ms > _ENOUGH_MS:
                return


def _step(session: Session, number: int) -> list[Sample]:
    timer = KernelTimer(session.workload.device)
    session.step(timer)
    whole = sum(ms for _, ms in timer.phases)
    return [
        Sample(
            "kernel_time",
            "kernel_time",
            "ms",
            ms if whole else None,
            "",
            phase,
            number,
            "" if whole else f"{_UNSEEN}: {REFUSED}",
        )
        for phase, ms in [*timer.phases, ("step", whole)]
    ]


STAGES = (Stage("kernel time", 78, time_kernels),)
