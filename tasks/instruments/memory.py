"""Measure the peak memory of each phase, the memory at its end, and what is saved for backward.

The first step and the steady state are measured separately, because the first has no optimizer
state yet; with several ranks the second, too, in which DDP has its buckets twice. After the build, memory holds the model and its inputs; the forward pass adds what it
saves, which `saved` counts tensor by tensor. On CUDA these are the allocator's numbers
(allocated, reserved, requested), and what the GPU has in use outside of it. On the CPU it is the resident set of the process; its peak is
null where the kernel refuses to reset it. The steps of the warm-up are measured, at no noticeable
cost; without a warm-up, one additional step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tasks.harness.compilation import uses_cuda_graphs
from tasks.harness.device import Device
from tasks.harness.saved_tensors import SavedWatcher
from tasks.harness.stage import Session, Stage
from tasks.spec.tables import Sample

# The first step has no optimizer state, and the second still frees what the first left. Predicted
# for xl at context 512 in fp32: the first step peaks at 34.8 GiB, a steady one at 49.7 GiB.
_STEPS_UNTIL_STEADY = 2


class PeakWatcher:
    """Watcher that reads the peak of each phase and the memory at its end.

    A phase may run for each micro-batch of a step: its highest peak and its last end count.
    """

    # Nothing is synchronised: the allocator's statistics change when the host allocates.

    def __init__(self, device: Device, mode: str) -> None:
        self._device = device
        self._mode = mode
        self._sizes: dict[str, dict[str, int | None]] = {}
        self.samples: list[Sample] = []

    def enter(self, phase: str) -> None:
        self._device.reset_peaks()

    def leave(self, phase: str) -> None:
        peaks, before = dict(self._device.peaks()), self._sizes.get(phase, {})
        for name, nbytes in peaks.items():
            if nbytes is not None:
                peaks[name] = max(nbytes, before.get(name) or 0)
        self._sizes[phase] = {**peaks, **self._device.held()}
        self.samples.clear()
        for name, sizes in self._sizes.items():
            self.samples += _sizes(sizes, self._mode, name, self._device.missing_peak_reason)


def _sizes(
    sizes: Mapping[str, int | None], mode: str, phase: str = "", reason: str = ""
) -> list[Sample]:
    samples = []
    for metric, value in sizes.items():
        note = reason if value is None else ""
        samples.append(Sample("memory", metric, "bytes", value, mode, phase, note=note))
    return samples


def watch_warm_up(session: Session) -> list[Sample]:
    """Return the memory after the build, and attach watchers to the first and last warm-up step."""
    device = session.workload.device
    first, steady = PeakWatcher(device, "first"), PeakWatcher(device, "steady")
    session.on_first_step.append(first)
    session.on_last_warm_up.append(steady)
    session.shelf |= {"first": first.samples, "second": [], "steady": steady.samples, "saved": []}
    if session.group.ranks > 1:
        second = PeakWatcher(device, "second")
        session.on_second_step.append(second)
        session.shelf["second"] = second.samples
    # Hooks would recompile compiled code.
    if not session.workload.compiled and session.workload.facts.get("grad_mode") != "no_grad":
        saved = SavedWatcher(session.workload)
        session.on_last_warm_up.append(saved)
        session.shelf["saved"] = saved.samples
    return _sizes(device.held(), "built")


def take_warm_up(session: Session) -> list[Sample]:
    """Return the samples of the warm-up, before a later step can fail."""
    shelf = session.shelf
    steady = shelf["steady"]
    if uses_cuda_graphs(session.params):
        steady = list(map(_unknown_unless_reserved, steady))
    taken = [*shelf["first"], *shelf["second"], *steady, *shelf["saved"]]
    for mode in ("first", "second", "steady", "saved"):
        shelf[mode].clear()
    return taken


def steady_state(session: Session) -> list[Sample]:
    """Return the memory outside of the allocator, and the samples of a step without a warm-up."""
    watchers, session.on_last_warm_up = session.on_last_warm_up, []
    if watchers:
        while session.steps < _STEPS_UNTIL_STEADY:
            session.step()
        session.step(*watchers)
    return [*take_warm_up(session), *_outside(session.workload.device)]


def _outside(device: Device) -> list[Sample]:
    now = device.memory_evidence()
    free, total, reserved = (now.get(f"{name}_bytes") for name in ("free", "total", "reserved"))
    if free is None or total is None or reserved is None:  # only CUDA says it
        return []
    return _sizes({"outside_allocator_bytes": total - free - reserved}, "steady")


def _unknown_unless_reserved(sample: Sample) -> Sample:
    # A replayed CUDA graph does not call the allocator, so only its reserved memory is known.
    if "reserved" in sample.metric:
        return sample
    note = "a CUDA graph has its memory in a separate pool: see the reserved bytes"
    return replace(sample, value=None, note=note)


# The warm-up's samples are taken before the timing, in which memory may run out.
STAGES = (
    Stage("memory of the build", 10, watch_warm_up),
    Stage("memory of warm-up", 22, take_warm_up),
    Stage("memory", 40, steady_state),
)
