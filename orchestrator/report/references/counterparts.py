"""Our value for each published quantity: a column of `cells`, or a figure from a cell's kernels
or allocations.

Metrics without an entry in COUNTERPARTS follow from other numbers of the same table (differences,
quotients, totals over steps) or describe single kernels, whose launches on another GPU are not
comparable.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from orchestrator.analysis import kernels as kernel_rows
from orchestrator.analysis.axes import Row, has_value, number_in
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB, MIB
from orchestrator.report.references.matching import dimensions_of, is_first_forward
from orchestrator.report.references.records import ReferenceNumber
from orchestrator.report.tables.layouts import having
from orchestrator.report.text.numbers import format_ms
from tasks.spec.tables import STEP_PHASES, UNKNOWN_CLASS, WHOLE_STEP

# A published kernel table may cover several phases of ours.
_PASSES = {"": ("forward", "backward"), "step": STEP_PHASES}
DURATION = "duration"  # the metric of times of steps, which a slow CPU may lengthen
NOT_GEMM = "not matmul"  # the label of shares that are ranked without the matrix products
# Our modules for each part that a write-up names.
_MODULES = {
    "scores": ("scores",),
    "softmax": ("softmax",),
    "values": ("attention output",),
    "matmul": kernel_rows.ATTENTION_MATMULS,
    "attention": (
        "q projection", "k projection", "v projection", "rope", *kernel_rows.ATTENTION_MATMULS, "softmax",
        "attention", "o projection",
    ),
}  # fmt: skip
_FORWARD_ROLES = ("activations", "temporary")
# The roles and the module of our allocations for each part that a write-up names.
_ALLOCATED: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "AttnScores": (_FORWARD_ROLES, "scores"),
    "Softmax": (_FORWARD_ROLES, "softmax"),
    "softmax": (_FORWARD_ROLES, "softmax"),
    "AttnOut": (_FORWARD_ROLES, "attention output"),
    "Attn": (_FORWARD_ROLES, "attention"),
    "FFN": (_FORWARD_ROLES, "ffn"),
    "Norm": (_FORWARD_ROLES, "norm"),
    "Embed": (_FORWARD_ROLES, "embedding"),
    "Block": (_FORWARD_ROLES, "residual"),
    "Gradient": (("gradients",), None),
    "Opt State": (("optimizer state",), None),
}
# Our column for each tensor whose size a write-up calculates.
_TENSORS = {
    "": "residual_stream_bytes",
    "Attention scores (Q @ K^T)": "square_bytes",
    "Softmax intermediate (exp_x)": "square_bytes",
    "Attention weights (softmax output)": "square_bytes",
    "theoretical total": "forward_held_allocated_bytes",
    "measured": "forward_held_allocated_bytes",
}
_NEGLIGIBLE = 0.005  # share of kernel time without a known class; published ones have three digits


@dataclass(frozen=True)
class Figures:
    """Kernels and allocations of a run, by cell id."""

    results: Results

    @cached_property
    def kernels(self) -> defaultdict[str, list[kernel_rows.TimedKernel]]:
        kernels = kernel_rows.inside_operators(self.results.kernels())
        watched = having("attributed_to_phase")(self.results.cells)
        # Without the number of steps, the milliseconds of a step are unknown.
        is_shown = kernels["cell"].isin(watched["cell"]) & (kernels["ms"] > 0)
        return kernel_rows.rows_by_cell(kernels[is_shown])

    @cached_property
    def allocations(self) -> Mapping[str, pd.DataFrame]:
        """The allocations at the peak, the largest first."""
        return self._allocations("peak")

    @cached_property
    def largest_of_parts(self) -> Mapping[str, pd.DataFrame]:
        """The largest allocation of each role and part in a step; older runs have none."""
        return self._allocations(WHOLE_STEP)

    def _allocations(self, moment: str) -> Mapping[str, pd.DataFrame]:
        rows = self.results.allocations()
        rows = rows[rows["count"].notna() & (rows["moment"] == moment)]
        recorded = having("snapshot_peak_allocated_bytes")(self.results.cells)
        rows = rows[rows["cell"].isin(recorded["cell"])]
        rows = rows.sort_values("size_bytes", ascending=False, kind="stable")
        return {str(cell): own for cell, own in rows.groupby("cell")}


OurValue = Callable[[ReferenceNumber, Row, Figures], float | None]


@dataclass(frozen=True)
class Counterpart:
    """Lookup and format of our value for a metric.

    title: the quantity with its unit. unit: what the value is divided by to be in this unit. form:
    of the value in this unit; None for milliseconds.
    """

    title: str
    ours: OurValue
    form: str | None = None
    unit: float = 1

    def show(self, value: float) -> str:
        return format_ms(value) if self.form is None else format(value / self.unit, self.form)

    def title_for(self, number: ReferenceNumber) -> str:
        """Return the quantity as the table prints it."""
        labels = {"part": "", "rank": "", "each": "all layers", **number.labels}
        if number.labels.get("among") == NOT_GEMM:
            labels["rank"] += " (without matrix products)"
        phase = number.phase or "both passes"
        text = self.title.format(phase=phase, statistic=number.statistic, **labels)
        return " ".join(text.split())  # an absent label leaves two spaces


def _own(column: str) -> OurValue:
    """Return a function of the value in a column. {} in its name stands for the phase."""
    return lambda number, row, figures: number_in(row, column.format(number.phase))


def phase_ms(row: Row, phase: str, statistic: str) -> float | None:
    """Return a time of a phase. Published steps end synchronized, like `step_synced`."""
    is_synced = phase == "step" and number_in(row, "step_synced_ms_median")
    return number_in(row, f"{'step_synced' if is_synced else phase}_ms_{statistic}")


def _call_ms(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    step_ms, calls = (
        number_in(row, f"step_ms_{number.statistic}"),
        number_in(row, "collective_calls"),
    )
    return step_ms / calls if step_ms and calls else None


def _peak(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    first = "first_forward_" if is_first_forward(number, row) else ""
    return number_in(row, f"{first}peak_allocated_bytes")


def _gemm_share(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    """Return the share of matrix products, None if the class of too many kernels is unknown."""
    kernels = figures.kernels[row["cell"]]
    total_ms = math.fsum(one.ms for one in kernels)
    by_class = kernel_rows.sums(kernels, "kernel_class")
    if not kernels or by_class.get(UNKNOWN_CLASS, 0.0) > _NEGLIGIBLE * total_ms:
        return None
    return by_class.get(kernel_rows.GEMM, 0.0) / total_ms


def _kernel_share(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    """Return the share of the phase's kernel time that its kernel of this rank takes."""
    phases = _PASSES.get(number.phase, (number.phase,))
    inside = [one for one in figures.kernels[row["cell"]] if one.phase in phases]
    total_ms = math.fsum(one.ms for one in inside)
    if number.labels.get("among") == NOT_GEMM:
        # A kernel of unknown class may be a matrix product.
        inside = [
            one for one in inside if one.kernel_class not in (kernel_rows.GEMM, UNKNOWN_CLASS)
        ]
    times_ms = sorted(kernel_rows.sums(inside, "name").values(), reverse=True)
    rank = int(number.labels["rank"])
    return times_ms[rank - 1] / total_ms if rank <= len(times_ms) else None


def _part_time(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    """Return the milliseconds of a part, or None if it is fused with another part."""
    part = number.labels["part"]
    among = [one for one in figures.kernels[row["cell"]] if one.phase == number.phase]
    if part == "matmul":
        among = [one for one in among if one.kernel_class == kernel_rows.GEMM]
    found = kernel_rows.ms_of_parts(among, _MODULES[part])
    if found is None or number.labels.get("each") != "layer":
        return found
    dimensions = dimensions_of(row)
    return None if dimensions is None else found / dimensions.num_layers


def _softmax_over_matmul(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    inside = [one for one in figures.kernels[row["cell"]] if one.phase == number.phase]
    softmax, matmul = kernel_rows.softmax_and_products_ms(inside)
    return softmax / matmul if softmax is not None and matmul else None


def _allocation(number: ReferenceNumber, row: Row, figures: Figures) -> float | None:
    """Return the bytes of the allocation of a rank at the peak, 1 for the largest.

    Without a rank it is the largest of a part in the step, in older runs at the peak.
    """
    rows = figures.allocations.get(row["cell"])
    if rows is None:
        return None
    rank = int(number.labels.get("rank", 1))
    if "rank" not in number.labels and "part" in number.labels:
        rows = figures.largest_of_parts.get(row["cell"], rows)
        roles, module = _ALLOCATED.get(number.labels["part"], ((), None))
        rows = rows[rows["role"].isin(roles)]
        rows = rows[rows["part"] == module] if module else rows
        return float(rows["size_bytes"].iloc[0]) if len(rows) else None
    # A row stands for as many allocations as it counts.
    largest = rows[rows["count"].cumsum() >= rank]["size_bytes"]
    return float(largest.iloc[0]) if len(largest) else None


COUNTERPARTS: Mapping[str, Counterpart] = {
    DURATION: Counterpart(
        "{phase} {statistic} (ms)",
        lambda number, row, figures: phase_ms(row, number.phase, number.statistic),
    ),
    "call": Counterpart("call {statistic} (ms)", _call_ms),
    "tokens_per_gpu": Counterpart(
        "tokens per second and GPU", _own("tokens_per_s_per_gpu"), ",.0f"
    ),
    "peak": Counterpart("peak memory (GiB)", _peak, ".2f", GIB),
    "held": Counterpart("memory after {phase} (GiB)", _own("{}_held_allocated_bytes"), ".2f", GIB),
    "saved": Counterpart("saved tensors (MiB)", _own("saved_bytes"), ".2f", MIB),
    "saved_squares": Counterpart("saved squares", _own("saved_squares"), ".1f"),
    "tensor": Counterpart(
        "tensor {part} (MiB)",
        lambda number, row, figures: number_in(
            row, _TENSORS.get(number.labels.get("part", ""), "")
        ),
        ".2f",
        MIB,
    ),
    "allocation": Counterpart("largest allocation {rank} {part} (MiB)", _allocation, ".2f", MIB),
    "gemm_share": Counterpart("share of matrix products", _gemm_share, ".1%"),
    "kernel_share": Counterpart("share of kernel {rank}, {phase}", _kernel_share, ".1%"),
    "part_time": Counterpart("{part} in {phase}, {each} (ms)", _part_time),
    "softmax_over_matmul": Counterpart("softmax / matmul in {phase}", _softmax_over_matmul, ".1%"),
    "sum": Counterpart("sum", _own("sum"), ".9f"),
    "absolute_error": Counterpart(
        "error of the sum",
        lambda number, row, figures: abs(row["error"]) if has_value(row, "error") else None,
        ".9f",
    ),
}
