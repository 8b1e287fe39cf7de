"""Traces written by hand, in the forms that torch.profiler (Kineto) and `nsys export --type sqlite` give them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 100, 200  # threads of the host
PROCESS = 4242


class KinetoTrace:
    """Times in µs. Events as torch 2.11 to 2.13 write them, arrows and metadata included."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": PROCESS, "tid": 0, "args": {}}
        ]
        self._correlation = 0

    def phase(self, name: str, start: float, end: float) -> None:
        self._host("user_annotation", f"phase::{name}", start, end, MAIN, {})

    def module(self, path: str, start: float, end: float, thread: int = MAIN) -> None:
        self._host("user_annotation", f"mod::{path}", start, end, thread, {})

    def operator(
        self,
        name: str,
        start: float,
        end: float,
        thread: int = MAIN,
        sequence: int | None = None,
        backward: bool = False,
    ) -> None:
        numbers = (
            {}
            if sequence is None
            else {"Sequence number": sequence, "Fwd thread id": 1 if backward else 0}
        )
        self._host("cpu_op", name, start, end, thread, numbers)

    def kernel(
        self,
        name: str,
        launched: float | None,
        start: float,
        end: float,
        thread: int = MAIN,
        stream: int = 7,
        driver: bool = False,
    ) -> None:
        """launched: None for a kernel that the trace has no launch of."""
        self._correlation += 1
        if launched is not None:
            call, category = (
                ("cuLaunchKernelEx", "cuda_driver")
                if driver
                else ("cudaLaunchKernel", "cuda_runtime")
            )
            self._host(
                category,
                call,
                launched,
                launched + 2,
                thread,
                {"correlation": self._correlation, "cbid": 211},
            )
            self.events.append(
                {
                    "ph": "s",
                    "id": self._correlation,
                    "pid": PROCESS,
                    "tid": thread,
                    "ts": launched,
                    "cat": "ac2g",
                }
            )
        category = {"Memc": "gpu_memcpy", "Mems": "gpu_memset"}.get(name[:4], "kernel")
        numbers = {"correlation": self._correlation, "stream": stream, "device": 0}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": numbers,
            }
        )

    @property
    def text(self) -> bytes:
        return json.dumps(
            {"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": self.events}
        ).encode()

    def write(self, path: Path) -> Path:
        path.write_bytes(self.text)
        return path

    def _host(
        self,
        category: str,
        name: str,
        start: float,
        end: float,
        thread: int,
        details: dict[str, Any],
    ) -> None:
        place = {"pid": PROCESS, "tid": thread, "ts": start, "dur": end - start}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                **place,
                "args": {"External id": 1, **details},
            }
        )


def training_step() -> KinetoTrace:
    """A forward pass of two modules, their backward pass on another thread, an optimizer; 10 µs a kernel, one after another."""
    trace = KinetoTrace()
    trace.phase("forward", 0, 100)
    trace.module("token_embeddings", 2, 9)
    trace.operator(
        "aten::view", 4, 6, sequence=7
    )  # which has the number that the next recorded operator gets
    trace.module("layers.0.attn.q_proj", 10, 40)
    trace.operator("aten::linear", 12, 38, sequence=7)
    trace.operator("aten::mm", 14, 36, sequence=7)
    trace.kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNN", 20, 50, 60)
    trace.module("layers.0.ln1", 50, 90)
    trace.operator("aten::mul", 52, 88, sequence=8)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", 60, 60, 70)
    trace.phase("backward", 110, 300)
    for name, sequence, start, kernel in (
        (
            "MulBackward0",
            8,
            120,
            "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>",
        ),
        ("MmBackward0", 7, 160, "nvjet_tst_64x64_NTN"),
    ):
        evaluated = f"autograd::engine::evaluate_function: {name}"
        trace.operator(evaluated, start, start + 30, AUTOGRAD, sequence, backward=True)
        trace.operator(name, start + 1, start + 29, AUTOGRAD, sequence, backward=True)
        trace.operator("aten::mm" if "Mm" in name else "aten::mul", start + 2, start + 28, AUTOGRAD)
        trace.kernel(kernel, start + 10, start + 20, start + 30, AUTOGRAD, driver="nvjet" in kernel)
    trace.operator(
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 200, 230, AUTOGRAD
    )
    trace.operator("aten::copy_", 202, 228, AUTOGRAD)
    trace.kernel("Memcpy DtoD (Device -> Device)", 210, 220, 230, AUTOGRAD)
    trace.phase("optimizer", 310, 400)
    trace.operator("aten::_foreach_add_", 320, 340)
    trace.kernel(
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<>", 330, 340, 350
    )
    return trace


_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, gridX INTEGER, blockX INTEGER, graphNodeId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
_MEMCPY = """
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
"""


class NsysExport:
    """Times in ns. Thread and process ids are serialised as nsys does it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._strings: list[str] = []
        self._correlation = 0
        self._execute(_SCHEMA)

    def range(
        self,
        text: str,
        start: int,
        end: int,
        thread: int = MAIN,
        start_end: bool = False,
        domain: int = 0,
    ) -> None:
        """A text of an even length is stored beside the range, another among the strings: both occur."""
        inline = len(text) % 2 == 0
        values = (start, end, 60 if start_end else 59, text if inline else None, _global(thread))
        values += (None if inline else self._string(text), domain)
        self._insert(
            "NVTX_EVENTS", "start, end, eventType, text, globalTid, textId, domainId", values
        )

    def kernel(
        self,
        name: str,
        launched: int | None,
        start: int,
        end: int,
        thread: int = MAIN,
        process: int = PROCESS,
    ) -> None:
        self._launch(launched, thread, process)
        string = self._string(name)
        values = (start, end, 0, 1, 7, self._correlation, process << 24, string, string)
        columns = "start, end, deviceId, contextId, streamId, correlationId, globalPid, demangledName, shortName"
        self._insert("CUPTI_ACTIVITY_KIND_KERNEL", columns, values)

    def copy(self, kind: int, launched: int, start: int, end: int) -> None:
        """The first copy makes the table: nsys leaves out tables without rows."""
        self._execute(_MEMCPY.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        self._launch(launched, MAIN, PROCESS)
        columns = (
            "start, end, deviceId, contextId, streamId, correlationId, globalPid, bytes, copyKind"
        )
        values = (start, end, 0, 1, 7, self._correlation, PROCESS << 24, 4096, kind)
        self._insert("CUPTI_ACTIVITY_KIND_MEMCPY", columns, values)

    def _launch(self, launched: int | None, thread: int, process: int) -> None:
        self._correlation += 1
        if launched is not None:
            values = (
                launched,
                launched + 5,
                0,
                _global(thread, process),
                self._correlation,
                self._string("cudaLaunchKernel"),
                0,
            )
            columns = "start, end, eventClass, globalTid, correlationId, nameId, returnValue"
            self._insert("CUPTI_ACTIVITY_KIND_RUNTIME", columns, values)

    def _string(self, text: str) -> int:
        self._strings.append(text)
        self._insert("StringIds", "id, value", (len(self._strings), text))
        return len(self._strings)

    def _insert(self, table: str, columns: str, values: Iterable[Any]) -> None:
        quoted = ", ".join(f'"{column.strip()}"' for column in columns.split(","))
        values = tuple(values)
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute(
                f"INSERT INTO {table} ({quoted}) VALUES ({', '.join('?' * len(values))})", values
            )

    def _execute(self, script: str) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.executescript(script.replace("end INTEGER", '"end" INTEGER'))


def _global(thread: int, process: int = PROCESS) -> int:
    return (process << 24) | thread
