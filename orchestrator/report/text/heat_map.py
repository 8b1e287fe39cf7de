"""The heat map of the first screen: every cell of the main task as a number and a shade.

Rows are models, columns contexts and panels precisions, or else other axes that vary; the axes left
over are switches. What no switch can choose has one value for all cells, which the note names. The
page holds what each switch shows; the first view is in the HTML, so that the map needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd

from orchestrator.analysis.axes import COMPILE_AXES, RUN, Row, axis_text, has_value
from orchestrator.analysis.pairs import TIME
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import LENGTH, NAME, NOT_SHOWN, SCOPE_COLUMNS
from orchestrator.report.text.numbers import number, ratio
from tasks.spec.parameters import TIMING_AXES
from tasks.spec.status import OUT_OF_MEMORY

_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 12, 8, 3
_MOST_SWITCHES, _MOST_OPTIONS = 4, 6
_LEAST_SHARE = 0.25  # of the most common value's cells that another value of a shown axis has
_LEAST_SHADE, _MOST_SHADE = 6, 100
_DARK_SHADE = 78  # above it, white text has more contrast than black text
_LARGEST_GAIN = 4.0  # of the speed-ups that have different shades
# Axes that are switches rather than rows or columns.
_SWITCHED = ("compile", "pass", "memory_limit_gib")
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
_FACTS = ("cell", "status", "phase", "cpu_bound", "peak_rss_bytes")


@dataclass(frozen=True)
class Switch:
    """A choice of the reader: the values of an axis, and their labels. The first one is shown.

    is_labelled: true if the labels of the values do not say of what they are.
    """

    axis: str
    label: str
    options: Sequence[tuple[str, str]]
    is_labelled: bool = False


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
    left_out: of each axis with more values than are shown, both numbers.
    left_out: how many values of an axis are shown, where there are more, such as "3 of 8 values of
    strategy".
    """

    row_title: str
    column_title: str
    panels: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]
    measures: Sequence[HeatMeasure]
    switches: Sequence[Switch]
    views: Mapping[str, Mapping[str, HeatCell]]
    note: str
    first_note: str
    left_out: Sequence[str]
    has_failures: bool
    is_bound_known: bool

    @property
    def is_usual(self) -> bool:
        """True if the headings of rows and columns say of what they are: models and contexts."""
        usual = cell_names.axis_title(NAME), cell_names.axis_title(LENGTH)
        return (self.row_title, self.column_title) == usual

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
    shown = (one.column for one in MEASURES)
    read = list(dict.fromkeys((*SCOPE_COLUMNS, *results.axes, *_FACTS, *shown)))
    results = replace(results, cells=results.cells.reindex(columns=read))
    # Of training steps, or else of attention.
    for task in ("train_step", "attention"):
        cells = results.cells[results.cells["task"] == task]
        if len(cells):
            break
    else:
        return None
    varies = task == "attention" and cells["attention"].nunique() > 1
    row_axis = "attention" if varies else NAME
    # The resident set on a CPU. A column that no run has is of another type, which pandas refuses.
    peaks = cells["peak_rss_bytes"].astype("Float64").fillna(cells[_PEAK])
    added = {NAME: cell_names.names_of(cells), _PEAK: peaks, "key": cell_names.cell_keys(results)}
    cells = cells.assign(**added)
    cells = cells[cells["status"] != "skipped"]
    if cells.empty:
        return None
    # Runs may repeat cells: the last of equal ones, which is shown, is of the run with most times.
    has_time = cells[TIME].notna()
    size = has_time.groupby(cells[RUN]).transform("sum") if RUN in cells else has_time
    ranks = pd.DataFrame({"time": has_time, "size": size})
    cells = cells.loc[ranks.sort_values(["time", "size"], kind="stable").index]
    cells, timing, notes = _with_one_timing(cells, results.axes)
    others = [axis for axis in results.axes if axis not in (*NOT_SHOWN, *TIMING_AXES)]
    candidates = (row_axis, NAME, LENGTH, "precision", *_SWITCHED, *others, *timing)
    free = cell_names.free_axes(cells, candidates)
    places, switched = _places(cells, free, row_axis)
    if len(places) < 2:
        return None
    axes = (*others, *timing, "seed")
    cells, note = cell_names.choose_slice(cells, axes, [*places, *switched])
    first = _first_view(cells, switched)
    grid, left_out = {}, []
    for axis, most in places.items():
        # The values that most cells have, in their order.
        fullest = first[axis].map(axis_text).value_counts().index
        values = cell_names.axis_values(axis, first)
        grid[axis] = [one for one in values if axis_text(one) in fullest[:most]]
        cells = cells[cells[axis].map(axis_text).isin(map(axis_text, grid[axis]))]
        if most < len(fullest):
            left_out.append(f"{most} of {len(fullest)} values of {cell_names.axis_title(axis)}")
    notes += left_out
    # The only cells with another value may be outside of the grid.
    switched = [axis for axis in switched if cells[axis].nunique(dropna=False) > 1]
    if RUN in cells and results.cells[RUN].nunique() > 1:
        main, *rest = cells[RUN].value_counts().index
        notes.append(f"run {main}")
        if rest:
            count = int((cells[RUN] != main).sum())
            notes.append(f"and {count} cells of {', '.join(sorted(rest))}")
    return _map(cells, grid, switched, ", ".join(filter(None, (note, *notes))), left_out)


def _with_one_timing(
    cells: pd.DataFrame, axes: Collection[str]
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Return cells whose times can be compared, the axes of timing to switch, and what is fixed.

    An axis that varies within the run of the last cell, which has most times, is a switch. Cells
    without a time remain: no peak depends on the number of steps.
    """
    switched, notes = [], []
    for axis in (axis for axis in TIMING_AXES if axis in axes):
        timed = cells[cells[TIME].notna() & cells[axis].notna()]
        if timed[axis].nunique() < 2:
            continue
        own = timed[timed[RUN] == timed[RUN].iloc[-1]] if RUN in timed else timed
        if own[axis].nunique() > 1 and _is_common(own[axis]):
            switched.append(axis)
            cells = cells[cells[axis].isin(own[axis].unique()) | cells[TIME].isna()]
        else:
            usual = own[axis].mode().iloc[0]
            cells = cells[(cells[axis] == usual).fillna(False) | cells[TIME].isna()]
            notes.append(cell_names.setting_text(axis, usual))
    return cells, switched, notes


def _is_common(values: pd.Series[Any]) -> bool:
    """Return True if enough cells have other values than the most common one for a view."""
    counts = values.value_counts(dropna=False)
    return len(counts) > 1 and bool(counts.iloc[1] >= _LEAST_SHARE * counts.iloc[0])


def _places(
    cells: pd.DataFrame, free: list[str], row_axis: str
) -> tuple[dict[str, int], list[str]]:
    """Return the axes of panels, rows and columns with their largest numbers, and of switches."""
    most = (_MOST_PANELS, _MOST_ROWS, _MOST_COLUMNS)
    usual = ("precision", row_axis, LENGTH)
    left = [axis for axis in free if axis not in (*usual, *COMPILE_AXES)]
    plain = [axis for axis in left if axis not in _SWITCHED and _is_common(cells[axis])]
    switched = [axis for axis in left if axis in _SWITCHED]
    chosen = {axis: axis if axis in free else "" for axis in usual}
    # The only axis makes columns, of two the first makes rows.
    for axis in (row_axis, LENGTH, "precision") if len(plain) > 1 else (LENGTH, row_axis):
        if plain and not chosen[axis]:
            chosen[axis] = plain.pop(0)
    if not chosen[LENGTH] and not chosen[row_axis]:
        return {}, []
    switched += [axis for axis in plain if cells[axis].nunique() <= _MOST_OPTIONS]
    places = {name or axis: count for (axis, name), count in zip(chosen.items(), most, strict=True)}
    return places, switched[:_MOST_SWITCHES]


def _map(
    cells: pd.DataFrame,
    grid: Mapping[str, list[Any]],
    switched: list[str],
    note: str,
    left_out: Sequence[str],
) -> HeatMap:
    """Return the map of cells. grid: axes of panels, rows and columns, with their values."""
    (panel_axis, row_axis, column_axis), values = grid, list(grid.values())
    known = set(cells.columns[cells.notna().any()])
    if TIME in known and len(values[0]) > 1 and str(values[0][0]) == "fp32":
        known.add(_SPEED_UP)
    measures = [measure for measure in MEASURES if measure.column in known]
    texts = {axis: list(map(axis_text, of_axis)) for axis, of_axis in grid.items()}
    # The names say the run of a cell if they are of several.
    named = [row_axis, column_axis, panel_axis, *switched]
    named += [RUN] if RUN in cells and cells[RUN].nunique() > 1 else []
    positions: dict[str, dict[Any, Any]] = {}
    for record in cells.to_dict("records"):
        place = [of_axis.index(axis_text(record[axis])) for axis, of_axis in texts.items()]
        options = [axis_text(record[axis]) for axis in switched]
        record["label"] = cell_names.scope_of(record, named)
        positions[_position(place, options)] = record
    for position, record in positions.items():
        base = positions.get(_position([0], [position.partition(",")[2]]), {})
        if has_value(base, TIME) and has_value(record, TIME) and record[TIME] > 0:
            record[_SPEED_UP] = base[TIME] / record[TIME]
    first = _first_view(cells, switched)
    # The shades of all views have the range of the first one, so that they can be compared.
    ranges = {measure: _range(first, measure) for measure in measures}
    views = {}
    for position, record in positions.items():
        views[position] = {one.name: _cell(record, one, ranges[one]) for one in measures}
        if not measures:
            views[position] = {"": _cell(record, None, (0.0, 1.0))}
    return HeatMap(
        row_title=cell_names.axis_title(row_axis),
        column_title=cell_names.axis_title(column_axis),
        panels=[cell_names.setting_text(panel_axis, value) for value in values[0]],
        rows=[cell_names.value_text(row_axis, value) for value in values[1]],
        columns=[cell_names.value_text(column_axis, value) for value in values[2]],
        measures=measures,
        switches=[_switch(axis, cells) for axis in switched],
        views=views,
        note=note,
        first_note=cell_names.shared_settings(first, grid, named),
        left_out=left_out,
        has_failures=bool(cells["status"].isin(OUT_OF_MEMORY).any()),
        is_bound_known=bool(cells["cpu_bound"].notna().any()),
    )


def _first_view(cells: pd.DataFrame, switched: Sequence[str]) -> pd.DataFrame:
    """Return the cells with the first option of each switch."""
    for axis in switched:
        cells = cells[cells[axis].map(axis_text) == _switch(axis, cells).options[0][0]]
    return cells


def _switch(axis: str, cells: pd.DataFrame) -> Switch:
    """Return the switch of an axis. The usual value is first; of timing, the most steps are."""
    values = cell_names.axis_values(axis, cells)
    first = axis_text(values[-1])
    if axis not in TIMING_AXES:
        first = cell_names.usual_value(axis, cells[axis].map(axis_text))
    values.sort(key=lambda value: axis_text(value) != first)
    show = cell_names.setting_text if axis in _SWITCHED else cell_names.value_text
    options = [(axis_text(value), show(axis, value).removeprefix("limit ")) for value in values]
    return Switch(axis, cell_names.axis_title(axis), options, is_labelled=axis not in _SWITCHED)


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
    name, status = row["label"], row["status"]
    if status in OUT_OF_MEMORY:
        where = f" in {row['phase']}" if row.get("phase") else ""
        phase = _SHORT_PHASES.get(str(row.get("phase")), "out")
        return HeatCell(phase, f"{name}: out of memory{where}", row["key"], 0, "bad")
    if status != "ok":
        return HeatCell(status, f"{name}: {status}", row["key"], 0, "bad")
    if measure is None or not has_value(row, measure.column):
        return HeatCell("ran", f"{name}: ran", row["key"], _LEAST_SHADE)
    value = float(row[measure.column]) * measure.scale
    text = ratio(value) if measure.column == _SPEED_UP else number(value, measure.digits)
    shade = shade_of(value, ends, measure.is_log)
    # No peak depends on the CPU.
    is_cpu = measure.column != _PEAK and has_value(row, "cpu_bound") and row["cpu_bound"]
    label = f"{name}: {text} {measure.unit}{', CPU-bound' if is_cpu else ''}"
    styles = ["cpu"] * bool(is_cpu) + ["dark"] * (shade > _DARK_SHADE)
    return HeatCell(text, label, row["key"], shade, " ".join(styles))


def shade_of(value: float, ends: Sequence[float], is_log: bool) -> int:
    """Return the shade of a value as a share of the ramp in percent."""
    low, high = ends
    if is_log and low > 0 and value > 0:
        value, low, high = math.log(value), math.log(low), math.log(high)
    share = (value - low) / (high - low) if high > low else 0.0
    return round(_LEAST_SHADE + (_MOST_SHADE - _LEAST_SHADE) * min(max(share, 0.0), 1.0))
