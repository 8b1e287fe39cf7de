"""The journal of an attempt: the measuring process writes it line by line, the supervisor reads it.

Each line is a JSON object with the wall-clock time and the seconds since the first line. The seconds
are stored too because the wall clock may be set back while a cell is measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample


@dataclass(frozen=True)
class FinalStatus:
    """The status that a measuring process reports in the last line of its journal."""

    status: Status
    evidence: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """Writes the journal of one attempt to an open stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._writer = os.getpid()

    def stage(self, name: str) -> None:
        self._write({"stage": name})

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._write({"facts": dict(facts)})

    def samples(self, samples: Iterable[Sample]) -> None:
        self._write({"samples": [asdict(sample) for sample in samples]})

    def kernels(self, rows: Iterable[KernelRow]) -> None:
        self._write({"kernels": [asdict(row) for row in rows]})

    def allocations(self, rows: Iterable[AllocationRow]) -> None:
        self._write({"allocations": [asdict(row) for row in rows]})

    def live(self, rows: Iterable[LiveRow]) -> None:
        self._write({"live": [asdict(row) for row in rows]})

    def end(self, final: FinalStatus) -> None:
        """Write the last line. Once it is on disk, the attempt is finished whatever happens next."""
        self._write({"status": final.status, "evidence": dict(final.evidence)})
        if self._stream.isatty() or not self._stream.seekable():
            return
        os.fsync(self._stream.fileno())

    def _write(self, entry: dict[str, Any]) -> None:
        # A step that forks (a data loader, say) may return here in the child, whose copy of the
        # stream would write every line a second time.
        if os.getpid() != self._writer:
            os._exit(1)
        times = {"time": time.time(), "after_s": time.monotonic() - self._began}
        line = json.dumps({**times, **entry}, default=str, ensure_ascii=False)
        # Parquet stores UTF-8, which cannot hold a lone surrogate.
        self._stream.write(line.encode(errors="replace").decode() + "\n")
        self._stream.flush()


@dataclass(frozen=True)
class JournalContents:
    """Everything that a journal holds, complete or torn.

    stage_s: the seconds spent in each stage; for the last one, up to the last line.
    final: None if the process ended before it wrote its last line.
    """

    started_at: float = 0.0
    wall_s: float = 0.0
    stage: str = ""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    allocations: tuple[AllocationRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    final: FinalStatus | None = None


def read_journal(path: Path) -> JournalContents:
    """Read the complete lines of a journal. Without a file, return empty contents.

    A process that was killed while it wrote leaves half a line at the end, which is ignored.
    """
    if not path.exists():
        return JournalContents()
    entries = list(_complete_lines(path))
    if not entries:
        return JournalContents()
    after_s = [_seconds_after_first(entry, entries[0]) for entry in entries]
    final = None
    for entry in entries:
        if "status" in entry:
            final = FinalStatus(Status(entry["status"]), entry["evidence"])
    return JournalContents(
        started_at=entries[0]["time"],
        wall_s=after_s[-1],
        stage=_last_stage(entries),
        stage_s=_seconds_by_stage(entries, after_s),
        facts=_merged_facts(entries),
        samples=tuple(Sample(**row) for row in _rows(entries, "samples")),
        kernels=tuple(KernelRow(**row) for row in _rows(entries, "kernels")),
        allocations=tuple(AllocationRow(**row) for row in _rows(entries, "allocations")),
        live=tuple(LiveRow(**row) for row in _rows(entries, "live")),
        final=final,
    )


def _complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _seconds_after_first(entry: Mapping[str, Any], first: Mapping[str, Any]) -> float:
    # Journals of older versions have wall-clock times only.
    return float(entry.get("after_s", entry["time"] - first["time"]))


def _last_stage(entries: Iterable[Mapping[str, Any]]) -> str:
    names = [entry["stage"] for entry in entries if "stage" in entry]
    return names[-1] if names else ""


def _seconds_by_stage(
    entries: Iterable[Mapping[str, Any]], after_s: Iterable[float]
) -> dict[str, float]:
    seconds: dict[str, float] = {}
    stage, before_s = "", 0.0
    for entry, now_s in zip(entries, after_s, strict=True):
        if stage:
            seconds[stage] = seconds.get(stage, 0.0) + now_s - before_s
        stage, before_s = entry.get("stage", stage), now_s
    return seconds


def _merged_facts(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for entry in entries:
        facts |= entry.get("facts", {})
    return facts


def _rows(entries: Iterable[Mapping[str, Any]], table: str) -> Iterator[dict[str, Any]]:
    for entry in entries:
        yield from entry.get(table, ())
