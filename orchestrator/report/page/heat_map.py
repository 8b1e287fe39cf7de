"""The heat map of the first screen: every cell of the main task as a number and a shade.

Rows are models, columns contexts and panels precisions. The page holds all values of the switches;
the first ones are in the HTML, so that the map needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import MAIN, NOTHING, RUN, Row, has_value, is_null
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text.cell_names import (
    COMPILED,
    LENGTH,
    NAME,
    PASSES,
    cell_keys,
    ordered,
    scope_of,
)
from orchestrator.report.text.numbers import number
from orchestrator.report.text.pairs import TIME
from orchestrator.report.text.slices import choose_slice, main_cells
from tasks.spec.parameters import TIMING_AXES
from tasks.spec.status import OUT_OF_MEMORY

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 12, 8, 3
_LEAST_SHADE, _MOST_SHADE = 6, 100
_SHORT_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


@dataclass(frozen=True)
class HeatMeasure:
    """A value that the map can show. column: of the cells, times `scale`."""

    name: str
    label: str
    unit: str
    column: str
    scale: float = 1.0
    is_log: bool = False


MEASURES = (
    HeatMeasure("step", "Step time", "ms per step", TIME, is_log=True),
    HeatMeasure("speed", "Speed-up", "times as fast as in fp32", ""),
    HeatMeasure("busy", "GPU busy", "% of the step in which GPU kernels run", "busy_timed", 100),
    HeatMeasure("peak", "Memory", "GiB at the peak", "peak_allocated_bytes", 1 / GIB, is_log=True),
    HeatMeasure("mfu", "MFU", "% of the GPU's peak", "mfu", 100),
)


@dataclass(frozen=True)
class Switch:
    """A choice of the reader: the values of an axis, and their labels. The first one is shown."""

    axis: str
    label: str
    options: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class HeatCell:
    """One cell of the map as it is shown first. It is empty if nothing was measured there."""

    position: str
    text: str = ""
    label: str = ""
    key: str = ""
    shade: int = 0
    style: str = ""


@dataclass(frozen=True)
class HeatMap:
    """The map. cells: by panel, row and column. data: what its script needs for the switches."""

    row_title: str
    panels: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]
    measures: Sequence[HeatMeasure]
    switches: Sequence[Switch]
    cells: Sequence[Sequence[Sequence[HeatCell]]]
    note: str
    data: Mapping[str, object]
    has_failures: bool
    is_bound_known: bool


def heat_map(results: Results) -> HeatMap | None:
    """Return the map of the task with most cells, or None if there is no grid to show."""
    cells, row_axis = main_cells(results)
    if LENGTH not in cells or cells.empty:
        return None
    rows = pd.Series(range(len(results.cells)), results.cells.index)
    cells = cells.assign(key=cell_keys(results), row=rows)
    cells = cells[cells[LENGTH].notna() & (cells["status"] != "skipped")]
    if cells.empty or (cells[row_axis].nunique() < 2 and cells[LENGTH].nunique() < 2):
        return None
    grid = (row_axis, LENGTH, "precision")
    switched = [axis for axis in ("compile", "pass", "memory_limit_gib", NAME) if axis not in grid]
    switched = [
        axis for axis in switched if axis in cells and cells[axis].nunique(dropna=False) > 1
    ]
    # Runs may repeat cells with other numbers of steps: the best measured one is shown.
    axes = [axis for axis in results.axes if axis not in (RUN, *TIMING_AXES)]
    cells, note = choose_slice(_best_first(cells), axes, [*grid, *switched])
    order = (grid[2], grid[0], grid[1])
    most = (_MOST_PANELS, _MOST_ROWS, _MOST_COLUMNS)
    first = _first_view(cells, switched)
    values = [_fullest(axis, first, count) for axis, count in zip(order, most, strict=True)]
    is_shown = pd.Series(True, index=cells.index)
    for axis, own in zip(order, values, strict=True):
        is_shown &= cells[axis].isin(own)
    cells = cells[is_shown]
    # The only cells with another value may be outside of the grid.
    switched = [axis for axis in switched if cells[axis].nunique(dropna=False) > 1]
    return _map(cells, order, values, switched, note)


def _fullest(axis: str, cells: pd.DataFrame, most: int) -> list[Any]:
    """Return the values that most cells have, in their order."""
    counts = cells[axis].value_counts()
    chosen = set(counts.index[:most])
    return [value for value in ordered(axis, cells) if value in chosen]


def _best_first(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells so that the last of equal ones is of the run with most times."""
    has_time = cells[TIME].notna() if TIME in cells else pd.Series(False, index=cells.index)
    size = has_time.groupby(cells[RUN]).transform("sum") if RUN in cells else has_time
    order = pd.DataFrame({"time": has_time, "size": size}).sort_values(
        ["time", "size"], kind="stable"
    )
    return cells.loc[order.index]


def _map(
    cells: pd.DataFrame,
    axes: tuple[str, str, str],
    values: list[list[Any]],
    switched: list[str],
    note: str,
) -> HeatMap:
    measures = _measures(cells, values[0])
    switches = [_switch(axis, cells) for axis in switched]
    positions = {}
    for record in cells.to_dict("records"):
        place = [str(own.index(record[axis])) for axis, own in zip(axes, values, strict=True)]
        positions[",".join([*place, *(_text(record[axis]) for axis in switched)])] = record
    first = _first_view(cells, switched)
    # The shades of all views have the range of the first one, so that they can be compared.
    ranges = {m.name: _range(first, m) for m in measures if m.column}
    chosen = [switch.options[0][0] for switch in switches]
    panels, rows, columns = (list(map(_heading, own)) for own in values)
    shown: list[list[list[HeatCell]]] = []
    for panel in range(len(panels)):
        shown.append([])
        for row in range(len(rows)):
            places = [f"{panel},{row},{column}" for column in range(len(columns))]
            found = [(place, positions.get(",".join([place, *chosen]))) for place in places]
            shown[-1].append([_cell(at, place, measures, ranges) for place, at in found])
    data = {
        "at": {position: record["row"] for position, record in positions.items()},
        "ranges": ranges,
        "log": [m.name for m in measures if m.is_log],
        "units": {m.name: m.unit for m in measures},
    }
    return HeatMap(
        row_title="model" if axes[1] == NAME else axes[1],
        panels=panels,
        rows=rows,
        columns=columns,
        measures=measures,
        switches=switches,
        cells=shown,
        note=note,
        data=data,
        has_failures=bool(cells["status"].isin(OUT_OF_MEMORY).any()),
        is_bound_known="cpu_bound" in cells and bool(cells["cpu_bound"].notna().any()),
    )


def _measures(cells: pd.DataFrame, precisions: Sequence[object]) -> list[HeatMeasure]:
    measures = [m for m in MEASURES if m.column in cells and cells[m.column].notna().any()]
    has_base = len(precisions) > 1 and str(precisions[0]) == "fp32"
    if has_base and any(m.column == TIME for m in measures):
        measures.insert(1, MEASURES[1])
    return measures


def _heading(value: object) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _first_view(cells: pd.DataFrame, switched: Sequence[str]) -> pd.DataFrame:
    """Return the cells with the first option of each switch."""
    for axis in switched:
        cells = cells[cells[axis].map(_text) == _switch(axis, cells).options[0][0]]
    return cells


def _switch(axis: str, cells: pd.DataFrame) -> Switch:
    values = ordered(axis, cells)
    if cells[axis].isna().any():
        values = [None, *values]
    first = cells[axis].value_counts().index[0] if axis == NAME else MAIN.get(axis)
    if first in values:
        values = [first, *(value for value in values if value != first)]
    labels = {"compile": "Code", "pass": "Pass", "memory_limit_gib": "Memory limit"}
    options = [(_text(value), _option(axis, value)) for value in values]
    return Switch(axis, labels.get(axis, "Model"), options)


def _text(value: object) -> str:
    return NOTHING if is_null(value) else str(value)


def _option(axis: str, value: object) -> str:
    if axis == "memory_limit_gib":
        return "no limit" if is_null(value) else f"{value:g} GiB"
    text = _text(value)
    return PASSES.get(text, COMPILED.get(text, text))


def _range(cells: pd.DataFrame, measure: HeatMeasure) -> list[float]:
    """Return the values of the lightest and the darkest shade."""
    values = cells[measure.column].dropna().astype(float) * measure.scale
    if values.empty:
        return [0.0, 1.0]
    low = float(values.min()) if measure.is_log else 0.0
    return [low, float(values.max())]


def _cell(
    row: Row, place: str, measures: Sequence[HeatMeasure], ranges: dict[str, list[float]]
) -> HeatCell:
    """Return a cell of the map as its first measure shows it."""
    if row is None:
        return HeatCell(place)
    name = scope_of(row)
    if row["status"] != "ok":
        is_oom = row["status"] in OUT_OF_MEMORY
        phase = _SHORT_PHASES.get(str(row.get("phase")), "out")
        where = f" in {row['phase']}" if row.get("phase") else ""
        text = f"ran out of memory{where}" if is_oom else str(row["status"])
        return HeatCell(place, phase if is_oom else text, f"{name}: {text}", row["key"], 0, "bad")
    measure = measures[0] if measures else None
    if measure is None or not has_value(row, measure.column):
        return HeatCell(place, "ran", f"{name}: ran", row["key"], _LEAST_SHADE)
    value = float(row[measure.column]) * measure.scale
    shade = shade_of(value, ranges[measure.name], measure.is_log)
    is_bound = measure.column != "peak_allocated_bytes" and has_value(row, "cpu_bound")
    is_cpu = is_bound and bool(row["cpu_bound"])
    label = f"{name}: {number(value)} {measure.unit}{', CPU-bound' if is_cpu else ''}"
    return HeatCell(place, number(value), label, row["key"], shade, "cpu" if is_cpu else "")


def shade_of(value: float, ends: Sequence[float], is_log: bool) -> int:
    """Return the shade of a value as a share of the ramp in percent."""
    low, high = ends
    if is_log and low > 0 and value > 0:
        value, low, high = math.log(value), math.log(low), math.log(high)
    share = (value - low) / (high - low) if high > low else 0.0
    return round(_LEAST_SHADE + (_MOST_SHADE - _LEAST_SHADE) * min(max(share, 0.0), 1.0))
