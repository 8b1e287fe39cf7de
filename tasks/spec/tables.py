"""Row types of the stored tables."""

from __future__ import annotations

from dataclasses import dataclass


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
