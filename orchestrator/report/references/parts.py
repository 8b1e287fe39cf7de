"""What a run has in place of published kernels, parts of attention, single allocations and calculated tensors.

Each `with_…` puts beside our cells what its `ours_…` looks up: kernels and allocations are rows of their own in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import Row, has_value
from orchestrator.analysis.results import Results
from orchestrator.report.references.matching import dimensions_of
from orchestrator.report.references.records import Number
from orchestrator.report.tables.kernel_layouts import (
    ATTENTION_MATMULS,
    GEMM,
    OUTSIDE_OPERATORS,
    ms_of_parts,
)

Lookup = Mapping[Hashable, Any]

_SHARES, _PARTS, _SIZES = "_kernel_shares", "_part_ms", "_allocation_bytes"
_PHASES = {"": ("forward", "backward"), "step": ("forward", "backward", "optimizer")}
NOT_GEMM = "not matmul"  # the label of shares that are ranked among the other kernels alone
_MODULES = {  # by the word of a write-up, our parts of the model
    "scores": ("scores",),
    "softmax": ("softmax",),
    "values": ("attention output",),
    "matmul": ATTENTION_MATMULS,
    "attention": (
        "q projection",
        "k projection",
        "v projection",
        "rope",
        *ATTENTION_MATMULS,
        "softmax",
        "attention",
        "o projection",
    ),
}
_OF_FORWARD = ("activations", "temporary")
_ALLOCATED = {  # by the word of a write-up, the roles and the part of the model of our allocations
    "AttnScores": (_OF_FORWARD, "scores"),
    "Softmax": (_OF_FORWARD, "softmax"),
    "softmax": (_OF_FORWARD, "softmax"),
    "AttnOut": (_OF_FORWARD, "attention output"),
    "Attn": (_OF_FORWARD, "attention"),
    "FFN": (_OF_FORWARD, "ffn"),
    "Norm": (_OF_FORWARD, "norm"),
    "Embed": (_OF_FORWARD, "embedding"),
    "Block": (_OF_FORWARD, "residual"),
    "Gradient": (("gradients",), None),
    "Opt State": (("optimizer state",), None),
}
_CALCULATED = {  # by the word of a write-up, our column
    "Attention scores (Q @ K^T)": "square_bytes",
    "Softmax intermediate (exp_x)": "square_bytes",
    "Attention weights (softmax output)": "square_bytes",
    "theoretical total": "forward_held_allocated_bytes",
    "measured": "forward_held_allocated_bytes",
}


def with_shares(results: Results) -> pd.DataFrame:
    """The shares of a phase's kernel time that single kernels take, the largest first."""

    def shares(kernels: pd.DataFrame) -> Lookup:
        found: dict[Hashable, list[float]] = {}
        for phase in ("forward", "backward", *_PHASES):
            inside = kernels[kernels["phase"].isin(_PHASES.get(phase, (phase,)))]
            whole_ms = inside["ms"].sum()
            for among, chosen in (("", inside), (NOT_GEMM, inside[inside["kernel_class"] != GEMM])):
                by_name = (
                    chosen.groupby("name", observed=True)["ms"].sum().sort_values(ascending=False)
                )
                found[phase, among] = [float(ms / whole_ms) for ms in by_name]
        return found

    return _beside(_with_kernels(results), _named_kernels(results), _SHARES, shares)


def ours_share(number: Number, row: Row) -> float | None:
    found = row[_SHARES].get((number.phase, number.labels.get("among", "")), [])
    place = int(number.labels.get("rank", 1)) - 1
    return found[place] if place < len(found) else None


def with_parts(results: Results) -> pd.DataFrame:
    """Milliseconds of a pass that the kernels of a part of attention take, where none is fused with another part."""

    def milliseconds(kernels: pd.DataFrame) -> Lookup:
        products = kernels[kernels["kernel_class"] == GEMM]
        found: dict[Hashable, float] = {}
        for part, names in _MODULES.items():
            for phase, took_ms in ms_of_parts(
                products if part == "matmul" else kernels, names, "phase"
            ).items():
                found[str(phase), part] = float(took_ms)
        return found

    return _beside(_with_kernels(results), _named_kernels(results), _PARTS, milliseconds)


def ours_part(number: Number, row: Row) -> float | None:
    """Of all layers, or of one where theirs is."""
    found: float | None = row[_PARTS].get((number.phase, number.labels["part"]))
    dimensions = dimensions_of(row)
    if found is None or number.labels.get("each") != "layer":
        return found
    return None if dimensions is None else found / dimensions.num_layers


def with_allocations(results: Results) -> pd.DataFrame:
    """The sizes of single allocations that live at the peak, the largest first."""
    cells = results.cells
    if "snapshot_peak_allocated_bytes" not in cells:
        return cells.iloc[:0]

    def sizes(single: pd.DataFrame) -> Lookup:
        found: dict[Hashable, list[float]] = {"": _largest(single)}
        for word, (roles, part) in _ALLOCATED.items():
            of_part = single["role"].isin(roles) & ((single["part"] == part) if part else True)
            found[word] = _largest(single[of_part])
        return found

    rows = results.allocations()[["cell", "moment", "count", "role", "part", "size_bytes"]]
    single = rows[rows["count"].notna() & (rows["moment"] == "peak")]
    return _beside(cells[cells["snapshot_peak_allocated_bytes"].notna()], single, _SIZES, sizes)


def ours_allocation(number: Number, row: Row) -> float | None:
    """By its place among all where theirs has one, else the largest of the part."""
    ranked = "rank" in number.labels
    found = row[_SIZES].get("" if ranked else number.labels.get("part", ""), [])
    place = int(number.labels["rank"]) - 1 if ranked else 0
    return found[place] if place < len(found) else None


def ours_calculated(number: Number, row: Row) -> float | None:
    if number.metric == "saved":
        column = "saved_bytes"
    else:
        column = (
            _CALCULATED.get(number.labels["part"], "")
            if "part" in number.labels
            else "residual_stream_bytes"
        )
    return float(row[column]) if has_value(row, column) else None


def _largest(rows: pd.DataFrame, most: int = 10) -> list[float]:
    ordered = rows.sort_values("size_bytes", ascending=False).head(most)
    return [
        float(size)
        for size in np.repeat(ordered["size_bytes"], ordered["count"].astype(int))[:most]
    ]


def _with_kernels(results: Results) -> pd.DataFrame:
    cells = results.cells
    return (
        cells[cells["attributed_to_phase"].notna()]
        if "attributed_to_phase" in cells
        else cells.iloc[:0]
    )


def _named_kernels(results: Results) -> pd.DataFrame:
    kernels = (
        results.kernels()
        if "attributed_to_phase" in results.cells
        else pd.DataFrame({"cell": [], "name": []})
    )
    return kernels[kernels["name"] != OUTSIDE_OPERATORS]


def _beside(
    cells: pd.DataFrame, rows: pd.DataFrame, column: str, of_cell: Callable[[pd.DataFrame], Lookup]
) -> pd.DataFrame:
    found = {cell: of_cell(own) for cell, own in rows.groupby("cell", observed=True)}
    return cells.assign(
        **{
            column: pd.Series(
                [found.get(cell, {}) for cell in cells["cell"]], cells.index, dtype=object
            )
        }
    )
