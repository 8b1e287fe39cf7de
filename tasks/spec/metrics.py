"""Every metric of the table `samples` and of predictions, and the columns of `cells` made of it.

A new number needs one declaration here, and a `Sample` with the same instrument, name and unit
where it is measured; tests refuse samples without a declaration. `orchestrator/analysis` makes the
columns, and docs/columns.md lists them. A metric has one column of its name unless it declares
others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from tasks.spec.fields import Aggregate
from tasks.spec.tables import PHASES, Sample

STEP = "step"  # the phase that names a whole step
OUTSIDE = "outside"  # the phase of kernels outside of all phases
_EACH = (*PHASES, STEP)


@dataclass(frozen=True)
class CellColumn:
    """A column of `cells`, or several, made of a metric's samples.

    name: may hold `{phase}`, `{rank}` (the sample's `step`), `{role}` (its `note`), `{when}` (its
        `mode`) or `{statistic}`; each value that a sample has is a column.
    aggregate: how several samples of a cell become one value. None: a function of
        `orchestrator/analysis` makes the column, by a rule that cannot be declared.
    mode, phase: only samples with these; None: with any. Without `{phase}` in the name, samples of
        all phases are aggregated.

    A metric fills in its own unit, and in name and doc its own for `{name}` and `{doc}`.
    """

    name: str = "{name}"
    doc: str = "{doc}"
    aggregate: Aggregate | None = Aggregate.FIRST
    mode: str | None = None
    phase: str | None = None
    unit: str | None = None


# Aggregates whose columns do not have the metric's unit.
_WITHOUT_UNIT = (Aggregate.NOTE, Aggregate.SIZE)


@dataclass(frozen=True)
class Metric:
    """A number in the long table `samples`, or of a prediction (instrument `prediction`).

    instrument: what writes it; `finding` for tasks that compute their result once.
    modes, phases: the values that its samples may have.
    """

    instrument: str
    name: str
    unit: str
    doc: str
    columns: tuple[CellColumn, ...] = (CellColumn(),)
    modes: tuple[str, ...] = ("",)
    phases: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        columns = []
        for one in self.columns:
            has_unit = one.aggregate not in _WITHOUT_UNIT
            unit = (one.unit or self.unit) if has_unit else ""
            name = one.name.replace("{name}", self.name)
            doc = one.doc.replace("{doc}", self.doc)
            columns.append(replace(one, name=name, doc=doc, unit=unit))
        object.__setattr__(self, "columns", tuple(columns))

    def sample(
        self,
        value: float | None,
        mode: str = "",
        phase: str = "",
        step: int | None = None,
        note: str = "",
    ) -> Sample:
        """Return a measured value. If the value is None, `note` says why."""
        return Sample(self.instrument, self.name, self.unit, value, mode, phase, step, note)


# ---------------------------------------------------------------------------- timing

_TIMED_MODES = ("synced", "pipelined", "compile", "warmup", "check")
_DEVICE_MODES = ("pipelined", "check")
_DURATION_COLUMNS = (
    CellColumn(
        "step_synced_ms_{statistic}",
        "whole step that waits at the end of each phase; ci_low to ci_high: the interval of the "
        "median, by order statistics, with the confidence `coverage`; n: number of steps",
        Aggregate.SUMMARY,
        "synced",
        STEP,
    ),
    CellColumn(
        "{phase}_ms_{statistic}", "a phase, with waiting at its end", Aggregate.SUMMARY, "synced"
    ),
    CellColumn(
        "{phase}_pipelined_ms_{statistic}",
        "a phase, or the whole step, of steps without waiting, by GPU events",
        Aggregate.SUMMARY,
        "pipelined",
    ),
    CellColumn(
        "compile_{phase}_ms", "a phase of the step that compiles, or the step", mode="compile"
    ),
    CellColumn(
        "compile_total_ms",
        "the step that compiles and those that record CUDA graphs",
        Aggregate.SUM,
        "compile",
        STEP,
    ),
    CellColumn("compile_steps", "number of those steps", Aggregate.SIZE, "compile", STEP),
)
# Their samples have mode `check` if adaptive timing stopped without pipelined steps, so functions
# of orchestrator/analysis make these columns.
_LEAD_COLUMNS = (
    CellColumn(
        "{phase}_lead_ms", "median lead of the CPU at the end of a phase, or of the step", None
    ),
    CellColumn("host_lead_ms", "the largest of the medians `{phase}_lead_ms`", None),
)
_timing = partial(Metric, "timing")
_TIMING = (
    _timing(
        "duration",
        "ms",
        "duration of the phase, or of the whole step",
        _DURATION_COLUMNS,
        _TIMED_MODES,
        _EACH,
    ),
    _timing(
        "host", "ms", "time in which the CPU submits the phase to the GPU", (), _DEVICE_MODES, _EACH
    ),
    _timing(
        "lead",
        "ms",
        "time by which the CPU is ahead of the GPU at the end of the phase",
        _LEAD_COLUMNS,
        _DEVICE_MODES,
        _EACH,
    ),
    _timing(
        "drain",
        "ms",
        "time for which the GPU still runs after the CPU has submitted the last step",
        (CellColumn("drain_ms", mode="pipelined"),),
        _DEVICE_MODES,
    ),
)

# ---------------------------------------------------------------------------- memory

_memory = partial(Metric, "memory")
_KINDS = {
    "allocated": "in blocks of the allocator",
    "requested": "as tensors requested it",
    "reserved": "by the allocator from the GPU",
    "rss": "resident set of the process, on the CPU",
}
_BY_PHASE = (
    CellColumn("{phase}_{name}", aggregate=Aggregate.MAX, mode="steady"),
    CellColumn("first_{phase}_{name}", "{doc}, of the first step", Aggregate.MAX, "first"),
)
_PEAK_COLUMNS = (
    CellColumn(doc="{doc}: maximum over the phases", aggregate=Aggregate.MAX, mode="steady"),
    CellColumn("first_{name}", "{doc}, in the first step", Aggregate.MAX, "first"),
    CellColumn("second_{name}", "{doc}, in the second step", Aggregate.MAX, "second"),
    *_BY_PHASE,
)
_sized = partial(_memory, unit="bytes", modes=("built", "first", "second", "steady"))
_peak = partial(_sized, columns=_PEAK_COLUMNS, phases=tuple(PHASES))
_saved = partial(_memory, columns=(CellColumn(aggregate=Aggregate.MAX),), modes=("steady",))
_PEAKS: dict[str, Metric] = {}
for _kind, _detail in _KINDS.items():
    _PEAKS[_kind] = _peak(f"peak_{_kind}_bytes", doc=f"peak memory within the phase, {_detail}")
_HELD: dict[str, Metric] = {}
for _kind in ("allocated", "rss"):
    _after_build = f"memory after the build, {_KINDS[_kind]}"
    _HELD[_kind] = _sized(
        f"held_{_kind}_bytes",
        doc=f"memory at the end of the phase, {_KINDS[_kind]}",
        columns=(CellColumn("built_{name}", _after_build, Aggregate.MAX, "built", ""), *_BY_PHASE),
        phases=("", *PHASES),
    )
_SAVED = (
    _saved("saved_bytes", "bytes", "saved by the forward pass for the backward pass"),
    _saved("saved_block_bytes", "bytes", "of `saved_bytes`, saved by one block"),
    _saved("saved_square_bytes", "bytes", "of `saved_bytes`, tensors over all pairs of positions"),
    _saved("saved_squares", "tensors", "number of those tensors"),
    _saved("residual_stream_bytes", "bytes", "output of a block for the next one"),
    _memory(
        "saved_operation_bytes",
        "bytes",
        "saved by one operation of a block: `step` is its rank from 1, `note` its name",
        (
            CellColumn(
                "saved_{rank}_operation",
                "operation of a block that saves most, by rank",
                Aggregate.NOTE,
            ),
            CellColumn("saved_{rank}_bytes", "memory saved by that operation"),
        ),
        ("steady",),
    ),
)
_MEMORY = (
    *_PEAKS.values(),
    *_HELD.values(),
    # Apple's GPU has no peak: the memory in use at the end of a phase stands in for one.
    _peak("allocated_after_bytes", doc="on mps, memory in tensors at the end of the phase"),
    _peak("reserved_after_bytes", doc="on mps, memory of the driver at the end of the phase"),
    _memory(
        "outside_allocator_bytes",
        "bytes",
        "memory of the GPU that is in use outside of the allocator after a steady step: the CUDA "
        "context, libraries, NCCL, CUDA graphs, and other programs on this GPU",
        (CellColumn(aggregate=Aggregate.MAX),),
        ("steady",),
    ),
    *_SAVED,
)

# ---------------------------------------------------------------------------- telemetry

_telemetry = partial(Metric, "telemetry", modes=("before", "after"))
_state = partial(
    _telemetry, columns=(CellColumn("{name}_{when}", "{doc}, before or after the timing"),)
)
_COUNTERS = (
    ("energy", "J", "energy that the GPU used"),
    ("power_capped", "ns", "time for which the power limit lowered the clocks"),
    ("thermal_capped", "ns", "time for which heat lowered the clocks"),
)
# The counters are read before the step that compiles, so that warm-up counts, too.
_COUNTED = "from before the compiling step until after the timing"
_TELEMETRY = (
    _state("sm_clock", "MHz", "clock of the GPU's SMs"),
    _state("sm_clock_max", "MHz", "highest SM clock that the GPU allows"),
    _state("memory_clock", "MHz", "clock of the GPU's memory"),
    _state("temperature", "°C", "temperature of the GPU"),
    _state("power", "W", "power that the GPU draws"),
    _state("power_limit", "W", "power that the GPU may draw"),
    _state(
        "throttle_reasons",
        "bit mask",
        "why the clocks are not higher, a sum of NVML's bits: 1 idle, 2 set by an application, 4 "
        "power limit, 8 hardware slowdown, 32 heat, 64 heat by hardware, 128 power supply",
    ),
    *(
        _telemetry(
            name,
            unit,
            f"counter: {doc}",
            (CellColumn(f"{name}_{unit.lower()}", f"{doc}, {_COUNTED}", Aggregate.DIFFERENCE),),
        )
        for name, unit, doc in _COUNTERS
    ),
    Metric(
        "telemetry",
        "waited_for_core",
        "",
        "fraction of the timing for which the thread that waited longest waited for a core that "
        "other processes used",
        (CellColumn(unit="ratio"),),
        ("timing",),
    ),
    Metric(
        "telemetry",
        "timed_power",
        "W",
        "mean power of the GPU with its memory while steps were timed, by its counter of energy; "
        "null if they took less than half a second",
        (CellColumn("timed_power_w"),),
        ("timing",),
    ),
    _state("host_pace", "1/ms", "small operations that one CPU thread submits to torch per ms"),
)

# ---------------------------------------------------------------------------- profiles

_kernels = partial(Metric, "kernels")

_KERNELS = (
    _kernels(
        "kernel_time",
        "ms",
        "time of all kernels of the phase in a profiled step",
        (CellColumn("{phase}_kernel_time_ms"),),
        phases=(*PHASES, OUTSIDE),
    ),
    _kernels(
        "busy",
        "ratio",
        "share of the profiled phase or step, from first to last kernel, in which one ran",
        (CellColumn("{phase}_busy"), CellColumn(phase="")),
        phases=("", *PHASES),
    ),
    _kernels(
        "idle",
        "ms",
        "time of the profiled step in which no kernel ran",
        (CellColumn("idle_ms"),),
    ),
    _kernels(
        "idle_for_host",
        "ms",
        "of `idle_ms`, before kernels that the CPU had not launched yet",
        (CellColumn("idle_for_host_ms"),),
    ),
    *(
        _kernels(
            f"attributed_to_{what}", "ratio", f"share of the kernels' time whose {what} is known"
        )
        for what in ("phase", "module", "class")
    ),
    _kernels(
        "profiled_step", "ms", "duration of the profiled step", (CellColumn("profiled_step_ms"),)
    ),
    _kernels(
        "processing", "ms", "time to turn the trace into rows", (CellColumn("processing_ms"),)
    ),
    _kernels(
        "trace_bytes",
        "bytes",
        "size of the trace that is stored with the log",
    ),
)
_KERNEL_TIME = Metric(
    "kernel_time",
    "kernel_time",
    "ms",
    "time of all kernels of a phase, or of the step, profiled separately",
    (
        CellColumn(
            "{phase}_kernel_time_ms_{statistic}",
            "kernels of a phase, or of a whole step, profiled one phase at a time: the GPU's own "
            "work. Median, ci_low, ci_high, coverage; the median alone from a profiled step",
            Aggregate.INTERVAL,
        ),
    ),
    phases=("", *_EACH),  # without a phase: null on other devices than a GPU
)
_snapshot = partial(Metric, "memory_snapshot", columns=(CellColumn("snapshot_{name}"),))
_SNAPSHOT = (
    *(
        _snapshot(f"peak_{kind}_bytes", "bytes", f"peak of the recorded step, {_KINDS[kind]}")
        for kind in ("allocated", "requested", "reserved")
    ),
    _snapshot("replayed_peak_bytes", "bytes", "peak that a replay of the record reaches"),
    _snapshot("unlabelled_bytes", "bytes", "of the peak, memory whose role is unknown"),
    _snapshot("events", "events", "events on the record"),
    _snapshot("wrapped", "", "1 if the record was too short"),
    _snapshot("file_bytes", "bytes", "size of the record that is stored with the log"),
    _snapshot(
        "processing",
        "ms",
        "time to turn the record into rows",
        columns=(CellColumn("snapshot_processing_ms"),),
    ),
)

# ---------------------------------------------------------------------------- overlap

_OVERLAP_MS = {  # column and doc by metric
    "profiled_step": (
        "overlap_step_ms",
        "step under the profiler, of the rank with the slowest steps, as are the next",
    ),
    "compute": ("compute_ms", "of that, in which a kernel computed"),
    "exposed_transfer": (
        "exposed_transfer_ms",
        "of that, sending and receiving that no computing hid",
    ),
    "exposed_wait": ("exposed_wait_ms", "of that, waiting for other ranks that no computing hid"),
    "exposed_copies": ("exposed_copies_ms", "of that, only copies"),
    "idle": ("overlap_idle_ms", "of that, nothing ran"),
    "communication": ("comm_ms", "time in which a collective ran"),
    "transfer": ("transfer_ms", "all collectives, each as long as on the rank that came last"),
    "wait": ("wait_ms", "all collectives, what they took beyond `transfer_ms`"),
    "exposed_off": (
        "exposed_off_ms",
        "median step less that of steps that send nothing to other ranks",
    ),
}
_OVERLAP = tuple(
    Metric("overlap", name, "ms", doc, (CellColumn(column),))
    for name, (column, doc) in _OVERLAP_MS.items()
)

# ---------------------------------------------------------------------------- findings

_finding = partial(Metric, "finding")
_WAYS = {
    "wide": "a norm that computes in fp32",
    "narrow": "a norm that computes in the narrow dtype",
    "library": "torch's own norm",
}
_ERROR = "largest error over the root mean square"
_NOT_FINITE = "share of elements that are not finite"
_FINDINGS = (
    _finding("sum", "1", "accumulation: the sum"),
    _finding("error", "1", "accumulation: the sum less the exact result"),
    # `loss` is a parameter of train_step: a column of this name would be both.
    _finding(
        "loss",
        "nat",
        "autocast_dtypes: loss of the small model",
        (CellColumn("autocast_loss"),),
    ),
    *(_finding(f"{way}_error", "1", f"{doc}: {_ERROR}") for way, doc in _WAYS.items()),
    *(
        _finding(f"{way}_nonfinite", "1", f"{doc}: {_NOT_FINITE}", (CellColumn(unit="ratio"),))
        for way, doc in _WAYS.items()
    ),
)

METRICS: tuple[Metric, ...] = (
    *_TIMING,
    *_MEMORY,
    *_TELEMETRY,
    *_KERNELS,
    _KERNEL_TIME,
    *_SNAPSHOT,
    *_OVERLAP,
    *_FINDINGS,
    Metric("backend", "events", "events", "events that the profiler recorded", ()),
    Metric("nvtx", "annotated_steps", "steps", "number of steps with ranges", ()),
    Metric("nsys", "annotated_steps", "steps", "number of steps with ranges", ()),
)

# ---------------------------------------------------------------------------- predictions


def _predicted(metric: Metric) -> Metric:
    """Declare the prediction of a metric of `memory`: its columns begin with `predicted_`."""
    columns = []
    for one in metric.columns:
        columns.append(replace(one, name=f"predicted_{one.name}", doc=f"predicted {one.doc}"))
    # A prediction of a phase has the peak of the build, too: its phase is empty.
    phases = dict.fromkeys(("", *metric.phases))
    return replace(metric, instrument="prediction", columns=tuple(columns), phases=tuple(phases))


_prediction = partial(Metric, "prediction", modes=("steady",))
CLOSED_FORM_BYTES = _prediction(
    "closed_form_bytes",
    "bytes",
    "a term of the closed form of the peak: `note`",
    (
        CellColumn("closed_form_of_{role}_bytes", "a term of `closed_form_bytes`", Aggregate.SUM),
        CellColumn("closed_form_bytes", "peak by the closed form", None),
        CellColumn("at_least_bytes", "the closed form without activations, if unknown", None),
    ),
)
VERDICT = Metric(
    "prediction",
    "verdict",
    "",
    "fits, borderline, perhaps, unlikely or oom on the run's GPU or under the cell's cap: `note`",
    (CellColumn("predicted_verdict", aggregate=Aggregate.NOTE),),
)
_SQUARES = "in `attention`, number of such tensors in the formula"
PREDICTED_METRICS: tuple[Metric, ...] = (
    *(_predicted(_PEAKS[kind]) for kind in ("allocated", "requested", "reserved")),
    _predicted(_HELD["allocated"]),
    _prediction(
        "at_peak_bytes",
        "bytes",
        "part of the predicted peak of a steady step, by role: `note`",
        (CellColumn("predicted_of_{role}_bytes", aggregate=Aggregate.SUM),),
        phases=tuple(PHASES),
    ),
    CLOSED_FORM_BYTES,
    _prediction(
        "flops",
        "FLOP",
        "operations of a steady step, counted without what the backward pass computes again",
        (CellColumn("counted_flops", aggregate=Aggregate.SUM),),
        phases=tuple(PHASES),
    ),
    _prediction(
        "recomputed_flops",
        "FLOP",
        "operations that the backward pass of a steady step computes again: checkpoints, and the "
        "scores of fused attention",
        (CellColumn(aggregate=Aggregate.SUM),),
        phases=tuple(PHASES),
    ),
    *map(_predicted, _SAVED),
    _prediction(
        "square_bytes",
        "bytes",
        "in `attention`, a tensor over all pairs of positions",
    ),
    *(
        _prediction(f"formula_{what}_squares", "tensors", f"{_SQUARES}: {what}")
        for what in ("saved", "forward", "backward")
    ),
    VERDICT,
)


_BY_NAME = {(metric.instrument, metric.name): metric for metric in (*METRICS, *PREDICTED_METRICS)}


def metric_named(instrument: str, name: str) -> Metric:
    """Return the metric of an instrument. Raise KeyError if it is not declared."""
    return _BY_NAME[instrument, name]
