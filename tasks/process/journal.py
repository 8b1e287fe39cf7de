"""What a measuring process writes as it goes: one JSON object a line, each with the time, and with how long after the
journal's beginning it is: the clock on the wall may have been put back meanwhile. `records` reads it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from tasks.spec.records import AllocationRow, Ending, KernelRow, LiveRow, Sample


class Journal:
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

    def end(self, ending: Ending) -> None:
        """The last line: once it is on disk, the attempt is finished whatever happens next."""
        self._write({"status": ending.status, "evidence": dict(ending.evidence)})
        if self._stream.isatty() or not self._stream.seekable():
            return
        os.fsync(self._stream.fileno())

    def _write(self, entry: dict[str, Any]) -> None:
        if (
            os.getpid() != self._writer
        ):  # what is measured forked, and its copy of us came back from there
            os._exit(1)
        times = {"time": time.time(), "after_s": time.monotonic() - self._began}
        line = json.dumps({**times, **entry}, default=str, ensure_ascii=False)
        self._stream.write(
            line.encode(errors="replace").decode() + "\n"
        )  # a lone surrogate fits in no Parquet
        self._stream.flush()
