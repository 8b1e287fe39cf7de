"""Measure the peak memory of each phase, the memory at its end, and what is saved for backward.

The first step and the steady state are measured separately, because the first has no optimizer
state yet. After the build, memory holds the model and its inputs; the forward pass adds what it
saves, which `saved` counts tensor by tensor. On CUDA these are the allocator's numbers
(allocated, reserved, requested). On the CPU it is the resident set of the process; its peak is
null where the kernel refuses to reset it. The numbers change when the host allocates, so
nothing is synchronised.

The steps of the warm-up are measured, at no noticeable cost; without a warm-up, one additional
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from tasks.harness.compilation import uses_cuda_graphs
from tasks.harness.device import Device
from tasks.harness.saved_tensors import SavedTensors
from tasks.harness.stage import Session, Stage
from tasks.harness.workload import Workload
from tasks.spec.tables import Sample

# The first step has no optimizer state; the second still frees what the first left.
_STEPS_UNTIL_STEADY = 2


class PeakWatcher:
    """Watcher that reads the peak of each phase and the memory at its end."""

    def __init__(self, device: Device, mode: str) -> None:
        self._device = device
        self._mode = mode
        self.samples: list[Sample] = []

    def enter(self, phase: str) -> None:
        self._device.reset_peaks()

    def leave(self, phase: str) -> None:
        sizes = {**self._device.peaks(), **self._device.held()}
        self.samples += _sizes(sizes, self._mode, phase, self._device.untold)


class SavedWatcher:
    """Watcher of what the forward pass saves for the backward pass, each storage once.

    It needs no memory itself. `saved_squares` counts the saved tensors of length × length. For
    one block it finds the operations that save most, and the block's output.
    """

    def __init__(self, workload: Workload) -> None:
        self._saved = SavedTensors(workload)
        self._watching = ExitStack()
        self.samples: list[Sample] = []

    def enter(self, phase: str) -> None:
        self._watching.enter_context(self._saved.watching())

    def leave(self, phase: str) -> None:
        self._watching.close()
        # Complete only after the backward pass, which names the operations.
        self.samples[:] = self._saved.samples("memory")


def _sizes(
    sizes: Mapping[str, int | None], mode: str, phase: str = "", untold: str = ""
) -> list[Sample]:
    return [
        Sample("memory", metric, "bytes", value, mode, phase, note=untold if value is None else "")
        for metric, value in sizes.items()
    ]


def watch_warm_up(session: Session) -> list[Sample]:
    """Return the memory after the build, and attach watchers to the first and last warm-up step."""
    device = session.workload.device
    first, steady = PeakWatcher(device, "first"), PeakWatcher(device, "steady")
    session.on_first_step.append(first)
    session.on_last_warm_up.append(steady)
    session.shelf |= {"first": first.samples, "steady": steady.samples, "saved": []}
    if _saves(session.workload):
        saved = SavedWatcher(session.workload)
        session.on_last_warm_up.append(saved)
        session.shelf["saved"] = saved.samples
    return _sizes(device.held(), "built")


def _saves(workload: Workload) -> bool:
    """Return whether saved tensors can be counted: hooks would recompile compiled code."""
    return not workload.compiled and workload.facts.get("grad_mode") != "no_grad"


def take_warm_up(session: Session) -> list[Sample]:
    """Return the samples of the warm-up, before a later step can fail."""
    shelf = session.shelf
    steady = (
        map(_unknown_to_the_allocator, shelf["steady"])
        if uses_cuda_graphs(session.params)
        else shelf["steady"]
    )
    taken = [*shelf["first"], *steady, *shelf["saved"]]
    for mode in ("first", "steady", "saved"):
        shelf[mode].clear()
    return taken


def steady_state(session: Session) -> list[Sample]:
    """Return the samples of an additional step, if there was no warm-up."""
    watchers, session.on_last_warm_up = session.on_last_warm_up, []
    if watchers:
        while session.steps < _STEPS_UNTIL_STEADY:
            session.step()
        session.step(*watchers)
    return take_warm_up(session)


def _unknown_to_the_allocator(sample: Sample) -> Sample:
    """Return the sample without its value, except of reserved memory.

    A replayed CUDA graph does not call the allocator, so only its reserved memory is known.
    """
    if "reserved" in sample.metric:
        return sample
    return replace(
        sample,
        value=None,
        note="a CUDA graph has its memory in a separate pool: see the reserved bytes",
    )


STAGES = (
    Stage("memory of the build", 10, watch_warm_up),
    Stage("memory of warm-up", 22, take_warm_up),
    Stage("memory", 40, steady_state),
)
