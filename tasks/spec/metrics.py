"""Every metric of the table `samples` and of predictions, and the columns of `cells` made of it.

An instrument, a task or a predictor that measures a new number declares it here and writes it with
`METRIC.sample(value)`. `orchestrator/analysis` makes the columns, and docs/columns.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tasks.spec.fields import Aggregate, Format, name_pattern
from tasks.spec.tables import PHASES, Sample

STEP = "step"  # the phase that names a whole step
OUTSIDE = "outside"  # the phase of kernels outside of all phases
_EACH = (*PHASES, STEP)


@dataclass(frozen=True)
class CellColumn:
    """A column of `cells`, or several, made of a metric's samples.

    name: may hold `{phase}`, `{rank}` (the sample's `step`), `{role}` (its `note`), `{when}` (its `mode`) or
        `{statistic}`; each value then has a column. `cells` has the column if a sample belongs to it.
    doc: for docs/columns.md.
    aggregate: how several samples of a cell become one value. None: a function of
        `orchestrator/analysis` makes the column, by a rule that cannot be declared.
    mode, phase: only samples with these; None: with any. Without `{phase}` in the name, samples of
        all phases are aggregated.
    unit, format: those of the metric if None.
    """

    name: str
    doc: str
    aggregate: Aggregate | None = Aggregate.FIRST
    mode: str | None = None
    phase: str | None = None
    unit: str | None = None
    format: Format | None = None


@dataclass(frozen=True)
class Metric:
    """A number in the long table `samples`, or of a prediction (instrument `prediction`).

    name: may hold a placeholder, such as `{way}_error`.
    instrument: what writes it; `finding` for tasks that compute their result once.
    modes, phases: the values that its samples may have.
    """

    name: str
    instrument: str
    unit: str
    doc: str
    modes: tuple[str, ...] = ("",)
    phases: tuple[str, ...] = ("",)
    columns: tuple[CellColumn, ...] = ()
    format: Format = Format.NUMBER

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

    def allows(self, sample: Sample) -> bool:
        """Return True if the sample is declared by this metric."""
        return (
            sample.instrument == self.instrument
            and name_pattern(self.name).fullmatch(sample.metric) is not None
            and sample.unit == self.unit
            and sample.mode in self.modes
            and sample.phase in self.phases
        )


_SUMMARY = (
    "ci_low to ci_high: the interval of the median, by order statistics, with the confidence "
    "`coverage`; n: number of steps"
)
_TIMED_MODES = ("synced", "pipelined", "compile", "warmup", "check")
_DEVICE_MODES = ("pipelined", "check")

STEP_DURATION = Metric(
    "duration",
    "timing",
    "ms",
    "duration of the phase, or of the whole step",
    _TIMED_MODES,
    _EACH,
    (
        CellColumn(
            "step_synced_ms_{statistic}",
            f"whole step that waits at the end of each phase; {_SUMMARY}",
            Aggregate.SUMMARY,
            "synced",
            STEP,
        ),
        CellColumn(
            "{phase}_ms_{statistic}",
            "a phase, with waiting at its end",
            Aggregate.SUMMARY,
            "synced",
        ),
        CellColumn(
            "{phase}_pipelined_ms_{statistic}",
            "a phase, or the whole step, of steps without waiting, by GPU events",
            Aggregate.SUMMARY,
            "pipelined",
        ),
        CellColumn(
            "compile_{phase}_ms",
            "a phase of the step that compiles, or the whole step",
            mode="compile",
        ),
        CellColumn(
            "compile_total_ms",
            "the step that compiles and those that record CUDA graphs",
            Aggregate.SUM,
            "compile",
            STEP,
        ),
        CellColumn(
            "compile_steps",
            "number of those steps",
            Aggregate.SIZE,
            "compile",
            STEP,
            "",
            Format.COUNT,
        ),
    ),
    Format.MS,
)
HOST_DURATION = Metric(
    "host",
    "timing",
    "ms",
    "time in which the CPU submits the phase to the GPU",
    _DEVICE_MODES,
    _EACH,
    format=Format.MS,
)
LEAD = Metric(
    "lead",
    "timing",
    "ms",
    "time by which the CPU is ahead of the GPU at the end of the phase",
    _DEVICE_MODES,
    _EACH,
    # From mode `check` if adaptive timing stopped without pipelined steps.
    (
        CellColumn(
            "{phase}_lead_ms",
            "median time by which the CPU is ahead of the GPU at the end of a phase, or of the step",
            None,
        ),
        CellColumn("host_lead_ms", "the largest of the medians `{phase}_lead_ms`", None),
    ),
    Format.MS,
)
DRAIN = Metric(
    "drain",
    "timing",
    "ms",
    "time for which the GPU still runs after the CPU has submitted the last step",
    _DEVICE_MODES,
    columns=(
        CellColumn(
            "drain_ms",
            "time by which the GPU is behind the CPU after the last pipelined step",
            mode="pipelined",
        ),
    ),
    format=Format.MS,
)

_KINDS = {
    "allocated": "in blocks of the allocator",
    "requested": "as tensors requested it",
    "reserved": "by the allocator from the GPU",
    "rss": "resident set of the process, on the CPU",
}
_MEMORY_MODES = ("built", "first", "steady")


def _memory_columns(metric: str, what: str) -> tuple[CellColumn, ...]:
    """Columns of a size that is known at each phase of the first step and of a steady one."""
    return (
        CellColumn(metric, f"{what}: maximum over the phases", Aggregate.MAX, "steady"),
        CellColumn(f"first_{metric}", f"{what} in the first step", Aggregate.MAX, "first"),
        CellColumn(f"{{phase}}_{metric}", f"{what}, of one phase", Aggregate.MAX, "steady"),
        CellColumn(
            f"first_{{phase}}_{metric}",
            f"{what}, of one phase of the first step",
            Aggregate.MAX,
            "first",
        ),
    )


def _peak(kind: str, detail: str) -> Metric:
    doc = f"peak within the phase, {detail}"
    columns = _memory_columns(f"peak_{kind}_bytes", f"peak memory {detail}")
    name = f"peak_{kind}_bytes"
    return Metric(name, "memory", "bytes", doc, _MEMORY_MODES, tuple(PHASES), columns, Format.GIB)


def _held(kind: str, detail: str) -> Metric:
    name = f"held_{kind}_bytes"
    what = f"memory at the end of a phase, {detail}"
    columns = (
        CellColumn(
            f"built_{name}", f"memory after the build, {detail}", Aggregate.MAX, "built", ""
        ),
        CellColumn(f"{{phase}}_{name}", what, Aggregate.MAX, "steady"),
        CellColumn(f"first_{{phase}}_{name}", f"{what} of the first step", Aggregate.MAX, "first"),
    )
    phases = ("", *PHASES)
    return Metric(name, "memory", "bytes", what, _MEMORY_MODES, phases, columns, Format.GIB)


PEAKS: Mapping[str, Metric] = {kind: _peak(kind, doc) for kind, doc in _KINDS.items()}
HELD: Mapping[str, Metric] = {kind: _held(kind, _KINDS[kind]) for kind in ("allocated", "rss")}

# Apple's GPU keeps no peak: the memory in use at the end of a phase stands in for one.
_MPS = tuple(
    Metric(
        f"{kind}_after_bytes",
        "memory",
        "bytes",
        f"on mps, memory at the end of the phase, {detail}",
        _MEMORY_MODES,
        tuple(PHASES),
        _memory_columns(f"{kind}_after_bytes", f"on mps, memory at the end of a phase {detail}"),
        Format.GIB,
    )
    for kind, detail in (("allocated", "in tensors"), ("reserved", "held by the driver"))
)


def _saved(name: str, doc: str, unit: str = "bytes") -> Metric:
    columns = (CellColumn(name, doc, Aggregate.MAX),)
    style = Format.GIB if unit == "bytes" else Format.COUNT
    return Metric(name, "memory", unit, doc, ("steady",), columns=columns, format=style)


SAVED_BYTES = _saved("saved_bytes", "saved by the forward pass for the backward pass")
SAVED_BLOCK_BYTES = _saved("saved_block_bytes", "of `saved_bytes`, saved by one block")
SAVED_SQUARE_BYTES = _saved(
    "saved_square_bytes", "of `saved_bytes`, tensors over all pairs of positions"
)
SAVED_SQUARES = _saved("saved_squares", "number of those tensors", "tensors")
RESIDUAL_STREAM_BYTES = _saved("residual_stream_bytes", "output of a block for the next one")
SAVED_OPERATION_BYTES = Metric(
    "saved_operation_bytes",
    "memory",
    "bytes",
    "saved by one operation of a block: `step` is its rank from 1, `note` its name",
    ("steady",),
    columns=(
        CellColumn(
            "saved_{rank}_operation",
            "operation of a block that saves most, by rank",
            Aggregate.NOTE,
            unit="",
            format=Format.TEXT,
        ),
        CellColumn("saved_{rank}_bytes", "memory saved by that operation"),
    ),
    format=Format.GIB,
)
_SAVED = (
    SAVED_BYTES,
    SAVED_BLOCK_BYTES,
    SAVED_SQUARE_BYTES,
    SAVED_SQUARES,
    RESIDUAL_STREAM_BYTES,
    SAVED_OPERATION_BYTES,
)

_BEFORE_AFTER = ("before", "after")
_THROTTLING = (
    "why the clocks are not higher, a sum of NVML's bits: 1 idle, 2 set by an application, "
    "4 power limit, 8 hardware slowdown, 32 heat, 64 heat by hardware, 128 power supply; 0: nothing"
)


def _gpu_state(name: str, unit: str, doc: str, column_doc: str = "") -> Metric:
    columns = (CellColumn(f"{name}_{{when}}", column_doc or f"{doc}, before or after the timing"),)
    return Metric(name, "telemetry", unit, doc, _BEFORE_AFTER, columns=columns)


def _gpu_counter(name: str, unit: str, column: str, doc: str, column_doc: str) -> Metric:
    columns = (CellColumn(column, column_doc, Aggregate.DIFFERENCE),)
    return Metric(name, "telemetry", unit, f"counter: {doc}", _BEFORE_AFTER, columns=columns)


WAITED_FOR_CORE = Metric(
    "waited_for_core",
    "telemetry",
    "",
    "fraction of the timing for which a thread waited for a core that other processes used; "
    "the thread that waited longest",
    ("timing",),
    columns=(
        CellColumn(
            "waited_for_core",
            "fraction of the timing for which a thread waited for a core that others used",
        ),
    ),
    format=Format.PERCENT,
)
DISPATCH_RATE = _gpu_state(
    "host_pace",
    "1/ms",
    "small operations that one CPU thread submits to torch per ms",
)
_TELEMETRY = (
    _gpu_state("sm_clock", "MHz", "clock of the GPU's SMs"),
    _gpu_state("sm_clock_max", "MHz", "highest SM clock that the GPU allows"),
    _gpu_state("memory_clock", "MHz", "clock of the GPU's memory"),
    _gpu_state("temperature", "°C", "temperature of the GPU"),
    _gpu_state("power", "W", "power that the GPU draws"),
    _gpu_state("power_limit", "W", "power that the GPU may draw"),
    _gpu_state(
        "throttle_reasons", "bit mask", "why clocks are lowered (bits in `cells`)", _THROTTLING
    ),
    _gpu_counter(
        "energy",
        "J",
        "energy_j",
        "energy that the GPU has used",
        "energy of the GPU from before the compiling step until after the timing, with warm-up",
    ),
    _gpu_counter(
        "power_capped",
        "ns",
        "power_capped_ns",
        "time for which the power limit lowered the clocks",
        "of the same time, how long the power limit lowered the clocks",
    ),
    _gpu_counter(
        "thermal_capped",
        "ns",
        "thermal_capped_ns",
        "time for which heat lowered the clocks",
        "of the same time, how long heat lowered the clocks",
    ),
    WAITED_FOR_CORE,
    DISPATCH_RATE,
)

_PROFILED_PHASES = (*PHASES, OUTSIDE)


def _attributed(what: str) -> Metric:
    name = f"attributed_to_{what}"
    doc = f"share of the kernels' time whose {what} is known"
    return Metric(
        name, "kernels", "ratio", doc, columns=(CellColumn(name, doc),), format=Format.PERCENT
    )


_KERNELS = (
    Metric(
        "kernel_time",
        "kernels",
        "ms",
        "time of all kernels of the phase",
        phases=_PROFILED_PHASES,
        columns=(CellColumn("{phase}_kernel_time_ms", "kernels of a phase in a profiled step"),),
        format=Format.MS,
    ),
    Metric(
        "busy",
        "kernels",
        "ratio",
        "share of the time from first to last kernel in which one ran, of a phase or the step",
        phases=("", *PHASES),
        columns=(
            CellColumn("{phase}_busy", "share of a phase in which a kernel ran, profiled"),
            CellColumn(
                "busy",
                "share of the profiled step, from first to last kernel, in which one ran",
                phase="",
            ),
        ),
        format=Format.PERCENT,
    ),
    Metric(
        "idle",
        "kernels",
        "ms",
        "time between first and last kernel in which none ran",
        columns=(CellColumn("idle_ms", "time of the profiled step in which no kernel ran"),),
        format=Format.MS,
    ),
    Metric(
        "idle_for_host",
        "kernels",
        "ms",
        "idle time before kernels that the CPU had not launched yet",
        columns=(
            CellColumn(
                "idle_for_host_ms", "of `idle_ms`, before kernels not launched yet by the CPU"
            ),
        ),
        format=Format.MS,
    ),
    _attributed("phase"),
    _attributed("module"),
    _attributed("class"),
    Metric(
        "profiled_step",
        "kernels",
        "ms",
        "duration of the profiled step",
        columns=(CellColumn("profiled_step_ms", "duration of the profiled step"),),
        format=Format.MS,
    ),
    Metric(
        "processing",
        "kernels",
        "ms",
        "time to turn the trace into rows",
        columns=(CellColumn("processing_ms", "time to turn a trace into rows"),),
        format=Format.MS,
    ),
    Metric(
        "trace_bytes",
        "kernels",
        "bytes",
        "size of the trace that is stored with the log",
        columns=(CellColumn("trace_bytes", "size of the trace that is stored with the log"),),
        format=Format.MIB,
    ),
)
KERNEL_TIME = Metric(
    "kernel_time",
    "kernel_time",
    "ms",
    "time of all kernels of a phase, or of the step, profiled separately",
    phases=("", *_EACH),  # without a phase: null on other devices than a GPU
    columns=(
        CellColumn(
            "{phase}_kernel_time_ms_{statistic}",
            "kernels of a phase, or of a whole step, profiled one phase at a time: the GPU's own "
            "work. Median, ci_low, ci_high, coverage; the median alone from a profiled step",
            Aggregate.INTERVAL,
        ),
    ),
    format=Format.MS,
)


def _snapshot(
    name: str, unit: str, doc: str, column: str = "", style: Format = Format.GIB
) -> Metric:
    columns = (CellColumn(f"snapshot_{column or name}", doc),)
    return Metric(name, "memory_snapshot", unit, doc, columns=columns, format=style)


_SNAPSHOT = (
    *(
        _snapshot(f"peak_{kind}_bytes", "bytes", f"peak of the recorded step, {_KINDS[kind]}")
        for kind in ("allocated", "requested", "reserved")
    ),
    _snapshot("replayed_peak_bytes", "bytes", "peak that a replay of the record reaches"),
    _snapshot("unlabelled_bytes", "bytes", "of the peak, memory whose role is unknown"),
    _snapshot("events", "events", "events on the record", style=Format.COUNT),
    _snapshot("wrapped", "", "1 if the record was too short", style=Format.COUNT),
    _snapshot("file_bytes", "bytes", "size of the record that is stored with the log"),
    _snapshot("processing", "ms", "time to turn the record into rows", "processing_ms", Format.MS),
)


def _finding(name: str, unit: str, doc: str) -> Metric:
    return Metric(name, "finding", unit, doc, columns=(CellColumn(name, doc),))


ACCUMULATED_SUM = _finding("sum", "1", "accumulation: the sum")
ACCUMULATION_ERROR = _finding("error", "1", "accumulation: the sum less the exact result")
LOSS = _finding("loss", "nat", "autocast_dtypes: loss of the small model")
_WAYS = {
    "wide": "a norm that computes in fp32",
    "narrow": "a norm that computes in the narrow dtype",
    "library": "torch's own norm",
}
NORM_ERRORS: Mapping[str, Metric] = {
    way: _finding(f"{way}_error", "1", f"{doc}: largest error over the root mean square")
    for way, doc in _WAYS.items()
}
NORM_NONFINITE: Mapping[str, Metric] = {
    way: _finding(f"{way}_nonfinite", "1", f"{doc}: share of elements that are not finite")
    for way, doc in _WAYS.items()
}
BACKEND_EVENTS = Metric("events", "backend", "events", "events that the profiler recorded")
_ANNOTATED = tuple(
    Metric("annotated_steps", instrument, "steps", "number of steps with ranges")
    for instrument in ("nvtx", "nsys")
)

METRICS: tuple[Metric, ...] = (
    STEP_DURATION,
    HOST_DURATION,
    LEAD,
    DRAIN,
    *PEAKS.values(),
    *HELD.values(),
    *_MPS,
    *_SAVED,
    *_TELEMETRY,
    *_KERNELS,
    KERNEL_TIME,
    *_SNAPSHOT,
    ACCUMULATED_SUM,
    ACCUMULATION_ERROR,
    LOSS,
    *NORM_ERRORS.values(),
    *NORM_NONFINITE.values(),
    BACKEND_EVENTS,
    *_ANNOTATED,
)

# Predictions. They have the metrics of the instrument `memory`, too.
AT_PEAK_BYTES = Metric(
    "at_peak_bytes",
    "prediction",
    "bytes",
    "part of the steady step's peak, by role: `note`",
    ("steady",),
    tuple(PHASES),
    (
        CellColumn(
            "predicted_of_{role}_bytes", "part of the predicted peak, by role", Aggregate.SUM
        ),
    ),
    Format.GIB,
)
CLOSED_FORM_BYTES = Metric(
    "closed_form_bytes",
    "prediction",
    "bytes",
    "a term of the closed form of the peak: `note`",
    ("steady",),
    columns=(
        CellColumn("closed_form_of_{role}_bytes", "a term of `closed_form_bytes`", Aggregate.SUM),
        CellColumn("closed_form_bytes", "peak by the closed form", None),
        CellColumn("at_least_bytes", "the closed form without activations, if unknown", None),
    ),
    format=Format.GIB,
)
SQUARE_BYTES = Metric(
    "square_bytes",
    "prediction",
    "bytes",
    "in `attention`, a tensor over all pairs of positions",
    ("steady",),
    columns=(CellColumn("square_bytes", "in `attention`, a tensor over all pairs of positions"),),
    format=Format.MIB,
)


def _formula(what: str) -> Metric:
    name = f"formula_{what}_squares"
    doc = f"in `attention`, number of such tensors in the formula: {what}"
    return Metric(
        name,
        "prediction",
        "tensors",
        doc,
        ("steady",),
        columns=(CellColumn(name, doc),),
        format=Format.COUNT,
    )


FORMULA_SQUARES: Mapping[str, Metric] = {
    what: _formula(what) for what in ("saved", "forward", "backward")
}
VERDICT = Metric(
    "verdict",
    "prediction",
    "",
    "if the cell fits: `note`",
    columns=(
        CellColumn(
            "predicted_verdict",
            "fits, borderline, perhaps, unlikely or oom: on the run's GPU or under the cell's cap",
            Aggregate.NOTE,
            format=Format.TEXT,
        ),
    ),
)


@cache
def predicted(metric: Metric) -> Metric:
    """Return the prediction of a metric of `memory`: its columns begin with `predicted_`."""
    columns = []
    for one in metric.columns:
        name, doc = f"predicted_{one.name}", f"predicted {one.doc}"
        columns.append(
            CellColumn(name, doc, one.aggregate, one.mode, one.phase, one.unit, one.format)
        )
    return Metric(
        metric.name,
        "prediction",
        metric.unit,
        metric.doc,
        metric.modes,
        metric.phases if metric.phases == ("",) else ("", *PHASES),
        tuple(columns),
        metric.format,
    )


PREDICTED_METRICS: tuple[Metric, ...] = (
    *(predicted(PEAKS[kind]) for kind in ("allocated", "requested", "reserved")),
    predicted(HELD["allocated"]),
    AT_PEAK_BYTES,
    CLOSED_FORM_BYTES,
    *(predicted(metric) for metric in _SAVED),
    SQUARE_BYTES,
    *FORMULA_SQUARES.values(),
    VERDICT,
)


@cache
def metric_named(instrument: str, name: str) -> Metric:
    """Return the metric of an instrument. Raise KeyError if it is not declared."""
    for metric in (*METRICS, *PREDICTED_METRICS):
        if metric.instrument == instrument and name_pattern(metric.name).fullmatch(name):
            return metric
    raise KeyError(f"{instrument} declares no metric {name!r} in tasks/spec/metrics.py")


def undeclared(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples whose metric, unit, mode or phase is not declared."""
    found = []
    for sample in samples:
        try:
            is_declared = metric_named(sample.instrument, sample.metric).allows(sample)
        except KeyError:
            is_declared = False
        if not is_declared:
            found.append(sample)
    return found
