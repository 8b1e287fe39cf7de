"""Where the time of a step goes: kernels by phase, module and class. On the CPU, operators by their own time.

Profiled by torch.profiler, after everything that is timed, since a process is slower once it has profiled. The trace is
read at once (see tasks/traces) and stays as an artifact that opens in Perfetto.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from tasks.harness.compilation import keep_provenance, kept_provenance
from tasks.harness.gc_pause import uncollected
from tasks.harness.model_parts import part_functions, parts_named
from tasks.harness.stage import Session, Stage
from tasks.instruments.kernel_time import REFUSED
from tasks.spec.artifact_names import artifact_name
from tasks.spec.tables import Sample
from tasks.traces.attribution import attribute
from tasks.traces.chrome import read_chrome
from tasks.traces.provenance import Graph, read_graph
from tasks.traces.summary import to_rows, to_samples
from tasks.traces.timeline import PART_PREFIX, PHASE_PREFIX

_STEPS = 1  # to read a second one costs a tenth of a short cell, and tells of each kernel of a block no more
_LARGEST_TRACE_BYTES = 512 * 1024**2
_NS_PER_MS = 1e6


class PhaseRanges:
    """A range around each phase, on the main thread."""

    def enter(self, phase: str) -> None:
        self._range = record_function(PHASE_PREFIX + phase)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, phase: str) -> None:
        self._range.__exit__(None, None, None)


def prepare(session: Session) -> list[Sample]:
    """Before anything is compiled."""
    if session.workload.compiled:
        keep_provenance()
    return []


def watch_kernels(session: Session) -> Iterator[Sample]:
    """Leaves the rows in `session.kernels`, and gives what is known over all: coverage, busy fraction, cost."""
    device = session.workload.device
    if device.kind == "mps":
        yield Sample(
            "kernels", "profiled_step", "ms", None, note="torch.profiler sees no kernels on mps"
        )
        return
    session.step()  # so that it is warm, whichever stages came before
    profiled, step_ms = _profile(session)
    yield Sample("kernels", "profiled_step", "ms", step_ms)
    began = time.perf_counter_ns()
    with uncollected(), TemporaryDirectory(dir=_scratch_place(session.folder)) as scratch:
        trace = Path(scratch) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        yield from _read(session, trace)
    yield Sample("kernels", "processing", "ms", (time.perf_counter_ns() - began) / _NS_PER_MS)


def _scratch_place(folder: Path | None) -> Path | None:
    """Beside what is kept, or, None, where the system keeps what is temporary: Kineto writes the trace's path into it as it is,
    so that with a quote in it, or whatever else JSON escapes, nobody could read it."""
    fits = folder is not None and json.dumps(str(folder), ensure_ascii=False) == f'"{folder}"'
    return folder if fits else None


def _read(session: Session, trace: Path) -> Iterator[Sample]:
    """The trace is packed while it is read: the packing leaves Python's lock alone."""
    with ThreadPoolExecutor(1) as beside:
        kept = (
            beside.submit(
                _keep, trace, session.folder / artifact_name("trace", session.params, "json.gz")
            )
            if session.folder
            else None
        )
        timeline = read_chrome(trace)
        if (
            session.workload.device.kind == "cuda" and not timeline.on_device
        ):  # else operators would pass for kernels
            yield Sample(
                "kernels", "busy", "ratio", None, note=f"the trace has no kernels: {REFUSED}"
            )
            return
        works = attribute(timeline, graphs=_graphs(session))
        session.kernels += to_rows(works, _STEPS)
        yield from to_samples(works, _STEPS, timeline.on_device)
        if kept is not None:
            yield kept.result()


def _graphs(session: Session) -> list[Graph]:
    texts = kept_provenance() if session.workload.compiled else []
    return [read_graph(text, part_functions()) for text in texts]


def _profile(session: Session) -> tuple[profile, float]:
    """The profiler after a step, and how long that took, in ms."""
    device = session.workload.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    ranges = parts_named(session.workload.model, lambda name: record_function(PART_PREFIX + name))
    # The profiler's own first step is slow, and is thrown away.
    with (
        profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=_STEPS)
        ) as profiled,
        ranges,
    ):
        session.step(PhaseRanges())
        device.synchronize()
        profiled.step()
        began = time.perf_counter_ns()
        session.step(PhaseRanges())
        device.synchronize()
        took = time.perf_counter_ns() - began
    return profiled, took / _NS_PER_MS


def _keep(trace: Path, artifact: Path) -> Sample:
    """Compressed as Perfetto reads it; nothing, with the reason, where it is too large for that."""
    size = trace.stat().st_size
    if size > _LARGEST_TRACE_BYTES:
        note = f"the trace has {size} bytes, more than {_LARGEST_TRACE_BYTES}: not kept"
        return Sample("kernels", "trace_bytes", "bytes", None, note=note)
    with trace.open("rb") as whole, gzip.open(artifact, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(whole, packed)
    return Sample("kernels", "trace_bytes", "bytes", artifact.stat().st_size)


STAGES = (Stage("kernels prepared", 5, prepare), Stage("kernels", 80, watch_kernels))
