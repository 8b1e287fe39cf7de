"""Attribute the time of one step to kernels by phase, module and class; on the CPU, to operators.

torch.profiler records the step. The cell's own process reads the trace (see tasks/traces), which
stays as an artifact for Perfetto.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from tasks.harness.compilation import enable_provenance, recorded_provenance
from tasks.harness.model_parts import part_functions, parts_named
from tasks.harness.stage import Session, Stage
from tasks.instruments.kernel_time import REFUSED
from tasks.process import clock
from tasks.process.gc_pause import uncollected
from tasks.spec.attempt import artifact_name
from tasks.spec.tables import Sample
from tasks.traces.attribution import attribute
from tasks.traces.chrome import read_chrome
from tasks.traces.parts import PART_PREFIX, PHASE_PREFIX
from tasks.traces.provenance import Graph, read_graph
from tasks.traces.summary import to_rows, to_samples

# A second step would cost a tenth of a short cell, and every block already runs the same kernels.
_STEPS = 1
_LARGEST_TRACE_BYTES = 512 * 1024**2
_NS_PER_MS = 1e6


class PhaseRanges:
    """Watcher that puts a range of torch.profiler around each phase, on the main thread."""

    def enter(self, phase: str) -> None:
        self._range = record_function(PHASE_PREFIX + phase)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, phase: str) -> None:
        self._range.__exit__(None, None, None)


def record_provenance(session: Session) -> list[Sample]:
    """Make the compiler keep its provenance records; runs before anything is compiled."""
    if session.workload.compiled:
        enable_provenance()
    return []


def watch_kernels(session: Session) -> Iterator[Sample]:
    """Add rows to `session.kernels`, and yield samples of the step: coverage, busy share, cost."""
    device = session.workload.device
    if device.kind == "mps":
        yield _sample("profiled_step", "ms", None, "torch.profiler sees no kernels on mps")
        return
    session.step()  # a warm-up, because no other stage may have run a step
    profiled, step_ms = _profile(session)
    yield _sample("profiled_step", "ms", step_ms)
    began = clock.perf_counter_ns()
    with uncollected(), TemporaryDirectory(dir=_scratch_folder(session.folder)) as scratch:
        trace = Path(scratch) / "trace.json"
        # The file is the portable interface: torch 2.11 does not have all fields in its events.
        profiled.export_chrome_trace(str(trace))
        yield from _read(session, trace)
    yield _sample("processing", "ms", (clock.perf_counter_ns() - began) / _NS_PER_MS)


def _scratch_folder(folder: Path | None) -> Path | None:
    """Return the folder for the trace, or None for the system's temporary folder."""
    # Kineto writes the path of the trace into the trace without escaping it. A path with a quote,
    # or another character that JSON escapes, would make the trace unreadable.
    if json.dumps(str(folder), ensure_ascii=False) == f'"{folder}"':
        return folder
    return None


def _read(session: Session, trace: Path) -> Iterator[Sample]:
    """Yield the samples of a trace, while a thread compresses it: zlib releases the GIL."""
    with ThreadPoolExecutor(1) as pool:
        stored = None
        if session.folder is not None:
            artifact = session.folder / artifact_name("trace", session.params, "json.gz")
            stored = pool.submit(_compress, trace, artifact)
        timeline = read_chrome(trace)
        # Without kernels, the host's operators would pass for the work of the device.
        if session.workload.device.kind == "cuda" and not timeline.on_device:
            yield _sample("busy", "ratio", None, f"the trace has no kernels: {REFUSED}")
            return
        works = attribute(timeline, graphs=_graphs(session))
        session.kernels += to_rows(works, _STEPS)
        yield from to_samples(works, _STEPS, timeline.on_device)
        if stored is not None:
            yield stored.result()


def _graphs(session: Session) -> list[Graph]:
    if not session.workload.compiled:
        return []
    return [read_graph(text, part_functions()) for text in recorded_provenance()]


def _profile(session: Session) -> tuple[profile, float]:
    """Return the profiler after one step, and the duration of the step in ms."""
    device = session.workload.device
    activities = [ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ranges = parts_named(session.workload.model, lambda name: record_function(PART_PREFIX + name))
    # The first step under the profiler is slow, so its record is dropped.
    dropping = schedule(wait=0, warmup=1, active=_STEPS)
    # Shapes are not recorded: that would hold references to tensors, and reading a trace of 24,000
    # events would take 1.3 s instead of 0.08 s.
    with profile(activities=activities, schedule=dropping) as profiled, ranges:
        session.step(PhaseRanges())
        device.synchronize()
        profiled.step()
        began = clock.perf_counter_ns()
        session.step(PhaseRanges())
        device.synchronize()
        took = clock.perf_counter_ns() - began
    return profiled, took / _NS_PER_MS


def _compress(trace: Path, artifact: Path) -> Sample:
    """Compress the trace for Perfetto, unless it is too large; return its size or the reason."""
    size = trace.stat().st_size
    if size > _LARGEST_TRACE_BYTES:
        note = f"the trace has {size} bytes, more than {_LARGEST_TRACE_BYTES}: not saved"
        return _sample("trace_bytes", "bytes", None, note)
    with trace.open("rb") as whole, gzip.open(artifact, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(whole, packed)
    return _sample("trace_bytes", "bytes", artifact.stat().st_size)


def _sample(metric: str, unit: str, value: float | None, note: str = "") -> Sample:
    return Sample("kernels", metric, unit, value, note=note)


# After all timing, because a process is slower once it has profiled. The compiler must be prepared
# before it compiles anything.
STAGES = (Stage("kernels prepared", 5, record_provenance), Stage("kernels", 80, watch_kernels))
