"""Measure the total kernel time of each phase, which does not depend on the CPU.

The time of a CPU-bound step depends on the CPU, but the time of its kernels depends on the GPU
only: on 17 machines with an H200 it agreed within 1.8 %. torch.profiler watches each phase of a
few steps, and only the device: it records no operators and writes no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tasks.harness.device import Device
from tasks.harness.stage import Session, Stage
from tasks.process.gc_pause import uncollected
from tasks.spec.order_statistics import FEWEST
from tasks.spec.tables import Sample

# The smallest number of samples with a 95 % interval of their median.
_STEPS = FEWEST
# No further step is profiled after this kernel time: long steps hardly differ from one another.
_ENOUGH_MS = 1000.0
_NS_PER_MS = 1e6
REFUSED = "CUPTI is refused here, see the log and `sweep doctor`"
_UNSEEN = "the profiler saw no kernels"


class KernelTimer:
    """Watcher that profiles each phase from an idle device until the device is idle again.

    phases: ms by phase, summed over the micro-batches of the step.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.phases: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        self._device.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def leave(self, phase: str) -> None:
        self._device.synchronize()
        self._profile.stop()
        self.phases[phase] = self.phases.get(phase, 0.0) + kernel_ms(self._profile)


def kernel_ms(profiled: profile) -> float:
    """Return the sum of the durations of all kernels, copies and fills."""
    total_ns: int = sum(event.duration_ns() for event in device_events(profiled))
    return total_ns / _NS_PER_MS


def device_events(profiled: profile) -> Iterator[Any]:
    """Yield Kineto's event of each kernel, copy and fill."""
    # Kineto's own results: `profile.events()` takes 1 s to build its tree of 24,000 events.
    if profiled.profiler is None or profiled.profiler.kineto_results is None:
        return
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            yield event


def require_kernels(work: Callable[[], object]) -> None:
    """Raise RuntimeError if the profiler sees no kernel of this work."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        work()
    if not kernel_ms(watched):
        raise RuntimeError(_UNSEEN)


def time_kernels(session: Session) -> Iterator[Sample]:
    """Yield the kernel time of each phase of a few steps; the value of the step is their sum."""
    if session.workload.device.kind != "cuda":
        yield Sample("kernel_time", "kernel_time", "ms", None, note="only a GPU has kernel times")
        return
    if session.steps == 0:
        session.step()  # the first step does work that no later one repeats
    taken: list[Sample] = []
    watched_ms = 0.0
    with uncollected():
        for number in range(_STEPS):
            samples = _step(session, number)
            taken += samples
            yield from samples
            watched_ms += samples[-1].value or 0.0
            if session.agree(watched_ms) > _ENOUGH_MS:
                break
    busy = {sample.phase for sample in taken if sample.value != 0}
    if idle := sorted({sample.phase for sample in taken} - busy):
        raise RuntimeError(
            f"the GPU ran nothing in phase {', '.join(idle)}. Check whether the model computes on "
            "the CPU."
        )


def _step(session: Session, number: int) -> list[Sample]:
    timer = KernelTimer(session.workload.device)
    session.step(timer)
    total = sum(timer.phases.values())
    # A phase may have no kernels. A step without any means that CUPTI is refused.
    values: dict[str, float | None] = {**timer.phases, "step": total}
    note = ""
    if not total:
        values, note = dict.fromkeys(values), f"{_UNSEEN}: {REFUSED}"
    samples: list[Sample] = []
    for phase, ms in values.items():
        samples.append(Sample("kernel_time", "kernel_time", "ms", ms, "", phase, number, note))
    return samples


# After all timing, because a process is slower once it has profiled, and before `kernels`.
STAGES = (Stage("kernel time", 78, time_kernels),)
