"""The peak of each phase, in the first step and in steady state: the first has no optimizer state yet.

On CUDA the allocator's own peaks (allocated, reserved, requested); on the CPU the peak resident set of the process,
named so. Statistics move when the host allocates, so that nothing needs to be synchronised.
"""

from __future__ import annotations

from tasks.harness.device import Device
from tasks.harness.records import Sample
from tasks.harness.stage import Session, Stage

_STEADY_STEPS = 2  # the second sees what the first left behind


class PeakWatcher:
    def __init__(self, device: Device, mode: str) -> None:
        self._device = device
        self._mode = mode
        self.samples: list[Sample] = []

    def enter(self, phase: str) -> None:
        self._device.reset_peaks()

    def leave(self, phase: str) -> None:
        self.samples += [
            Sample("memory", metric, "bytes", value, self._mode, phase) for metric, value in self._device.peaks().items()
        ]


def watch_first_step(session: Session) -> list[Sample]:
    """Asks to be told of the first step, whichever stage runs it."""
    watcher = PeakWatcher(session.workload.device, "first")
    session.on_first_step.append(watcher)
    session.shelf["memory"] = watcher.samples
    return []


def take_first_step(session: Session) -> list[Sample]:
    """Hands over what the first step left, before a later one can fail."""
    left = session.shelf["memory"]
    taken = list(left)
    left.clear()
    return taken


def steady_state(session: Session) -> list[Sample]:
    if session.on_first_step:  # no stage before this one ran a step
        session.step()
    for _ in range(_STEADY_STEPS):
        steady = PeakWatcher(session.workload.device, "steady")
        session.step(steady)
    return [*take_first_step(session), *steady.samples]


STAGES = (
    Stage("memory first step", 10, watch_first_step),
    Stage("memory of warm-up", 22, take_first_step),
    Stage("memory", 40, steady_state),
)
