"""What passes between the measuring process and what surrounds it. Frozen, and JSON throughout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

ATTEMPT_FILE = "attempt.json"
JOURNAL_FILE = "journal.jsonl"
LOG_FILE = "log.txt"
PHASE_FILE = "phase"
BEFORE_ITS_TASK = ("", "start")  # stages of an attempt: its process is on its way there
PREPARATION_S = 300.0  # for it to come there, which is not of a cell's own time


StartMethod = Literal[
    "fork", "spawn"
]  # of the measuring process: from a prepared parent where that works, or afresh


class Status(StrEnum):
    """How an attempt ended. Terminal states only: a cell without an attempt is pending, and no row says so."""

    OK = "ok"
    OOM = "oom"  # the device's memory, or the cap on it
    OOM_INFERRED = "oom_inferred"  # not measured: a cell that asks for no more ran out of memory
    HOST_OOM = "host_oom"  # the host's memory
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # a signal, or an exit without a word
    FAILED = "failed"  # an exception
    SKIPPED = "skipped"  # cannot be measured here, with the reason
    LOST = "lost"  # its node or its supervisor went away: the cell is not to blame


@dataclass(frozen=True)
class Settings:
    """How to measure, as against what. Not part of a cell's identity.

    cores: those that its process keeps to; None: all. alone_on: the host that it is to have to itself; None: any, beside others.
    """

    timeout_s: float = 600.0
    instruments: tuple[str, ...] = ("timing", "memory", "telemetry")
    env: Mapping[str, str] = field(default_factory=dict)
    host_memory_gib: float | None = None
    import_paths: tuple[str, ...] = ()
    start_method: StartMethod | None = None  # None: forked where that works
    cores: tuple[int, ...] | None = None
    alone_on: str | None = None


@dataclass(frozen=True)
class Attempt:
    """One try at a cell. `folder` holds everything it leaves behind.

    replaces: the number of the attempt up to which the cell's successes count no more once this is one; 0 for none.
    """

    cell: Cell
    number: int
    folder: str
    settings: Settings
    replaces: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def to_json(self) -> str:
        body = {
            "cell": self.cell.id,
            "task": self.cell.task,
            "params": self.cell.params.values(),
            "number": self.number,
            "folder": self.folder,
            "settings": asdict(self.settings),
            "replaces": self.replaces,
        }
        return json.dumps(body, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        body = json.loads(text)
        settings: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in body["settings"].items()
        }
        cell, replaces = make_cell(body["task"], body["params"]), body.get("replaces", 0)
        return cls(cell, body["number"], body["folder"], Settings(**settings), replaces)


@dataclass(frozen=True)
class Sample:
    """One number as measured. A null value carries the reason in `note`."""

    instrument: str
    metric: str
    unit: str
    value: float | None
    mode: str = ""
    phase: str = ""
    step: int | None = None
    note: str = ""


@dataclass(frozen=True)
class KernelRow:
    """A kernel by its name, in one phase and module, over `steps` profiled steps; on the CPU an operator's own time.

    phase, module: empty where it belongs to none. Several modules of a fused kernel are joined by `+`. kernel_class: what
    kind of work it does. attributed_by: what the module is known by (see tasks/traces/attribution.py). steps: null in a
    trace that does not tell.
    """

    phase: str
    module: str
    kernel_class: str
    attributed_by: str
    operator: str
    name: str
    steps: int | None
    count: int
    total_ns: int
    mean_ns: float
    median_ns: float
    min_ns: int
    max_ns: int
    sd_ns: float | None


@dataclass(frozen=True)
class AllocationRow:
    """Allocations that live at one moment, alike in role, part, size and place in the code.

    moment: `peak` of the steady step, or `out of memory`; phase: the one it falls into. part: of the model, empty where it
    is of none. attributed_by: what the role is known by (see tasks/snapshots/attribution.py). allocated_in: the phase of the
    recorded step that made them, empty for what was there before it. call_chain: who asked, called by whom, `<` between;
    empty where no Python was running, as in the backward pass. size_bytes: of each, as it was asked for. `slack` is
    what the allocator's blocks have beyond that: it has no count.
    """

    moment: str
    phase: str
    role: str
    part: str
    attributed_by: str
    allocated_in: str
    call_chain: str
    size_bytes: int
    count: int
    total_bytes: int


@dataclass(frozen=True)
class LiveRow:
    """How much of a role lives at one moment of the recorded step: after the event `event` of the allocator's record.

    at_ms: on the host's clock, from the first event of the step; live_bytes: as they were asked for.
    """

    event: int
    at_ms: float
    phase: str
    role: str
    live_bytes: int


@dataclass(frozen=True)
class Ending:
    """How a measuring process ended by its own account: the last line of its journal."""

    status: Status
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """An attempt and all that came of it."""

    attempt: Attempt
    status: Status
    stage: str
    phase: str
    evidence: Mapping[str, Any]
    facts: Mapping[str, Any]
    samples: tuple[Sample, ...]
    started_at: float
    wall_s: float
    kernels: tuple[KernelRow, ...] = ()
    allocations: tuple[AllocationRow, ...] = ()
    live: tuple[LiveRow, ...] = ()


@dataclass(frozen=True)
class Account:
    """What a journal says, whole or torn. stage_s: how long it was in each stage, the last of them as far as it tells."""

    started_at: float = 0.0
    wall_s: float = 0.0
    stage: str = ""
    stage_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    allocations: tuple[AllocationRow, ...] = ()
    live: tuple[LiveRow, ...] = ()
    ending: Ending | None = None


def read_journal(path: Path) -> Account:
    """Reads as far as the lines are whole: a process killed while it wrote leaves half a line at the end."""
    return _account(_whole_lines(path)) if path.exists() else Account()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _account(entries: Iterable[dict[str, Any]]) -> Account:
    times: list[float] = []
    after_s = 0.0
    stage, facts, samples, kernels = "", dict[str, Any](), list[Sample](), list[KernelRow]()
    allocations, live = list[AllocationRow](), list[LiveRow]()
    ending = None
    stage_s: dict[str, float] = {}
    for entry in entries:
        times.append(entry["time"])
        before_s, after_s = (
            after_s,
            entry.get("after_s", times[-1] - times[0]),
        )  # an older program wrote the times alone
        if stage:
            stage_s[stage] = stage_s.get(stage, 0.0) + after_s - before_s
        match entry:
            case {"stage": str(name)}:
                stage = name
            case {"facts": dict(more)}:
                facts |= more
            case {"samples": list(rows)}:
                samples += [Sample(**row) for row in rows]
            case {"kernels": list(rows)}:
                kernels += [KernelRow(**row) for row in rows]
            case {"allocations": list(rows)}:
                allocations += [AllocationRow(**row) for row in rows]
            case {"live": list(rows)}:
                live += [LiveRow(**row) for row in rows]
            case {"status": str(status), "evidence": dict(evidence)}:
                ending = Ending(Status(status), evidence)
    if not times:
        return Account()
    return Account(
        started_at=times[0],
        wall_s=after_s,
        stage=stage,
        stage_s=stage_s,
        facts=facts,
        samples=tuple(samples),
        kernels=tuple(kernels),
        allocations=tuple(allocations),
        live=tuple(live),
        ending=ending,
    )
