"""Import traces and memory snapshots of other programs into a run, each as an attempt at a cell.

A file is recognised by its content: JSON of torch.profiler, also gzipped; an SQLite export or a
report of Nsight Systems; or a memory snapshot of torch. Each process and GPU becomes a cell.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from orchestrator.common.errors import ConfigError, RunError
from orchestrator.common.hashing import file_digest
from orchestrator.execution.nsys import read_report
from orchestrator.execution.program import import_path
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import store_cells
from tasks.snapshots.attribution import attribute as label
from tasks.snapshots.read_pickle import read_snapshot
from tasks.snapshots.replay import Record, replay
from tasks.snapshots.summary import (
    AT_END_OF_RECORD,
    PEAK,
    largest_of_parts,
    to_curve,
    unlabelled_bytes,
)
from tasks.snapshots.summary import to_rows as to_allocations
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.messages import error_text, escape_unprintable
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import ImportedParams
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample
from tasks.traces.attribution import attribute
from tasks.traces.chrome import read_chrome_devices
from tasks.traces.nsys import WHOLE_GRAPH
from tasks.traces.ranges import PHASE_NAMES, DeviceTrace
from tasks.traces.summary import to_rows, to_samples

_SQLITE, _GZIP, _PICKLE = b"SQLite format 3\0", b"\x1f\x8b", b"\x80"
_SHOWN_RANGES = 8
_LARGEST = 2**52  # bytes or µs (142 years); sums of them fit 63 bits
_MOST_RANKS = 1000  # each becomes a cell
# CPU seconds to read a pickle. A snapshot of 100 MB takes 3 s.
_PICKLE_S, _PICKLE_BYTES_PER_S = 5, 4 * 1024**2
_READ_PICKLE = """
import resource, sys
from pathlib import Path
from tasks.snapshots.read_pickle import read_snapshot
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
read_snapshot(Path(sys.argv[2]))
"""
# Memory to read a file: the objects of a trace take up to 40 times its bytes, and the text in a
# compressed one 20 times. A few bytes of a hostile file ask for 16 GiB.
_MEMORY_BYTES, _MEMORY_PER_BYTE = 2 * 1024**3, 200


@dataclass(frozen=True)
class ImportOptions:
    """Facts about a trace that the user states.

    phases: phases by the names of ranges. steps: number of steps in the trace, None to count them.
    """

    phases: Mapping[str, str] = field(default_factory=dict)
    steps: int | None = None


@dataclass(frozen=True)
class _Measured:
    """The rows of one process and GPU. notes: sentences for the user."""

    samples: Sequence[Sample]
    kernels: Sequence[KernelRow] = ()
    allocations: Sequence[AllocationRow] = ()
    live: Sequence[LiveRow] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Imported:
    """The ids of the cells made from a file, and sentences about what the file does not contain."""

    cells: tuple[str, ...]
    notes: tuple[str, ...]


def import_file(file: Path, run: Run, options: ImportOptions | None = None) -> Imported:
    """Add a file to the run as cells. Raise RunError or PlatformError.

    A file that is imported again becomes another attempt at its cells. A cell includes the digest
    of the file, so that another file of the same name becomes another cell.
    """
    started_at, started_s = time.time(), time.monotonic()
    task, read = _reader(file)
    remedy = "Write the file again with the program that made it"
    try:
        with _limited_memory(file):
            measured = read(file, options or ImportOptions())
    except (ValueError, OSError) as error:
        raise RunError(str(error), remedy) from error
    except MemoryError as error:
        raise RunError(f"{file}: reading it takes too much memory for its size", remedy) from error
    content = file_digest(file)[:12]
    # Bytes of a name that are not UTF-8 are halves of surrogate pairs, which no table holds.
    name = file.name.encode(errors="backslashreplace").decode()
    cells, notes = [], []
    with open_for_writing(run) as writer:
        if not run.exists:
            writer.write_manifest({"name": run.folder.name})
        highest = writer.highest_attempts()
        for rank, own in measured.items():
            cell = Cell(task, 1, ImportedParams(file=name, content=content, rank=rank))
            wall_s = time.monotonic() - started_s
            number = 1 + highest.get(cell.id, 0)
            attempt = Attempt(cell, number, str(run.attempt_folder(cell.id, number)), Settings())
            outcome = _outcome(attempt, own, started_at, wall_s)
            # Cells of files with the same name differ only by the digest in their parameters.
            facts = {"imported_from": escape_unprintable(str(file))}
            writer.append(replace(outcome, facts=facts), None)
            cells.append(cell.id)
            notes += [": ".join(filter(None, [str(file), rank, note])) for note in own.notes]
        store_cells(writer)
    return Imported(tuple(cells), tuple(dict.fromkeys(notes)))


@contextmanager
def _limited_memory(file: Path) -> Iterator[None]:
    """Raise MemoryError in the body if it takes too much memory for a file, where Linux can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = (
        _MEMORY_BYTES + _MEMORY_PER_BYTE * file.stat().st_size + psutil.Process().memory_info().vms
    )
    # A report is exported by nsys, which would inherit the limit.
    is_read_here = file.suffix != ".nsys-rep"
    if is_read_here and (soft == resource.RLIM_INFINITY or most < soft):
        with suppress(ValueError, OSError):  # another system
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_Reader = Callable[[Path, ImportOptions], Mapping[str, _Measured]]


def _reader(file: Path) -> tuple[str, _Reader]:
    """Return the task and the reader for a file, by its first bytes."""
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise RunError(f"{file}: {problem}", "Name a trace or a memory snapshot")
    with file.open("rb") as opened:
        head = opened.read(256)
    if head.startswith(_SQLITE) or file.suffix == ".nsys-rep":
        return "nsys", partial(_read_traces, read_report)
    if head.startswith(_GZIP) or head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "kineto", partial(_read_traces, read_chrome_devices)
    if head.startswith(_PICKLE):
        return "snapshot", _read_snapshot
    raise RunError(
        f"{file}: is neither a trace nor a memory snapshot",
        "Name JSON of torch.profiler, an SQLite export or .nsys-rep file of Nsight Systems, or a"
        " snapshot of torch.cuda.memory._dump_snapshot",
    )


def _read_traces(
    read: Callable[[Path, Mapping[str, str]], Mapping[str, DeviceTrace]],
    file: Path,
    options: ImportOptions,
) -> Mapping[str, _Measured]:
    traces = read(file, options.phases)
    _require_few_ranks(file, traces)
    return {rank: _of_trace(trace, options) for rank, trace in traces.items()}


def _require_few_ranks(file: Path, ranks: Collection[object]) -> None:
    if len(ranks) > _MOST_RANKS:
        raise ValueError(
            f"{file}: has {len(ranks):,} processes and GPUs, more than {_MOST_RANKS:,}"
        )


def _of_trace(trace: DeviceTrace, options: ImportOptions) -> _Measured:
    steps = options.steps or trace.ranges.steps
    works = attribute(trace.timeline)
    samples = tuple(to_samples(works, steps, trace.timeline.on_device))
    return _Measured(samples, to_rows(works, steps), notes=tuple(_notes(trace, steps)))


def _notes(trace: DeviceTrace, steps: int | None) -> Iterator[str]:
    graphs = sum(activity.name == WHOLE_GRAPH for activity in trace.timeline.activities)
    if graphs:
        yield (
            f"{graphs} CUDA graphs were traced as a whole, so their kernels are unknown. Trace again"
            " with --cuda-graph-trace=node"
        )
    yield from _missing_work(trace)
    found = {phase.name for phase in trace.ranges.phases}
    missing = [phase for phase in PHASE_NAMES if phase not in found]
    # An inference has a forward pass alone.
    if missing and found != {PHASE_NAMES[0]}:
        names = list(dict.fromkeys(one.text for one in trace.ranges.parts))[:_SHOWN_RANGES]
        shown = (
            f"its ranges are {', '.join(names)}"
            if names
            else f"it has no{' other' if found else ''} ranges"
        )
        yield (
            f"no range is {' or '.join(missing) if found else 'a phase'}: {shown}. Phases are ranges"
            f" such as {', '.join(PHASE_NAMES)}; name others with --phase NAME=forward"
        )
    if steps is None:
        yield (
            "the number of its steps is not known, so all values are those of the whole trace."
            " State it with --steps N"
        )


def _missing_work(trace: DeviceTrace) -> Iterator[str]:
    if trace.is_guess:
        yield (
            "several processes of it have the same ids, and their events are mixed, so their work is"
            " split by the order in time, or not at all. Import the trace of each rank instead"
        )
    activities = trace.timeline.activities
    if trace.timeline.on_device and not activities:
        yield (
            "it has launches but no kernels, so it has no times of the device. Record the activities"
            " of the device too"
        )
    without = sum(activity.launch is None for activity in activities)
    if 2 * without > len(activities):
        yield (
            f"{without} of its {len(activities)} kernels and copies have no launch, so their phase"
            " and module are unknown. Record the activities of the CPU too"
        )


def _require_readable(file: Path) -> None:
    """Raise ValueError for a pickle that ends the process that reads it, or never ends.

    A key that is a pair of pairs of pairs and so on needs few bytes, and for ever to be hashed.
    """
    limit_s = _PICKLE_S + file.stat().st_size // _PICKLE_BYTES_PER_S
    words = [sys.executable, "-P", "-c", _READ_PICKLE, str(limit_s), str(file)]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    if subprocess.run(words, env=environment, capture_output=True).returncode < 0:
        raise ValueError(
            f"{file}: not a memory snapshot: reading it crashes, or takes more than {limit_s} s"
        )


def _read_snapshot(file: Path, options: ImportOptions) -> Mapping[str, _Measured]:
    _require_readable(file)
    snapshot = read_snapshot(file)
    try:
        devices = {segment["device"] for segment in snapshot["segments"]}
        for index, events in enumerate(snapshot["device_traces"]):
            if events:
                devices.add(index)
        _require_few_ranks(file, devices)
        measured = {}
        for device in sorted(devices):
            rank = f"GPU {device}" if len(devices) > 1 else ""
            measured[rank] = _of_record(replay(snapshot, device, options.phases))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: not a memory snapshot: {error_text(error)}") from error
    if not measured:
        raise ValueError(f"{file}: contains no allocations")
    return measured


def _of_record(record: Record) -> _Measured:
    for number in (*record.times_us, *(one.size_bytes for one in record.allocations)):
        if not isinstance(number, int) or not 0 <= number <= _LARGEST:
            raise ValueError(f"{number!r} in it is neither a time nor a size")
    labelled, at = label(record, {}), record.peak()
    moment, slack = PEAK, None
    notes: tuple[str, ...] = ()
    if not record.entries:
        # The blocks of the allocator are known at the end of the record only.
        moment, slack = AT_END_OF_RECORD, record.rounding_bytes
        notes = (
            "it has no record of allocations, only what was alive when it was taken. Record with"
            " torch.cuda.memory._record_memory_history()",
        )
    rows = to_allocations(labelled, at, moment, record.phase_at(at), slack)
    samples = [
        Sample("memory_snapshot", "replayed_peak_bytes", "bytes", record.live_bytes_at(at)),
        Sample("memory_snapshot", "unlabelled_bytes", "bytes", unlabelled_bytes(rows)),
        Sample("memory_snapshot", "events", "events", record.entries),
    ]
    in_step = largest_of_parts(record, labelled) if record.entries else []
    return _Measured(samples, (), rows + in_step, to_curve(record, labelled), notes)


def _outcome(attempt: Attempt, own: _Measured, started_at: float, wall_s: float) -> Outcome:
    return Outcome(
        attempt,
        Status.OK,
        stage="",
        phase="",
        evidence={},
        facts={},
        samples=tuple(own.samples),
        started_at=started_at,
        wall_s=wall_s,
        kernels=tuple(own.kernels),
        allocations=tuple(own.allocations),
        live=tuple(own.live),
    )


def parse_phases(texts: Iterable[str]) -> dict[str, str]:
    """Return phases by the names of ranges, from texts such as `fwd=forward`."""
    phases = {}
    for text in texts:
        name, _, phase = text.rpartition("=")
        if not name or phase not in PHASE_NAMES:
            allowed = ", ".join(PHASE_NAMES)
            raise ConfigError(f"--phase {text}: is not NAME=PHASE", f"PHASE is one of {allowed}")
        phases[name] = phase
    return phases
