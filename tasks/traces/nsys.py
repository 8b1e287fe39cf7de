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

from tasks.traces.timeline import (
    PART_PREFIX,
    PHASE_PREFIX,
    Activity,
    Launch,
    PhaseSpan,
    ThreadId,
    Timeline,
    TraceSpan,
    WorkKind,
)

_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "optimizer_step": "optimizer",
}
_PUSH_POP, _START_END = 59, 60  # event types of NVTX_EVENTS
_OF_PROCESS = 0xFFFFFFFFFF000000  # the bits of a globalTid that are the process's globalPid
# What torch's emit_nvtx calls the range of an operator: "aten::mm, seq = 12, op_id = 3".
_OPERATOR = re.compile(
    r"^(?P<name>.+?)(, seq = (?P<sequence>\d+))?(, op_id = \d+)?(, sizes = .*)?$"
)
_COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}


def read_nsys(path: Path) -> Timeline:
    """Read an export. Raise ValueError if it is not one, or if it has no CUDA activity."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {
                name
                for (name,) in database.execute(
                    "SELECT name FROM sqlite_master WHERE type = 'table'"
                )
            }
            if "StringIds" not in tables:
                raise ValueError(
                    f"{path}: is no export of Nsight Systems: it has no table StringIds"
                )
            launches = _launches(database, tables)
            phases, spans = _ranges(database, tables)
            activities = list(_activities(database, tables, launches))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: is no export of Nsight Systems: {error}") from error
    if not activities:
        raise ValueError(f"{path}: holds no CUDA kernels: trace with --trace=cuda,nvtx")
    return Timeline(phases, spans, activities, on_device=True)


_LaunchKey = tuple[int, int]  # process and correlation id


def _launches(database: sqlite3.Connection, tables: set[str]) -> Mapping[_LaunchKey, Launch]:
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in tables:
        return {}
    rows = database.execute(
        "SELECT globalTid, correlationId, start FROM CUPTI_ACTIVITY_KIND_RUNTIME"
    )
    return {
        (thread & _OF_PROCESS, correlation): Launch(thread, start)
        for thread, correlation, start in rows
    }


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
    return (
        text.removeprefix(PHASE_PREFIX)
        if text.startswith(PHASE_PREFIX)
        else _PHASES.get(text.lower(), "")
    )


def _span(text: str, start: int, end: int) -> TraceSpan:
    parsed = _OPERATOR.match(text)
    name, sequence = (parsed["name"], parsed["sequence"]) if parsed else (text, None)
    is_operator = not text.startswith(PART_PREFIX) and (sequence is not None or "::" in name)
    backward = name.startswith("autograd::engine::evaluate_function") or bool(
        re.search(r"Backward\d*$", name)
    )
    return TraceSpan(
        name,
        WorkKind.OPERATOR if is_operator else WorkKind.PART,
        start,
        end,
        int(sequence) if sequence else None,
        backward and is_operator,
    )


def _activities(
    database: sqlite3.Connection, tables: set[str], launches: Mapping[_LaunchKey, Launch]
) -> Iterator[Activity]:
    """Yield kernels, copies and fills, and CUDA graphs if the trace has them only as a whole."""
    names = {
        "CUPTI_ACTIVITY_KIND_KERNEL": "(SELECT value FROM StringIds WHERE id = demangledName)",
        "CUPTI_ACTIVITY_KIND_MEMCPY": "copyKind",
        "CUPTI_ACTIVITY_KIND_MEMSET": "'[CUDA memset]'",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "'[CUDA graph]'",
    }
    for table, name in names.items():
        if table not in tables:
            continue
        for named, start, end, process, correlation in database.execute(
            f'SELECT {name}, start, "end", globalPid, correlationId FROM {table}'
        ):
            text = (
                f"[CUDA memcpy {_COPIES.get(named, 'other')}]"
                if isinstance(named, int)
                else str(named)
            )
            yield Activity(text, start, end, launches.get((process, correlation)))
