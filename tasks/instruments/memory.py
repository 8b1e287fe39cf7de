"""The peak of each phase and what is held at its end, in the first step and in steady state.

The first step has no optimizer state yet. What is held after the build is the model and its inputs; after the forward
pass, what it saved comes on top, and `saved` counts that tensor by tensor. On CUDA these are the allocator's own numbers
(allocated, reserved, requested); on the CPU the resident set of the process, named so. Statistics move when the host
allocates, so that nothing needs to be synchronised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tasks.harness.compilation import uses_cuda_graphs
from tasks.harness.device import Device
from tasks.harness.records import Sample
from tasks.harness.saved import SavedTensors
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
        self.samples += _sizes({**self._device.peaks(), **self._device.held()}, self._mode, phase)


def _sizes(sizes: Mapping[str, int | None], mode: str, phase: str = "") -> list[Sample]:
    return [Sample("memory", metric, "bytes", value, mode, phase) for metric, value in sizes.items()]


def watch_first_step(session: Session) -> list[Sample]:
    """What the build left, and to be told of the first step, whichever stage runs it."""
    device = session.workload.device
    watcher = PeakWatcher(device, "first")
    session.on_first_step.append(watcher)
    session.shelf["memory"] = watcher.samples
    return _sizes(device.held(), "built")


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
    samples = steady.samples
    if uses_cuda_graphs(session.params):
        samples = [_unknown_to_the_allocator(sample) for sample in samples]
    return [*take_first_step(session), *samples]


def _unknown_to_the_allocator(sample: Sample) -> Sample:
    """A graph that is replayed asks the allocator for nothing: of its memory only what is reserved is known."""
    if "reserved" in sample.metric:
        return sample
    return replace(sample, value=None, note="a CUDA graph has its memory in a pool of its own: see what is reserved")


def saved_for_backward(session: Session) -> list[Sample]:
    """What the forward pass of an eager step keeps for the backward pass beyond what is there anyway, each storage once.

    `saved_squares` are the tensors among it of all pairs of positions; of one block the operations that save most, and
    what it hands on. Compiled code is left out: to look into it would compile it again.
    """
    workload = session.workload
    if workload.compiled or workload.facts.get("grad_mode") == "no_grad":
        return []
    saved = SavedTensors(workload)
    with saved.watching():
        session.step()
    return saved.samples("memory")


STAGES = (
    Stage("memory first step", 10, watch_first_step),
    Stage("memory of warm-up", 22, take_first_step),
    Stage("memory", 40, steady_state),
    Stage("saved for backward", 45, saved_for_backward),
)
