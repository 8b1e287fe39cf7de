"""Record the contents of memory in a steady step, and when memory ran out.

The allocator records every allocation with its Python stack and the name of the module that runs,
also in the backward pass. The addresses of parameters, gradients and so on are noted at each phase
boundary. The cell's process reads the snapshot (see tasks/snapshots), which stays as an artifact
for pytorch.org/memory_viz; this program never unpickles it. If memory runs out in an earlier
stage, the snapshot has the live blocks of that moment, without stacks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.cuda import memory
from torch.profiler import record_function

from tasks.harness.backward_parts import PartTracker
from tasks.harness.compilation import uses_cuda_graphs
from tasks.harness.error_kinds import is_device_oom
from tasks.harness.model_parts import parts_named
from tasks.harness.stage import Session, Stage
from tasks.harness.workload import Workload
from tasks.process import clock
from tasks.snapshots.attribution import AT_BEGIN, AT_END, Holding, Role, attribute
from tasks.snapshots.replay import Record, Snapshot, replay, vanished
from tasks.snapshots.summary import (
    OUT_OF_MEMORY,
    PEAK,
    largest_of_parts,
    to_curve,
    to_rows,
    unlabelled_bytes,
)
from tasks.spec.attempt import artifact_name
from tasks.spec.messages import error_text
from tasks.spec.tables import Sample
from tasks.traces.parts import PART_PREFIX, PHASE_PREFIX

# Events in the ring buffer: about ten steps of the largest model.
_MOST_ENTRIES = 200_000
_LARGEST_SNAPSHOT_BYTES = 512 * 1024**2
_NS_PER_MS = 1e6


@dataclass
class Taken:
    """A snapshot of the allocator, and the tensors in use at several moments (see `Book`)."""

    snapshot: Snapshot
    book: dict[str, list[Holding]] = field(default_factory=dict)


class BoundaryWatcher:
    """Watcher that marks the phases in the record, and notes the tensors in use at each end."""

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
    """Observer that takes a snapshot when memory runs out, and stores it if the attempt ends."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken: Taken | None = None

    def see(self, device: int, asked_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Take the snapshot. The allocator calls this on the allocating thread.

        No exception may leave it: it would hide the out-of-memory error.
        """
        try:
            book = {AT_END: list(holdings(self._session.workload))}
            self._taken = Taken(memory._snapshot(), book)
        except Exception as broken:
            self._session.evidence["snapshot"] = f"not taken: {error_text(broken)}"

    def testify(self, error: Exception) -> None:
        """Store the snapshot if the attempt ends because memory ran out."""
        # The code of a cell may have caught that error, and may end with another one.
        if self._taken is None or not is_device_oom(error):
            return
        try:
            self._session.evidence["snapshot"] = self._store(self._taken)
        except Exception as broken:
            self._session.evidence["snapshot"] = f"not saved: {error_text(broken)}"

    def _store(self, taken: Taken) -> str:
        session = self._session
        record = _replay(session, taken)
        labelled = attribute(record, taken.book, _has_weight_copies(session))
        at, phase = record.entries - 1, session.progress.phase
        session.allocations += to_rows(labelled, at, OUT_OF_MEMORY, phase, record.rounding_bytes)
        if session.folder is None:
            return "not saved: the attempt has no folder"
        name = artifact_name("snapshot_oom", session.params, "pickle")
        written = _write(taken.snapshot, session.folder / name)
        return name if written.value is not None else written.note


def watch_out_of_memory(session: Session) -> list[Sample]:
    """Attach the observer, which costs nothing until memory runs out."""
    if session.workload.device.kind == "cuda":
        witness = OutOfMemoryWitness(session)
        torch._C._cuda_attach_out_of_memory_observer(witness.see)  # type: ignore[attr-defined]
        session.on_error.append(witness.testify)
    return []


def take_snapshot(session: Session) -> Iterator[Sample]:
    """Add rows to `session.allocations` and `session.live`, and yield samples of the whole step."""
    if reason := _unsupported_reason(session):
        yield _sample("peak_allocated_bytes", "bytes", None, reason)
        return
    # The first step may lack optimizer state. It is recorded in case memory runs out in it.
    _step_on_record(session)
    session.workload.device.reset_peaks()
    taken = _step_on_record(session)
    peaks = session.workload.device.peaks()
    began = clock.perf_counter_ns()
    taken.book[AT_END] += _workspaces(taken.snapshot)
    record = _replay(session, taken)
    yield from _analyse(session, record, taken, peaks)
    if session.folder is not None:
        name = artifact_name("snapshot", session.params, "pickle")
        yield _write(taken.snapshot, session.folder / name)
    yield _sample("processing", "ms", (clock.perf_counter_ns() - began) / _NS_PER_MS)


def _unsupported_reason(session: Session) -> str:
    kind = session.workload.device.kind
    if kind != "cuda":
        return f"only CUDA's allocator can record a snapshot: device {kind} cannot"
    if uses_cuda_graphs(session.params):
        return "a replayed CUDA graph does not call the allocator"
    return ""


def _analyse(
    session: Session, record: Record, taken: Taken, peaks: Mapping[str, int | None]
) -> Iterator[Sample]:
    labelled = attribute(record, taken.book, _has_weight_copies(session))
    at = record.peak()
    replayed_bytes = record.live_bytes_at(at)
    # The record has requested sizes; the allocator's peak counts whole blocks.
    slack_bytes = (peaks.get("peak_allocated_bytes") or replayed_bytes) - replayed_bytes
    rows = to_rows(labelled, at, PEAK, record.phase_at(at), slack_bytes)
    session.allocations += rows + largest_of_parts(record, labelled)
    session.live += to_curve(record, labelled)
    for metric, value in peaks.items():
        yield _sample(metric, "bytes", value)
    yield _sample("replayed_peak_bytes", "bytes", replayed_bytes)
    yield _sample("unlabelled_bytes", "bytes", unlabelled_bytes(rows))
    wrapped = record.entries >= _MOST_ENTRIES
    yield _sample("events", "events", record.entries)
    note = f"the record has only the last {_MOST_ENTRIES} events" if wrapped else ""
    yield _sample("wrapped", "", float(wrapped), note)


def holdings(workload: Workload) -> Iterator[Holding]:
    """Yield the tensors that are in use on the device, with their roles."""
    for tensor, role, name in _in_use(workload):
        if isinstance(tensor, Tensor) and tensor.device.type == workload.device.torch_device.type:
            yield Holding(tensor.untyped_storage().data_ptr(), role, name)


def _in_use(workload: Workload) -> Iterator[tuple[object, Role, str]]:
    if workload.model is not None:
        state: dict[Tensor, Mapping[str, object]] = {}
        for optimizer in workload.optimizers:
            state |= optimizer.state
        for name, parameter in workload.model.named_parameters():
            yield parameter, Role.PARAMETERS, name
            yield parameter.grad, Role.GRADIENTS, name
            # `get`: the state is a defaultdict, which an index would fill.
            for value in state.get(parameter, {}).values():
                yield value, Role.OPTIMIZER_STATE, name
        for buffer in workload.model.buffers():
            yield buffer, Role.BUFFERS, ""
    # The first holding of an address counts, and `resident` includes the parameters.
    for tensor in workload.resident:
        yield tensor, Role.INPUTS, ""
    for tensor in workload.resident:
        yield tensor.grad, Role.GRADIENTS, ""


def _step_on_record(session: Session) -> Taken:
    """Run one recorded step, and return the snapshot after it."""
    workload = session.workload
    watcher = BoundaryWatcher(workload)
    # Metadata belong to a thread, so module hooks alone would not label the backward pass.
    tracker = PartTracker(memory._set_memory_metadata)
    named = parts_named(workload.model, lambda part: tracker.name(PART_PREFIX + part))
    workload.device.synchronize()
    with _on_record():
        with named, tracker.backward_named():
            session.step(watcher)
        snapshot = memory._snapshot()
    return Taken(snapshot, {**watcher.book, AT_END: list(holdings(workload))})


@contextmanager
def _on_record() -> Iterator[None]:
    # global_record_annotations: with it, phases hold for the allocations of all threads.
    memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES,
        clear_history=True, global_record_annotations=True,
    )  # fmt: skip
    try:
        yield
    finally:
        memory._record_memory_history(None)


def _workspaces(snapshot: Snapshot) -> list[Holding]:
    """Return the workspaces of cuBLAS: the blocks that vanish when they are cleared."""
    # One for each thread that multiplies, of 32 MiB on Hopper and 8 MiB before. The next matrix
    # product allocates them again.
    torch._C._cuda_clearCublasWorkspaces()
    addresses = vanished(snapshot["segments"], memory._snapshot()["segments"])
    return [Holding(address, Role.WORKSPACE) for address in addresses]


def _replay(session: Session, taken: Taken) -> Record:
    return replay(taken.snapshot, session.workload.device.torch_device.index or 0)


def _has_weight_copies(session: Session) -> bool:
    return session.workload.facts.get("autocast_dtype") is not None


def _write(snapshot: Snapshot, artifact: Path) -> Sample:
    """Write the snapshot for memory_viz, unless it is too large; return its size or the reason."""
    packed = pickle.dumps(snapshot)
    if len(packed) > _LARGEST_SNAPSHOT_BYTES:
        size = f"{len(packed)} bytes, more than {_LARGEST_SNAPSHOT_BYTES}"
        note = f"the snapshot has {size}: not saved"
        return _sample("file_bytes", "bytes", None, note)
    artifact.write_bytes(packed)
    return _sample("file_bytes", "bytes", len(packed))


def _sample(metric: str, unit: str, value: float | None, note: str = "") -> Sample:
    return Sample("memory_snapshot", metric, unit, value, note=note)


# Recording takes about 2 µs an allocation, so the recorded steps come after all timing.
STAGES = (
    Stage("out-of-memory watched", 4, watch_out_of_memory),
    Stage("memory snapshot", 70, take_snapshot),
)
