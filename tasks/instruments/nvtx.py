"""Annotate warm steps with NVTX ranges for Nsight Systems, by the names that `kernels` uses.

Run a cell with only this instrument under `nsys profile --trace=cuda,nvtx
--capture-range=cudaProfilerApi`, and read the result with `sweep import`. Phases are
start-end ranges, which hold for all threads. Every operator is a range with its sequence
number, which connects an operator of the backward pass with its module.
"""

from __future__ import annotations

import torch
from torch.profiler import record_function

from tasks.harness.model_parts import parts_named
from tasks.harness.stage import Session, Stage
from tasks.spec.tables import Sample
from tasks.traces.parts import PART_PREFIX, PHASE_PREFIX

_STEPS = 2


class NvtxPhases:
    """Watcher that puts a range around each phase, for the kernels of every thread."""

    def enter(self, phase: str) -> None:
        # Not push and pop: nsys matches those only to kernels that the same thread launched, and
        # autograd's thread launched 61 % of the kernels of a traced ResNet step.
        self._handle = torch.cuda.nvtx.range_start(PHASE_PREFIX + phase)

    def leave(self, phase: str) -> None:
        torch.cuda.nvtx.range_end(self._handle)


def annotate(session: Session) -> list[Sample]:
    """Run steps with NVTX ranges around phases, parts and operators, and return their number."""
    device = session.workload.device
    if device.kind != "cuda":
        note = f"NVTX ranges need CUDA: device {device.kind} has none"
        return [Sample("nvtx", "annotated_steps", "steps", None, note=note)]
    session.step()  # a warm-up, because no other stage may have run a step
    device.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    named = parts_named(session.workload.model, lambda name: record_function(PART_PREFIX + name))
    with torch.autograd.profiler.emit_nvtx(), named:  # type: ignore[no-untyped-call]
        for _ in range(_STEPS):
            session.step(NvtxPhases())
        device.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    return [Sample("nvtx", "annotated_steps", "steps", _STEPS)]


STAGES = (Stage("nvtx", 85, annotate),)
