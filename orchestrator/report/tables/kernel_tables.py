"""Tables of kernels, and of how much of time and memory is attributed to something."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
import pandas as pd

from orchestrator.analysis import kernels as kernel_rows
from orchestrator.analysis.axes import Row, each, has_value, is_null, key_axes
from orchestrator.analysis.results import Results
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables import layouts, table
from orchestrator.report.tables.formatters import kernel_name
from orchestrator.report.tables.table import MISSING, Entry, Table, TableGrid
from tasks.spec.tables import STEP_PHASES, UNKNOWN_CLASS

OUTSIDE_PHASES = "outside"
PHASE = "phase"  # title of the column that names phases
BOTH_PASSES, WHOLE_STEP = "forward + backward", "step"
# Stands behind a phase or module if the number of steps is unknown.
WHOLE_TRACE = ", whole trace"
_SHOWN_MODULES = 3
_TOP = 8  # kernels of each phase
_DIFFERENT = 20  # kernels in which two cells differ
_NAME = "name"  # title of the column that every view shows
_STATISTICS = attrgetter(
    "instances", "total_ns", "mean_ns", "median_ns", "min_ns", "max_ns", "sd_ns"
)
_RATIO_TITLE = "softmax / matmul"
_FIRST_TITLES = ("GEMM share", _RATIO_TITLE)
# Axes by which two cells are paired, the most interesting first.
_PAIRING_AXES = ("compile", "precision", "attention", "pass")


def top_kernels(results: Results) -> TableGrid:
    """Return the kernels that took longest of each cell and phase, both passes, and the step.

    The longest one that is no matrix product is always among them.
    """
    found = []
    for cell, scope, own in _by_scope(results, results.kernels()):
        total_ms = float(np.sum([one.ms for one in own]))
        names = _largest_first(kernel_rows.sums(own, "name"))
        # A kernel of unknown class may be a matrix product.
        others = {
            one.name for one in own if one.kernel_class not in (kernel_rows.GEMM, UNKNOWN_CLASS)
        }
        longest_other = [name for name in names if name in others][:1]
        for name in dict.fromkeys([*names[:_TOP], *longest_other]):
            same = [one for one in own if one.name == name]
            found.append((cell, {PHASE: Entry(scope), **_kernel_entries(same, total_ms)}))
    return layouts.grid_of(key_axes(results), found, [PHASE], label=_NAME)


def by_class(results: Results) -> TableGrid:
    """Return one row per cell and phase, both passes and the step: softmax, matmul, and classes.

    If some kernels have no known class, the shares of the others are lower bounds.
    """
    kernels = results.kernels()
    times_ms = kernels.groupby("kernel_class")["ms"].sum()
    present = list(times_ms.sort_values(ascending=False).index)
    found = []
    for cell, scope, own in _by_scope(results, kernels):
        total_ms = float(np.sum([one.ms for one in own]))
        ms = kernel_rows.sums(own, "kernel_class")
        counts = kernel_rows.sums(own, "kernel_class", "kernels")
        # Smaller than the last printed digit: it changes no share.
        is_bound = ms.get(UNKNOWN_CLASS, 0.0) >= 0.0005 * total_ms
        entries = {"kernel ms": table.milliseconds(total_ms)}
        for name in present:
            share = table.quotient(ms.get(name, math.nan), total_ms, ".1%")
            is_lower = is_bound and name != UNKNOWN_CLASS
            entries[f"{name} share"] = table.at_least(share) if is_lower else share
        entries |= _softmax_entries(cell, scope, own)
        entries |= {f"ms of {name}": table.milliseconds(ms.get(name)) for name in present}
        entries |= {f"kernels of {name}": table.quantity(counts.get(name), "g") for name in present}
        # The most important ones come first, since a screen may be too narrow for others.
        first = {title: entries[title] for title in _FIRST_TITLES if title in entries}
        found.append((cell, {PHASE: Entry(scope), **first, **entries}))
    return layouts.grid_of(key_axes(results), found, [PHASE])


def by_module(results: Results) -> TableGrid:
    """Return one row per cell and module, one column per phase: ms, and the share of the step."""
    kernels = results.kernels()
    phases = _present_phases(set(kernels["phase"]))
    found = []
    for cell, suffix, own in _by_cell(results, kernels):
        total_ms = math.fsum(one.ms for one in own)
        named = [one for one in own if not is_null(one.module)]
        by_module = kernel_rows.sums(named, "module")
        for module in _largest_first(by_module):
            times_ms = kernel_rows.sums([one for one in named if one.module == module], "phase")
            entries = {"module": Entry((module or "not attributed") + suffix)}
            for phase in phases:
                entries[f"{phase or OUTSIDE_PHASES} ms"] = table.milliseconds(times_ms.get(phase))
            entries["share"] = table.quotient(by_module[module], total_ms, ".1%")
            found.append((cell, entries))
    return layouts.grid_of(key_axes(results), found, ["module"], "module")


def difference(results: Results) -> TableGrid:
    """Return the kernels in which two cells differ most.

    With more than two cells, the first two that differ in a single axis are compared.
    """
    pair = _pair(results)
    if pair is None:
        return TableGrid()
    first, second = pair
    axes = [axis for axis in results.axes if str(first.get(axis)) != str(second.get(axis))]
    kernels = results.kernels()
    sides, names = [], []
    for cell in pair:
        sides.append(kernels[kernels["cell"] == cell["cell"]])
        names.append(" ".join(f"{axis}={cell[axis]}" for axis in axes) or str(cell["cell"]))
    return difference_between(sides, names)


def difference_between(cells: Sequence[pd.DataFrame], names: Sequence[str]) -> TableGrid:
    """Return the kernels that differ most between two cells, which may be of different runs."""
    sides = list(map(kernel_rows.inside_operators, cells))
    if not all(kernels["phase"].any() for kernels in sides):
        # A trace without phases is compared as a whole.
        sides = [kernels.assign(phase=WHOLE_STEP) for kernels in sides]
    titles, sums_of_sides = [], []
    for name, own in zip(names, sides, strict=True):
        titles.append(name + (WHOLE_TRACE if own["steps"].isna().any() else ""))
        by_kernel = kernel_rows.per_step(own).groupby(["phase", "kernel_class", "name"])
        sums_of_sides.append(by_kernel[["kernels", "ms"]].sum())
    left, right = sums_of_sides
    both = left.add_suffix("_left").join(right.add_suffix("_right"), how="outer").fillna(0.0)
    both["more_ms"] = both["ms_right"] - both["ms_left"]
    order = both["more_ms"].abs().sort_values(ascending=False).index[:_DIFFERENT]
    rows = []
    for row in each(both.loc[order].reset_index()):
        entries = [Entry(row["phase"] or OUTSIDE_PHASES), Entry(row["kernel_class"])]
        for side in ("left", "right"):
            entries.append(table.quantity(row[f"kernels_{side}"], "g"))
            entries.append(table.milliseconds(row[f"ms_{side}"]))
        more = table.quantity(row["more_ms"], "+.3f", "ms")
        rows.append([*entries, more, kernel_name(row["name"])])
    counts = [(name, title) for name in titles for title in ("kernels", "ms")]
    return table.grid_of_rows([PHASE, "class"], [*counts, "more ms", _NAME], rows, label=_NAME)


def _pair(results: Results) -> tuple[Row, Row] | None:
    axes = key_axes(results)
    cells = list(each(results.cells, axes))
    if len(cells) == 2:
        return cells[0], cells[1]
    for axis in [axis for axis in _PAIRING_AXES if axis in axes]:
        others = [other for other in axes if other != axis]
        for members in layouts.groups(results.cells, others, (axis,)):
            if len(members) > 1:
                return members[0], members[1]
    return None


def _by_cell(
    results: Results, kernels: pd.DataFrame
) -> Iterator[tuple[Row, str, list[kernel_rows.TimedKernel]]]:
    """Yield each cell with WHOLE_TRACE if its steps are unknown, and with its kernels."""
    inside = kernel_rows.inside_operators(kernels)
    by_cell = kernel_rows.rows_by_cell(inside)
    unknown = set(inside.loc[inside["steps"].isna(), "cell"])
    for cell in layouts.each_cell(results):
        if cell["cell"] in by_cell:
            yield cell, WHOLE_TRACE if cell["cell"] in unknown else "", by_cell[cell["cell"]]


def _by_scope(
    results: Results, kernels: pd.DataFrame
) -> Iterator[tuple[Row, str, list[kernel_rows.TimedKernel]]]:
    """Yield each cell with its kernels by phase, of both passes, and of the step."""
    for cell, suffix, own in _by_cell(results, kernels):
        phases = {one.phase for one in own}
        scopes = {phase or OUTSIDE_PHASES: {phase} for phase in _present_phases(phases)}
        if {"forward", "backward"} < scopes.keys():
            scopes[BOTH_PASSES] = {"forward", "backward"}
        if len(_present_phases(phases)) > 1:
            scopes[WHOLE_STEP] = phases
        for scope, shown in scopes.items():
            yield cell, scope + suffix, [one for one in own if one.phase in shown]


def _present_phases(phases: Collection[str]) -> list[str]:
    return [phase for phase in (*STEP_PHASES, "") if phase in phases]


def _softmax_entries(
    cell: Row, phase: str, kernels: list[kernel_rows.TimedKernel]
) -> dict[str, Entry]:
    softmax_ms, matmul_ms = kernel_rows.softmax_and_products_ms(kernels)
    ratio, flops = MISSING, MISSING
    if softmax_ms is not None and matmul_ms is not None:
        ratio = table.quotient(softmax_ms, matmul_ms)
        # The closed forms count the forward pass: five FLOPs an element for the softmax.
        if phase == "forward" and has_value(cell, "softmax_flops"):
            flops = table.quotient(cell["softmax_flops"], cell["attention_matmul_flops"], ".3f")
    times = {"softmax": softmax_ms, "matmul": matmul_ms}
    entries = {f"{name} ms": table.milliseconds(ms) for name, ms in times.items()}
    return {**entries, _RATIO_TITLE: ratio, "in FLOPs": flops}


def _largest_first(values: Mapping[str, float]) -> list[str]:
    """Return the keys by their values, and keys with equal values by name."""
    return sorted(sorted(values), key=lambda name: -values[name])


def _kernel_entries(
    kernels: Sequence[kernel_rows.TimedKernel], total_ms: float
) -> dict[str, Entry]:
    """Return the columns of nsys's cuda_gpu_kern_sum with class and modules, for one kernel.

    It has a row for each module that launches it.

    All statistics are exact but the median: of several rows, it is the median of their medians,
    each counted as often as it has instances.
    """
    statistics = np.array(list(map(_STATISTICS, kernels)), dtype=float)
    counts, total_ns, mean_ns, median_ns, min_ns, max_ns, sd_ns = statistics.T
    total = counts.sum()
    mean = total_ns.sum() / total
    within = (counts - 1) * np.nan_to_num(sd_ns) ** 2
    between = counts * (mean_ns - mean) ** 2
    deviation = ((within + between).sum() / (total - 1)) ** 0.5 if total > 1 else math.nan
    medians = np.repeat(median_ns, counts.astype(int))
    medians = medians[~np.isnan(medians)]
    median = _us(np.median(medians) if len(medians) else math.nan)
    if len(kernels) > 1:
        median = median._replace(text=f"≈{median.text}")
    ms = np.nansum([one.ms for one in kernels])
    known = [one for one in kernels if not is_null(one.module)]
    modules = [
        name or "not attributed" for name in _largest_first(kernel_rows.sums(known, "module"))
    ]
    if len(modules) > _SHOWN_MODULES:
        modules[_SHOWN_MODULES:] = [f"{len(modules) - _SHOWN_MODULES} more"]
    return {
        "time": table.quantity(ms / total_ms, ".1%"),
        "total ms": table.milliseconds(ms),
        "instances": table.quantity(math.fsum(one.kernels for one in kernels), "g"),
        "class": Entry(kernels[0].kernel_class),
        _NAME: kernel_name(kernels[0].name),
        "modules": Entry(", ".join(modules)),
        "avg µs": _us(mean),
        "med µs": median,
        "min µs": _us(np.fmin.reduce(min_ns)),
        "max µs": _us(np.fmax.reduce(max_ns)),
        "sd µs": _us(deviation),
    }


def _us(ns: float) -> Entry:
    return table.quantity(ns / 1e3, ".1f", "µs")


@show.formatter
def _profile_cost(row: Row, phase: str) -> Entry:
    """Return the duration of a profiled phase over that of a timed one."""
    profiled_ms = _profiled_ms(phase)(row).number
    if profiled_ms is None or not has_value(row, f"{phase}_ms_median"):
        return MISSING
    return table.quotient(profiled_ms, row[f"{phase}_ms_median"])


def _profiled_ms(phase: str) -> show.Value:
    """Return what shows the time from a profiled phase's first kernel to its last."""
    return show.ratio(f"{phase}_kernel_time_ms", f"{phase}_busy", ".1f")


_WITH_KERNELS = layouts.having("attributed_to_phase")

KERNEL_TABLES: tuple[Table, ...] = (
    Table(
        "kernels",
        "Top kernels by phase",
        "The kernels that take longest, and the longest that is no matrix product (GEMM), of each"
        " phase, of forward and backward together and of the step. Share of the phase's kernel"
        " time; total and instances of one step. On the CPU, operators by their own time.",
        top_kernels,
        _WITH_KERNELS,
        is_default=True,
        column_notes={
            "avg µs|med µs|min µs": "Microseconds: of one instance.",
            "med µs": "A median with ≈ is calculated from the medians of several modules.",
        },
    ),
    Table(
        "kernel-classes",
        "Kernel time by class of work",
        "Milliseconds of kernels in a step, and the share of each class; GEMM: matrix products. A"
        " share with ≥ is a lower bound: some kernels (other) have no known class. `pass` forward"
        " is inference.",
        by_class,
        _WITH_KERNELS,
        is_default=True,
        column_notes={
            "softmax ms|matmul ms|softmax / matmul": "The softmax and the two matrix products of"
            " attention (scores, and weights times values): milliseconds, and their ratio in time"
            " and in FLOPs of the forward pass. A part that is fused with another one has no time.",
            "ms of|kernels of": "Then the milliseconds and the number of kernels of each class,"
            " which shows what compiling fused.",
        },
    ),
    Table(
        "kernel-modules",
        "Kernel time by module",
        "Milliseconds of kernels in a step, by phase, and the share of the step. Backward kernels"
        " belong to the module whose forward operator they differentiate.",
        by_module,
        _WITH_KERNELS,
    ),
    Table(
        "kernel-diff",
        "Kernels that differ between two cells",
        "The kernels whose milliseconds in a step differ most. `sweep report` shows two cells that"
        " differ in a single axis, or those of --cells.",
        difference,
        _WITH_KERNELS,
    ),
    Table(
        "coverage",
        "Coverage of the kernel trace and of the memory snapshot",
        "Kernels: shares of kernel time that have a phase, a module, a class.",
        layouts.cell_rows(
            show.col("attributed_to_phase", "phase known"),
            show.col("attributed_to_module", "module known"),
            show.col("attributed_to_class", "class known"),
            show.col("busy"),
            (
                "replayed / requested",
                show.ratio("snapshot_replayed_peak_bytes", "snapshot_peak_requested_bytes", ".4f"),
            ),
            show.col("snapshot_unlabelled_share", "unlabelled"),
            show.col("busy_timed", "busy when timed"),
            show.col("idle_ms"),
            show.col("idle_for_host_ms", "idle for the CPU ms"),
            show.col("drain_ms"),
            show.col("profiled_step_ms"),
            show.col("profile_cost", "cost"),
            *((f"profiled {phase} ms", _profiled_ms(phase)) for phase in STEP_PHASES),
            *((f"cost of {phase}", _profile_cost(phase)) for phase in STEP_PHASES),
            show.col("processing_share", "processing"),
            show.col("snapshot_peak_allocated_bytes", "allocated"),
            show.col("snapshot_peak_requested_bytes", "requested"),
            show.col("snapshot_replayed_peak_bytes", "replayed"),
            show.col("snapshot_peak_reserved_bytes", "reserved"),
            show.col("snapshot_events", "events"),
            ("wrapped", show.yes_or_no("snapshot_wrapped")),
        ),
        layouts.having("attributed_to_phase", "snapshot_peak_allocated_bytes"),
        column_notes={
            "busy": "Busy: share of the time from the first kernel to the last, with the profiler,"
            " which slows the CPU.",
            "busy when timed": "Busy when timed: kernel time over the median of a step without the"
            " profiler.",
            "idle": "Idle: milliseconds of a step between kernels, and those in which the CPU was"
            " late to launch.",
            "cost": "Cost: a profiled step or phase over a timed one.",
            "profiled": "Profiled: of a phase, from its first kernel to its last.",
            "processing": "Processing: reading the trace, as a share of the whole attempt.",
            "allocated|requested|replayed|reserved": "Memory: peaks of the recorded step in GiB, as"
            " the allocator counts them.",
            "replayed": "Replayed: the peak of requested bytes that the allocator's record adds up"
            " to.",
            "unlabelled": "Unlabelled: share of the peak with unknown use.",
            "wrapped": "Wrapped: the record was too short for the step.",
        },
    ),
)
