"""The peak of each phase and what is held at its end, in the first step and in steady state, and what is saved for backward.

The first step has no optimizer state yet. What is held after the build is the model and its inputs; after the forward
pass, what it saved comes on top, and `saved` counts that tensor by tensor. On CUDA these are the allocator's own numbers
(allocated, reserved, requested); on the CPU the resident set of the process, named so, whose peak is null where the kernel
refuses to restart it. Statistics move when the host allocates, so that nothing needs to be synchronised.

All this is seen in steps of the warm-up, which take no longer for it that anybody would measure. Where there is no warm-up
it takes a step of its own.
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

_STEPS_UNTIL_STEADY = 2  # a first without optimizer state, and one to leave behind what it does


class PeakWatcher:
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
    """What the forward pass keeps for the backward pass beyond what is there anyway, each storage once. To look costs no memory.

    `saved_squares` are the tensors among it of all pairs of positions; of one block the operations that save most, and
    what it hands on.
    """

    def __init__(self, workload: Workload) -> None:
        self._saved = SavedTensors(workload)
        self._watching = ExitStack()
        self.samples: list[Sample] = []

    def enter(self, phase: str) -> None:
        self._watching.enter_context(self._saved.watching())

    def leave(self, phase: str) -> None:
        self._watching.close()
        self.samples[:] = self._saved.samples(
            "memory"
        )  # complete after the backward pass: it tells the operations


def _sizes(
    sizes: Mapping[str, int | None], mode: str, phase: str = "", untold: str = ""
) -> list[Sample]:
    return [
        Sample("memory", metric, "bytes", value, mode, phase, note=untold if value is None else "")
        for metric, value in sizes.items()
    ]


def watch_warm_up(session: Session) -> list[Sample]:
    """What the build left, and to be told of the first step and of the last of the warm-up, whichever stages run them."""
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
    """Compiled code is left out: to look into it would compile it again."""
    return not workload.compiled and workload.facts.get("grad_mode") != "no_grad"


def take_warm_up(session: Session) -> list[Sample]:
    """Hands over what was seen, before a later step can fail."""
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
    """In a step of its own, where no warm-up showed it."""
    watchers, session.on_last_warm_up = session.on_last_warm_up, []
    if watchers:
        while session.steps < _STEPS_UNTIL_STEADY:
            session.step()
        session.step(*watchers)
    return take_warm_up(session)


def _unknown_to_the_allocator(sample: Sample) -> Sample:
    """A graph that is replayed asks the allocator for nothing: of its memory only what is reserved is known."""
    if "reserved" in sample.metric:
        return sample
    return replace(
        sample,
        value=None,
        note="a CUDA graph has its memory in a pool of its own: see what is reserved",
    )


STAGES = (
    Stage("memory of the build", 10, watch_warm_up),
    Stage("memory of warm-up", 22, take_warm_up),
    Stage("memory", 40, steady_state),
)
