"""The journal of an attempt, which the measuring process writes and the supervisor reads.

Each line is a JSON object with the wall-clock time and the seconds since the first line.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, TypeVar

from tasks.process import clock
from tasks.spec.axes import Values
from tasks.spec.fields import require_types
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample

Record = TypeVar("Record")
_CHECKSUM = b', "checksum": '  # CRC32 of everything before it, the last key of the last line


@dataclass(frozen=True)
class FinalStatus:
    """The status that a measuring process reports in the last line of its journal."""

    status: Status
    evidence: Mapping[str, object] = field(default_factory=dict)


class Journal:
    """Writer of the journal of one attempt to an open stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = clock.monotonic()
        self._writer = os.getpid()
        self._checksum = 0  # of the lines so far

    def stage(self, name: str) -> None:
        self._write({"stage": name})

    def facts(self, facts: Mapping[str, object]) -> None:
        self._write({"facts": dict(facts)})

    def rows(
        self, table: str, rows: Iterable[Sample | KernelRow | AllocationRow | LiveRow]
    ) -> None:
        """Write rows of a table: `samples`, `kernels`, `allocations` or `live`."""
        self._write({table: list(map(asdict, rows))})

    def end(self, final: FinalStatus) -> None:
        """Write the last line. Once it is on disk, the attempt is finished."""
        self._write({"status": final.status, "evidence": dict(final.evidence)})
        # A cell that is measured by hand writes to a terminal or a pipe, which cannot be synced.
        if stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            os.fsync(self._stream.fileno())

    def _write(self, entry: Mapping[str, object]) -> None:
        # A step that forks (a data loader, say) may return here in the child, whose copy of the
        # stream would write every line a second time.
        if os.getpid() != self._writer:
            os._exit(1)
        # The seconds are stored, too, because the wall clock may be set back.
        times = {"time": time.time(), "after_s": clock.monotonic() - self._began}
        line = json.dumps({**times, **entry}, default=str, ensure_ascii=False)
        # Parquet stores UTF-8, which cannot hold a lone surrogate.
        content = line.encode(errors="replace")
        if "status" in entry:
            self._checksum = zlib.crc32(content[:-1], self._checksum)
            content = content[:-1] + _CHECKSUM + b"%d}" % self._checksum
        content += b"\n"
        self._checksum = zlib.crc32(content, self._checksum)
        self._stream.write(content.decode())
        self._stream.flush()


@dataclass(frozen=True)
class JournalContents:
    """The contents of a journal, which may lack its end.

    stage_s: seconds spent in each stage; for the last one, up to the last line.
    final: None if the process ended before it wrote its last line.
    """

    started_at: float = 0.0
    wall_s: float = 0.0
    stage: str = ""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    allocations: tuple[AllocationRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    final: FinalStatus | None = None


def read_journal(path: Path) -> JournalContents:
    """Read the complete lines of a journal. Without a file, return empty contents.

    A journal that was damaged after its end was written, or that holds other records, counts as
    empty.
    """
    content = path.read_bytes() if path.exists() else b""
    before, mark, end = content.rpartition(_CHECKSUM)
    checksum = end.rstrip(b"}\n")
    # Journals of older versions have none, and a process may be killed while it writes one.
    has_checksum = bool(mark) and checksum.isdigit() and b"}" in end
    if has_checksum and int(checksum) != zlib.crc32(before):
        return JournalContents()
    entries = list(_complete_lines(content))
    try:
        return _contents(entries) if entries else JournalContents()
    # Lines of something else: a model may replace json.dumps, or write into the file.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return JournalContents()


def _contents(entries: Sequence[Values]) -> JournalContents:
    stage, before_s, final = "", 0.0, None
    stage_s: dict[str, float] = {}
    facts: dict[str, object] = {}
    rows: dict[str, list[Values]] = defaultdict(list)
    for entry in entries:
        # Journals of older versions have wall-clock times only.
        now_s = float(entry.get("after_s", entry["time"] - entries[0]["time"]))
        if stage:
            stage_s[stage] = stage_s.get(stage, 0.0) + now_s - before_s
        stage, before_s = entry.get("stage", stage), now_s
        facts |= {**entry.get("facts", {})}  # `{**…}` raises TypeError for anything but an object
        for table in ("samples", "kernels", "allocations", "live"):
            rows[table] += entry.get(table, ())
        if "status" in entry:
            final = FinalStatus(Status(entry["status"]), {**entry["evidence"]})
    datetime.fromtimestamp(entries[0]["time"], UTC)  # as the row of the attempt has it
    if not isinstance(stage, str) or not math.isfinite(before_s):
        raise TypeError("it has a stage or a time of another type")
    return JournalContents(
        started_at=float(entries[0]["time"]),
        wall_s=before_s,
        stage=stage,
        stage_s=stage_s,
        facts=facts,
        samples=_records(Sample, rows["samples"]),
        kernels=_records(KernelRow, rows["kernels"]),
        allocations=_records(AllocationRow, rows["allocations"]),
        live=_records(LiveRow, rows["live"]),
        final=final,
    )


def _records(kind: Callable[..., Record], rows: Iterable[Values]) -> tuple[Record, ...]:
    records = tuple(kind(**row) for row in rows)
    for record in records:
        require_types(record)
    return records


def _complete_lines(content: bytes) -> Iterator[Values]:
    for line in content.split(b"\n"):
        try:
            entry = json.loads(line)
        # A process that was killed while it wrote leaves half a line at the end.
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
