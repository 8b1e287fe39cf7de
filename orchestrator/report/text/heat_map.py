"""The heat map of the first screen: every cell of the main task as a number and a shade.

Rows are models, columns contexts and panels precisions. The page holds what each switch shows; the
first view is in the HTML, so that the map needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd

from orchestrator.analysis.axes import MAIN, RUN, Row, axis_text, has_value, is_null
from orchestrator.analysis.pairs import TIME
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text.cell_names import (
    COMPILED,
    LENGTH,
    NAME,
    PASSES,
    SCOPE_COLUMNS,
    cell_keys,
    ordered,
    scope_of,
)
from orchestrator.report.text.numbers import number, ratio
from orchestrator.report.text.slices import choose_slice, main_cells, shared_settings
from tasks.spec.parameters import TIMING_AXES
from tasks.spec.status import OUT_OF_MEMORY

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 12, 8, 3
_LEAST_SHADE, _MOST_SHADE = 6, 100
_DARK_SHADE = 78  # above it, white text has more contrast than black text
_LARGEST_GAIN = 4.0  # of the speed-ups that have different shades
# Axes that a reader can switch, with their labels.
_SWITCHED = {"compile": "Code", "pass": "Pass", "memory_limit_gib": "Memory limit", NAME: "Model"}
_SHORT_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


@dataclass(frozen=True)
class HeatMeasure:
    """A value that the map can show. column: of the cells, times `scale`. digits: of the text."""

    name: str
    label: str
    unit: str
    column: str
    scale: float = 1.0
    is_log: bool = False
    digits: int = 3


_SPEED_UP, _PEAK = "speed_up", "peak_allocated_bytes"
MEASURES = (
    HeatMeasure("step", "Step time", "ms per step", TIME, is_log=True),
    HeatMeasure("speed", "Speed-up", "times as fast as in fp32", _SPEED_UP),
    HeatMeasure(
        "busy", "GPU busy", "% of the step in which GPU kernels run", "busy_timed", 100, digits=2
    ),
    HeatMeasure("peak", "Memory", "GiB at the peak", _PEAK, 1 / GIB, is_log=True),
    HeatMeasure("mfu", "MFU", "% of the GPU's peak", "mfu", 100, digits=2),
)
_READ = (
    "cell",
    "status",
    "phase",
    "cpu_bound",
    "peak_rss_bytes",
    *(one.column for one in MEASURES),
)


@dataclass(frozen=True)
class Switch:
    """A choice of the reader: the values of an axis, and their labels. The first one is shown."""

    axis: str
    label: str
    options: Sequence[tuple[str, str]]


class HeatCell(NamedTuple):
    """The look of a cell of the map. It is empty if nothing was measured there."""

    text: str = ""
    label: str = ""
    key: str = ""
    shade: int = 0
    style: str = ""


@dataclass(frozen=True)
class HeatMap:
    """The map.

    views: what a cell shows, for each measure, by its position: panel, row, column, and the option
    of each switch. note: what all cells share. first_note: what those of the first view share.
    """

    row_title: str
    panels: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]
    measures: Sequence[HeatMeasure]
    switches: Sequence[Switch]
    views: Mapping[str, Mapping[str, HeatCell]]
    note: str
    first_note: str
    has_failures: bool
    is_bound_known: bool

    def first_view(self, place: Sequence[int], measure: str = "") -> HeatCell:
        """Return what a place shows before a switch is used, of a measure or of the first one."""
        views = self.views.get(_position(place, [one.options[0][0] for one in self.switches]), {})
        return views.get(measure, next(iter(views.values()), HeatCell()))


def _position(place: Iterable[int], options: Iterable[str]) -> str:
    return ",".join([*map(str, place), *options])


@lru_cache(maxsize=1)  # the terminal prints it, and the page shows it
def heat_map(results: Results) -> HeatMap | None:
    """Return the map of the task with most cells, or None if there is no grid to show."""
    # Of several hundred columns: copies of all cells would be most of the report's memory.
    read = dict.fromkeys((*SCOPE_COLUMNS, *results.axes, *_READ))
    results = replace(results, cells=results.cells.reindex(columns=list(read)))
    cells, row_axis = main_cells(results)
    # The resident set on a CPU. A column that no run has is of another type, which pandas refuses.
    peaks = cells["peak_rss_bytes"].astype("Float64").fillna(cells[_PEAK])
    cells = cells.assign(key=cell_keys(results), **{_PEAK: peaks})
    cells = cells[cells[LENGTH].notna() & (cells["status"] != "skipped")]
    if cells.empty or (cells[row_axis].nunique() < 2 and cells[LENGTH].nunique() < 2):
        return None
    most = {"precision": _MOST_PANELS, row_axis: _MOST_ROWS, LENGTH: _MOST_COLUMNS}
    switched = _varying(cells, set(_SWITCHED) - set(most))
    # Runs may repeat cells with other numbers of steps: the best measured one is shown.
    axes = [axis for axis in results.axes if axis not in (RUN, *TIMING_AXES)]
    cells, note = choose_slice(_best_first(cells), axes, [*most, *switched])
    first = _first_view(cells, switched)
    grid = {axis: _fullest(axis, first, count) for axis, count in most.items()}
    for axis, values in grid.items():
        cells = cells[cells[axis].isin(values)]
    # The only cells with another value may be outside of the grid.
    switched = _varying(cells, switched)
    return _map(cells, grid, switched, note)


def _varying(cells: pd.DataFrame, axes: Iterable[str]) -> list[str]:
    """Return the axes of switches that have several values."""
    counts = cells.filter(items=list(axes)).nunique(dropna=False)
    return sorted(counts[counts > 1].index, key=list(_SWITCHED).index)


def _fullest(axis: str, cells: pd.DataFrame, most: int) -> list[Any]:
    """Return the values that most cells have, in their order."""
    counts = cells[axis].value_counts()
    chosen = set(counts.index[:most])
    return [value for value in ordered(axis, cells) if value in chosen]


def _best_first(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells so that the last of equal ones is of the run with most times."""
    has_time = cells[TIME].notna()
    size = has_time.groupby(cells[RUN]).transform("sum") if RUN in cells else has_time
    ranks = pd.DataFrame({"time": has_time, "size": size})
    return cells.loc[ranks.sort_values(["time", "size"], kind="stable").index]


def _map(
    cells: pd.DataFrame, grid: Mapping[str, list[Any]], switched: list[str], note: str
) -> HeatMap:
    """Return the map of cells. grid: axes of panels, rows and columns, with their values."""
    measures = _measures(cells, grid["precision"])
    positions: dict[str, dict[Any, Any]] = {}
    for record in cells.to_dict("records"):
        place = [values.index(record[axis]) for axis, values in grid.items()]
        options = [axis_text(record[axis]) for axis in switched]
        positions[_position(place, options)] = record
    for position, record in positions.items():
        base = positions.get(_position([0], [position.partition(",")[2]]), {})
        if has_value(base, TIME) and has_value(record, TIME) and record[TIME] > 0:
            record[_SPEED_UP] = base[TIME] / record[TIME]
    first = _first_view(cells, switched)
    # The shades of all views have the range of the first one, so that they can be compared.
    ranges = {measure.name: _range(first, measure) for measure in measures}
    views = {}
    for position, record in positions.items():
        views[position] = {m.name: _cell(record, m, ranges[m.name]) for m in measures}
        if not measures:
            views[position] = {"": _cell(record, None, (0.0, 1.0))}
    panels, rows, columns = (list(map(_heading, values)) for values in grid.values())
    _, row_axis, _ = grid
    return HeatMap(
        row_title="model" if row_axis == NAME else row_axis,
        panels=panels,
        rows=rows,
        columns=columns,
        measures=measures,
        switches=[_switch(axis, cells) for axis in switched],
        views=views,
        note=note,
        first_note=shared_settings(first, grid),
        has_failures=bool(cells["status"].isin(OUT_OF_MEMORY).any()),
        is_bound_known=bool(cells["cpu_bound"].notna().any()),
    )


def _measures(cells: pd.DataFrame, precisions: Sequence[object]) -> list[HeatMeasure]:
    known = set(cells.columns[cells.notna().any()])
    if TIME in known and len(precisions) > 1 and str(precisions[0]) == "fp32":
        known.add(_SPEED_UP)
    return [measure for measure in MEASURES if measure.column in known]


def _heading(value: object) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _first_view(cells: pd.DataFrame, switched: Sequence[str]) -> pd.DataFrame:
    """Return the cells with the first option of each switch."""
    for axis in switched:
        cells = cells[cells[axis].map(axis_text) == _switch(axis, cells).options[0][0]]
    return cells


def _switch(axis: str, cells: pd.DataFrame) -> Switch:
    values = ordered(axis, cells)
    if cells[axis].isna().any():
        values = [None, *values]
    first = cells[axis].value_counts().index[0] if axis == NAME else MAIN.get(axis)
    if first in values:
        values = [first, *(value for value in values if value != first)]
    options = [(axis_text(value), _option(axis, value)) for value in values]
    return Switch(axis, _SWITCHED[axis], options)


def _option(axis: str, value: object) -> str:
    if axis == "memory_limit_gib":
        return "no limit" if is_null(value) else f"{value:g} GiB"
    text = axis_text(value)
    return PASSES.get(text, COMPILED.get(text, text))


def _range(cells: pd.DataFrame, measure: HeatMeasure) -> tuple[float, float]:
    """Return the values of the lightest and the darkest shade."""
    if measure.column == _SPEED_UP:
        return 0.0, _LARGEST_GAIN
    values = cells[measure.column].dropna().astype(float) * measure.scale
    if values.empty:
        return 0.0, 1.0
    return float(values.min()) if measure.is_log else 0.0, float(values.max())


def _cell(row: Row, measure: HeatMeasure | None, ends: tuple[float, float]) -> HeatCell:
    """Return a cell of the map as a measure shows it."""
    name = scope_of(row)
    if row["status"] in OUT_OF_MEMORY:
        where = f" in {row['phase']}" if row.get("phase") else ""
        phase = _SHORT_PHASES.get(str(row.get("phase")), "out")
        return HeatCell(phase, f"{name}: out of memory{where}", row["key"], 0, "bad")
    if row["status"] != "ok":
        return HeatCell(row["status"], f"{name}: {row['status']}", row["key"], 0, "bad")
    if measure is None or not has_value(row, measure.column):
        return HeatCell("ran", f"{name}: ran", row["key"], _LEAST_SHADE)
    value = float(row[measure.column]) * measure.scale
    text = ratio(value) if measure.column == _SPEED_UP else number(value, measure.digits)
    shade = shade_of(value, ends, measure.is_log)
    is_time = measure.column != _PEAK
    is_cpu = is_time and has_value(row, "cpu_bound") and row["cpu_bound"]
    label = f"{name}: {text} {measure.unit}{', CPU-bound' if is_cpu else ''}"
    styles = {"cpu": is_cpu, "dark": shade > _DARK_SHADE}
    return HeatCell(text, label, row["key"], shade, " ".join(filter(styles.get, styles)))


def shade_of(value: float, ends: Sequence[float], is_log: bool) -> int:
    """Return the shade of a value as a share of the ramp in percent."""
    low, high = ends
    if is_log and low > 0 and value > 0:
        value, low, high = math.log(value), math.log(low), math.log(high)
    share = (value - low) / (high - low) if high > low else 0.0
    return round(_LEAST_SHADE + (_MOST_SHADE - _LEAST_SHADE) * min(max(share, 0.0), 1.0))
