"""Read the output of `nsys export --type sqlite`, by the tables that NVIDIA documents.

A table without rows does not exist in the export. The ranges may come from the `nvtx`
instrument or from another program: `forward`, `backward` and `optimizer` are phases, and other
ranges are parts.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from tasks.traces.parts import PART_PREFIX, PHASE_PREFIX
from tasks.traces.timeline import Activity, Launch, PhaseSpan, ThreadId, Timeline, TraceSpan

_PHASES = {
    "forward": "forward", "backward": "backward",
    "optimizer": "optimizer", "optimizer_step": "optimizer",
}  # fmt: skip
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_PUSH_POP, _START_END = 59, 60  # event types of NVTX_EVENTS
_OF_PROCESS = 0xFFFFFFFFFF000000  # the bits of a globalTid that are the process's globalPid
# Range of an operator by torch's emit_nvtx, for example "aten::mm, seq = 12, op_id = 3".
_OPERATOR = re.compile(
    r"^(?P<name>.+?)(, seq = (?P<sequence>\d+))?(, op_id = \d+)?(, sizes = .*)?$"
)
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}


def read_nsys(path: Path) -> Timeline:
    """Read an export. Raise ValueError if it is not one, or if it has no CUDA activity."""
    refusal = f"{path}: not an export of Nsight Systems"
    # As an address, because the path may contain `?`, `#` or `%`, which have a meaning there.
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in rows}
            if "StringIds" not in tables:
                raise ValueError(f"{refusal}: it has no table StringIds")
            launches = _launches(database, tables)
            phases, spans = _ranges(database, tables)
            activities = list(_activities(database, tables, launches))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{refusal}: {error}") from error
    if not activities:
        raise ValueError(f"{path}: contains no CUDA kernels: trace with --trace=cuda,nvtx")
    return Timeline(phases, spans, activities, on_device=True)


_LaunchKey = tuple[int, int]  # process and correlation id


def _launches(database: sqlite3.Connection, tables: set[str]) -> Mapping[_LaunchKey, Launch]:
    if _RUNTIME not in tables:
        return {}
    columns = "globalTid, correlationId, start"
    launches: dict[_LaunchKey, Launch] = {}
    for thread, number, start in database.execute(f"SELECT {columns} FROM {_RUNTIME}"):
        # A correlation id is unique within a process only.
        launches[thread & _OF_PROCESS, number] = Launch(thread, start)
    return launches


def _ranges(
    database: sqlite3.Connection, tables: set[str]
) -> tuple[list[PhaseSpan], Mapping[ThreadId, list[TraceSpan]]]:
    """Return phases and spans of the default domain: libraries such as NCCL use other domains."""
    phases: list[PhaseSpan] = []
    spans: dict[ThreadId, list[TraceSpan]] = defaultdict(list)
    if "NVTX_EVENTS" not in tables:
        return phases, spans
    rows = database.execute(
        """SELECT coalesce(event.text, string.value), event.start, event."end", event.globalTid
           FROM NVTX_EVENTS event LEFT JOIN StringIds string ON string.id = event.textId
           WHERE event.eventType IN (?, ?) AND event."end" IS NOT NULL
             AND coalesce(event.domainId, 0) = 0""",
        (_PUSH_POP, _START_END),
    )
    for text, start, end, thread in rows:
        phase = _phase_of(text or "")
        if phase:
            phases.append(PhaseSpan(phase, start, end))
        elif text:
            spans[thread].append(_span(text, start, end))
    return phases, spans


def _phase_of(text: str) -> str:
    if text.startswith(PHASE_PREFIX):
        return text.removeprefix(PHASE_PREFIX)
    return _PHASES.get(text.lower(), "")


def _span(text: str, start: int, end: int) -> TraceSpan:
    parsed = _OPERATOR.match(text)
    name, sequence = (parsed["name"], parsed["sequence"]) if parsed else (text, None)
    is_operator = not text.startswith(PART_PREFIX) and (sequence is not None or "::" in name)
    is_backward = is_operator and _BACKWARD.search(name) is not None
    number = int(sequence) if sequence else None
    return TraceSpan(name, is_operator, start, end, number, is_backward)


def _activities(
    database: sqlite3.Connection, tables: set[str], launches: Mapping[_LaunchKey, Launch]
) -> Iterator[Activity]:
    """Yield kernels, copies and fills, and CUDA graphs if the trace has them only as a whole."""
    names = {
        "CUPTI_ACTIVITY_KIND_KERNEL": "(SELECT value FROM StringIds WHERE id = demangledName)",
        "CUPTI_ACTIVITY_KIND_MEMCPY": "copyKind",
        "CUPTI_ACTIVITY_KIND_MEMSET": "'[CUDA memset]'",
        # By default nsys records a replayed graph as a whole, without its kernels.
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "'[CUDA graph]'",
    }
    for table, column in names.items():
        if table not in tables:
            continue
        columns = f'{column}, start, "end", globalPid, correlationId'
        rows = database.execute(f"SELECT {columns} FROM {table}")
        for name, start, end, process, correlation in rows:
            is_copy = isinstance(name, int)
            text = f"[CUDA memcpy {_COPIES.get(name, 'other')}]" if is_copy else str(name)
            yield Activity(text, start, end, launches.get((process, correlation)))
