"""Read the output of `nsys export --type sqlite`, by the tables that NVIDIA documents.

A table without rows does not exist in the export. The ranges may come from the `nvtx` instrument or
from another program, see `tasks/traces/ranges.py`. Each process and GPU has a timeline: the phases
of one process say nothing about the kernels of another one.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tasks.traces.parts import PART_PREFIX
from tasks.traces.ranges import DeviceTrace, Range, Ranges, sort_ranges
from tasks.traces.timeline import (
    BACKWARD_NODE,
    Activity,
    Launch,
    ThreadId,
    Timeline,
    TraceSpan,
    checked_times,
)

# Stands for the unknown kernels of a CUDA graph.
WHOLE_GRAPH = "[CUDA graph]"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
# The name of an activity, by the table that has it.
_ACTIVITY_NAMES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "(SELECT value FROM StringIds WHERE id = demangledName)",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copyKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "'[CUDA memset]'",
    # By default nsys records a replayed graph as a whole, without its kernels.
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"'{WHOLE_GRAPH}'",
}
_PUSH_POP, _START_END = 59, 60  # event types of NVTX_EVENTS
_OF_PROCESS = 0xFFFFFFFFFF000000  # the bits of a globalTid that are the process's globalPid
# Range of an operator by torch's emit_nvtx, for example "aten::mm, seq = 12, op_id = 3".
_OPERATOR = re.compile(
    r"^(?P<name>.+?)(, seq = (?P<sequence>\d+))?(, op_id = \d+)?(, sizes = .*)?$", re.DOTALL
)
_BACKWARD = re.compile(rf"^{BACKWARD_NODE}|Backward\d*$")
_COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}

# A row takes tens of bytes in a file, and reading it tens of instructions of SQLite. A damaged or
# hostile file can have the same pages in a tree many times, and a view or a column can compute.
_INSTRUCTIONS, _INSTRUCTIONS_PER_BYTE = 10_000_000, 20
_CHECKED_AFTER = 100_000  # instructions
_LONGEST_VALUE = 10_000_000  # bytes
_HARMLESS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA)
_FUNCTIONS = ("coalesce", "count")


def read_nsys(path: Path, chosen: Mapping[str, str]) -> Mapping[str, DeviceTrace]:
    """Read an export as a trace for each process and GPU; one alone has an empty name.

    chosen: phases by the names of ranges. Raise ValueError if it is no export, or if it has no CUDA
    activity.
    """
    refusal = f"{path}: not an export of Nsight Systems"
    try:
        with _opened(path) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in rows}
            if "StringIds" not in tables:
                raise ValueError("it has no table StringIds")
            _require_stored_columns(database, tables)
            launches = _launches(database, tables)
            ranges = _ranges(database, tables)
            activities = _activities(database, tables, launches)
    # The columns may hold values of any type.
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise ValueError(f"{refusal}: {error}") from error
    if not activities:
        raise ValueError(f"{path}: contains no CUDA kernels: trace with --trace=cuda,nvtx")
    traces = {}
    sorted_ranges = {}
    for process, own in ranges.items():
        nodes = (one for one in own if one.text.startswith(BACKWARD_NODE))
        sorted_ranges[process] = sort_ranges(own, chosen, nodes)
    for (process, device), works in sorted(activities.items()):
        of_process = sorted_ranges.get(process) or sort_ranges((), chosen)
        name = f"process {process >> 24 & 0xFFFFFF}, GPU {device}" if len(activities) > 1 else ""
        traces[name] = DeviceTrace(_timeline(of_process, works), of_process)
    return traces


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield the database of an export, in which nothing but stored rows can be read."""
    # As an address, because the path may contain `?`, `#` or `%`, which have a meaning there.
    address = f"{path.absolute().as_uri()}?mode=ro"
    checks_left = (_INSTRUCTIONS + _INSTRUCTIONS_PER_BYTE * path.stat().st_size) // _CHECKED_AFTER
    checks = iter(range(checks_left))
    with closing(sqlite3.connect(address, uri=True)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        database.set_authorizer(_authorize)
        # A true answer interrupts the query.
        database.set_progress_handler(lambda: next(checks, None) is None, _CHECKED_AFTER)
        yield database


def _authorize(action: int, _: str | None, name: str | None, *place: str | None) -> int:
    """Allow our own queries, but no view, table or trigger that computes its rows."""
    is_harmless = action in _HARMLESS or (action == sqlite3.SQLITE_FUNCTION and name in _FUNCTIONS)
    of_view = place[-1] is not None
    return sqlite3.SQLITE_OK if is_harmless and not of_view else sqlite3.SQLITE_DENY


def _require_stored_columns(database: sqlite3.Connection, tables: set[str]) -> None:
    """Raise ValueError for a table that is read and computes one of its columns."""
    for table in tables & {"StringIds", "NVTX_EVENTS", _RUNTIME, *_ACTIVITY_NAMES}:
        columns = database.execute(f"PRAGMA table_xinfo({table})")
        if any(hidden for *_, hidden in columns):
            raise ValueError(f"its table {table} has a column that is computed")


def _timeline(ranges: Ranges, activities: Sequence[Activity]) -> Timeline:
    spans: dict[ThreadId, list[TraceSpan]] = defaultdict(list)
    for one in ranges.parts:
        spans[one.thread].append(_span(one.text, one.start_ns, one.end_ns))
    measured = [one for one in activities if not ranges.is_warmup(one.begun_ns)]
    return Timeline(ranges.phases, spans, measured, on_device=True)


_LaunchKey = tuple[int, int]  # process and correlation id


def _launches(database: sqlite3.Connection, tables: set[str]) -> Mapping[_LaunchKey, Launch]:
    if _RUNTIME not in tables:
        return {}
    columns = "globalTid, correlationId, start"
    launches: dict[_LaunchKey, Launch] = {}
    for thread, number, start in database.execute(f"SELECT {columns} FROM {_RUNTIME}"):
        # A correlation id is unique within a process only.
        launches[thread & _OF_PROCESS, number] = Launch(thread, checked_times(start, start)[0])
    return launches


def _ranges(database: sqlite3.Connection, tables: set[str]) -> Mapping[int, list[Range]]:
    """Return the ranges of each process in the default domain; libraries such as NCCL use others."""
    ranges: dict[int, list[Range]] = defaultdict(list)
    if "NVTX_EVENTS" not in tables:
        return ranges
    rows = database.execute(
        """SELECT coalesce(event.text, string.value), event.start, event."end", event.globalTid
           FROM NVTX_EVENTS event LEFT JOIN StringIds string ON string.id = event.textId
           WHERE event.eventType IN (?, ?) AND event."end" IS NOT NULL
             AND coalesce(event.domainId, 0) = 0""",
        (_PUSH_POP, _START_END),
    )
    for text, start, end, thread in rows:
        if text:
            ranges[thread & _OF_PROCESS].append(Range(text, *checked_times(start, end), thread))
    return ranges


def _span(text: str, start: int, end: int) -> TraceSpan:
    name, sequence = text, None
    if parsed := _OPERATOR.match(text):
        name, sequence = parsed["name"], parsed["sequence"]
    is_operator = not text.startswith(PART_PREFIX) and (sequence is not None or "::" in name)
    is_backward = is_operator and _BACKWARD.search(name) is not None
    number = int(sequence) if sequence else None
    return TraceSpan(name, is_operator, start, end, number, is_backward)


def _activities(
    database: sqlite3.Connection, tables: set[str], launches: Mapping[_LaunchKey, Launch]
) -> Mapping[tuple[int, int], list[Activity]]:
    """Return kernels, copies, fills and whole CUDA graphs of each process and GPU."""
    activities: dict[tuple[int, int], list[Activity]] = defaultdict(list)
    for table, column in _ACTIVITY_NAMES.items():
        if table not in tables:
            continue
        columns = f'{column}, start, "end", deviceId, globalPid, correlationId'
        rows = database.execute(f"SELECT {columns} FROM {table}")
        for name, start, end, device, process, correlation in rows:
            if isinstance(name, int):  # the kind of a copy
                name = f"[CUDA memcpy {_COPIES.get(name, 'other')}]"
            launch, times = launches.get((process, correlation)), checked_times(start, end)
            activities[int(process), int(device)].append(Activity(str(name), *times, launch))
    return activities
