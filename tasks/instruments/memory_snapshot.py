"""What the memory of a step is made of: one steady step on the allocator's record, and what filled the device when it ran out.

After everything that is timed. The record holds every allocation with its Python stack; what is computed meanwhile is named,
in the backward pass too, and what is in use is written down at each boundary. The snapshot is read at once (see
tasks/snapshots) and stays as an artifact that opens in torch's memory_viz; nobody else unpickles it. Of an out-of-memory in
an earlier stage nothing was on record: the snapshot of that moment has what was live, without stacks.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import memory
from torch.profiler import record_function

from tasks.harness.backward_parts import PartTracker
from tasks.harness.compilation import uses_cuda_graphs
from tasks.harness.device import device_refused
from tasks.harness.model_parts import parts_named
from tasks.harness.stage import Session, Stage
from tasks.harness.workload import Workload
from tasks.snapshots.attribution import AT_BEGIN, AT_END, Holding, Role, attribute
from tasks.snapshots.replay import Record, Snapshot, replay, vanished
from tasks.snapshots.summary import OUT_OF_MEMORY, PEAK, to_curve, to_rows, unlabelled_bytes
from tasks.spec.artifact_names import artifact_name
from tasks.spec.tables import Sample
from tasks.traces.timeline import PART_PREFIX, PHASE_PREFIX

_MOST_ENTRIES = 200_000  # of the ring buffer: some ten steps of the largest model
_LARGEST_SNAPSHOT_BYTES = 512 * 1024**2
_NS_PER_MS = 1e6


@dataclass
class Taken:
    """A snapshot, and what was seen in use when (see `Book`)."""

    snapshot: Snapshot
    book: dict[str, list[Holding]] = field(default_factory=dict)


class BoundaryWatcher:
    """Marks the phases in the record of every thread, and writes down what is in use at the end of each."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.book = {AT_BEGIN: list(holdings(workload))}

    def enter(self, phase: str) -> None:
        self._range = record_function(PHASE_PREFIX + phase)
        self._range.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, phase: str) -> None:
        self._range.__exit__(None, None, None)
        self.book[phase] = list(holdings(self._workload))


class OutOfMemoryWitness:
    """Takes a snapshot at the moment when the allocator gives up, and hands it over if that ends the attempt."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken: Taken | None = None

    def see(self, device: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Called by the allocator, on whichever thread asked: what is raised here would hide that memory ran out."""
        try:
            self._taken = Taken(
                memory._snapshot(), {AT_END: list(holdings(self._session.workload))}
            )
        except Exception as broken:
            self._session.evidence["snapshot"] = f"not taken: {broken}"

    def testify(self, error: Exception) -> None:
        if self._taken is None or not device_refused(error):
            return
        try:
            self._session.evidence["snapshot"] = self._keep(self._taken)
        except Exception as broken:
            self._session.evidence["snapshot"] = f"not kept: {broken}"

    def _keep(self, taken: Taken) -> str:
        session = self._session
        record = _replay(session, taken)
        labelled = attribute(record, taken.book, _has_weight_copies(session))
        at, phase = record.entries - 1, session.progress.phase
        session.allocations += to_rows(labelled, at, OUT_OF_MEMORY, phase, record.rounding_bytes)
        name = artifact_name("snapshot_oom", session.params, "pickle")
        if session.folder is None:
            return "not kept: it has no folder"
        kept = _write(taken.snapshot, session.folder / name)
        return name if kept.value is not None else kept.note


def watch_out_of_memory(session: Session) -> list[Sample]:
    """From here on. It costs nothing until memory runs out."""
    if session.workload.device.kind == "cuda":
        witness = OutOfMemoryWitness(session)
        torch._C._cuda_attach_out_of_memory_observer(witness.see)  # type: ignore[attr-defined]
        session.on_error.append(witness.testify)
    return []


def take_snapshot(session: Session) -> Iterator[Sample]:
    """Leaves the rows in `session.allocations` and `session.live`, and gives what is known over all."""
    if reason := _why_not(session):
        yield _sample("peak_allocated_bytes", "bytes", None, reason)
        return
    _step_on_record(
        session
    )  # the first may be one without optimizer state; if memory runs out in it, that is on record
    session.workload.device.reset_peaks()
    taken = _step_on_record(session)
    peaks = session.workload.device.peaks()
    began = time.perf_counter_ns()
    taken.book[AT_END] += _workspaces(taken.snapshot)
    record = _replay(session, taken)
    yield from _analyse(session, record, taken, peaks)
    if session.folder is not None:
        yield _write(
            taken.snapshot, session.folder / artifact_name("snapshot", session.params, "pickle")
        )
    yield _sample("processing", "ms", (time.perf_counter_ns() - began) / _NS_PER_MS)


def _why_not(session: Session) -> str:
    kind = session.workload.device.kind
    if kind != "cuda":
        return f"a snapshot is of CUDA's allocator: it needs CUDA, not {kind}"
    return (
        "a CUDA graph that is replayed asks the allocator for nothing"
        if uses_cuda_graphs(session.params)
        else ""
    )


def _analyse(
    session: Session, record: Record, taken: Taken, peaks: Mapping[str, int | None]
) -> Iterator[Sample]:
    labelled = attribute(record, taken.book, _has_weight_copies(session))
    at = record.peak()
    replayed_bytes = sum(one.size_bytes for one in record.live_at(at))
    slack_bytes = (peaks.get("peak_allocated_bytes") or replayed_bytes) - replayed_bytes
    rows = to_rows(labelled, at, PEAK, record.phase_at(at), slack_bytes)
    session.allocations += rows
    session.live += to_curve(record, labelled)
    for metric, value in {
        **peaks,
        "replayed_peak_bytes": replayed_bytes,
        "unlabelled_bytes": unlabelled_bytes(rows),
    }.items():
        yield _sample(metric, "bytes", value)
    wrapped = record.entries >= _MOST_ENTRIES
    yield _sample("events", "events", record.entries)
    yield _sample(
        "wrapped",
        "",
        float(wrapped),
        f"it has the last {_MOST_ENTRIES} events alone" if wrapped else "",
    )


def holdings(workload: Workload) -> Iterator[Holding]:
    """What is in use now on its device, and as what."""
    for tensor, role, name in _in_use(workload):
        if isinstance(tensor, Tensor) and tensor.device.type == workload.device.torch_device.type:
            yield Holding(tensor.untyped_storage().data_ptr(), role, name)


def _in_use(workload: Workload) -> Iterator[tuple[Any, Role, str]]:
    model, optimizer = workload.model, workload.optimizer
    for name, parameter in model.named_parameters() if model is not None else ():
        yield parameter, Role.PARAMETERS, name
        yield parameter.grad, Role.GRADIENTS, name
        if optimizer is not None and parameter in optimizer.state:
            yield from (
                (value, Role.OPTIMIZER_STATE, name) for value in optimizer.state[parameter].values()
            )
    yield from (
        (buffer, Role.BUFFERS, "") for buffer in (model.buffers() if model is not None else ())
    )
    yield from ((tensor, Role.INPUTS, "") for tensor in workload.resident)
    yield from ((tensor.grad, Role.GRADIENTS, "") for tensor in workload.resident)


def _step_on_record(session: Session) -> Taken:
    """One step, and the snapshot behind it."""
    workload = session.workload
    watcher, tracker = BoundaryWatcher(workload), PartTracker(memory._set_memory_metadata)
    named = parts_named(workload.model, lambda part: tracker.name(PART_PREFIX + part))
    workload.device.synchronize()
    with _on_record():
        with named, tracker.backward_named():
            session.step(watcher)
        snapshot = memory._snapshot()
    return Taken(snapshot, {**watcher.book, AT_END: list(holdings(workload))})


@contextmanager
def _on_record() -> Iterator[None]:
    memory._record_memory_history(
        "all",
        context="alloc",
        stacks="python",
        max_entries=_MOST_ENTRIES,
        clear_history=True,
        global_record_annotations=True,
    )
    try:
        yield
    finally:
        memory._record_memory_history(None)


def _workspaces(snapshot: Snapshot) -> list[Holding]:
    """Those of cuBLAS: what goes when they are given up. The next product makes them anew."""
    torch._C._cuda_clearCublasWorkspaces()
    return [
        Holding(address, Role.WORKSPACE)
        for address in vanished(snapshot["segments"], memory._snapshot()["segments"])
    ]


def _replay(session: Session, taken: Taken) -> Record:
    return replay(taken.snapshot, session.workload.device.torch_device.index or 0)


def _has_weight_copies(session: Session) -> bool:
    return session.workload.facts.get("autocast_dtype") is not None


def _write(snapshot: Snapshot, artifact: Path) -> Sample:
    """As torch's memory_viz opens it; nothing, with the reason, where it is too large for that."""
    packed = pickle.dumps(snapshot)
    if len(packed) > _LARGEST_SNAPSHOT_BYTES:
        note = (
            f"the snapshot has {len(packed)} bytes, more than {_LARGEST_SNAPSHOT_BYTES}: not kept"
        )
        return _sample("file_bytes", "bytes", None, note)
    artifact.write_bytes(packed)
    return _sample("file_bytes", "bytes", len(packed))


def _sample(metric: str, unit: str, value: float | None, note: str = "") -> Sample:
    return Sample("memory_snapshot", metric, unit, value, note=note)


STAGES = (
    Stage("out-of-memory watched", 4, watch_out_of_memory),
    Stage("memory snapshot", 70, take_snapshot),
)
