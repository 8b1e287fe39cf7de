"""Types of charts: each turns results into an Altair chart.

`registry.PLOTS` defines which charts exist. A chart shows medians over axes that it does not
distinguish, such as seeds. A chart with fewer than two points is omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import altair as alt
import pandas as pd

from orchestrator.analysis.axes import (
    RUN,
    is_null,
    key_axes,
    ordered_values,
    sort_cells,
    value_ranks,
    varying_axes,
)
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.panels import PanelChoice, Shown, choose_panels
from orchestrator.report.tables.allocation_layouts import ROLES
from orchestrator.report.tables.cell_filters import CellFilter
from orchestrator.report.tables.kernel_layouts import OUTSIDE_OPERATORS, OUTSIDE_PHASES
from orchestrator.report.tables.layouts import each

Chart = alt.Chart | alt.FacetChart

_PANEL = "panel"
_MEASURE = "measure"
_VALUE = "value"
_LENGTH = "context_length"
_SINGLE_SIZE = {"width": 560, "height": 300}
# Three panels stand in a row.
_PANEL_SIZE = {"width": 230, "height": 170}
_LOGARITHMIC: dict[str, Any] = {"type": "log", "nice": False, "padding": 12}
_AT_MS, _BEGIN_MS = "at_ms", "begin_ms"
# More digits are invisible, and the page would have to hold them all.
_DIGITS_OF_MS, _DIGITS_OF_GIB = 3, 5
_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ChartMeasure:
    """A column of `cells` with a scale factor and the name in the legend."""

    title: str
    column: str
    scale: float = 1.0


class PlotLayout(Protocol):
    """Turns results into a chart, or into None if they have fewer than two points."""

    def draw(self, results: Results) -> Chart | None: ...


@dataclass(frozen=True)
class Lines:
    """A line over the context length for each combination of axes; both scales are logarithmic."""

    cells: CellFilter
    unit: str
    measures: tuple[ChartMeasure, ...]

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        axes = _distinguished_axes(chosen, without=(_LENGTH,))
        points = _medians(chosen.cells, [*axes, _LENGTH], self.measures)
        # A line of a single point is invisible.
        lengths = points.groupby([*axes, _MEASURE], dropna=False)[_LENGTH].transform("nunique")
        points = points[lengths > 1]
        if points.empty:
            return None
        axes = _varying_among(points, axes)
        # The first axis has a colour and the second one a dash. The measure is one of the two.
        shown = [*axes[:1], *_varying_among(points, [_MEASURE]), *axes[1:]]
        points, panels = _in_panels(points, shown[2:], _runs(chosen))
        ticks = alt.Axis(values=sorted(points[_LENGTH].unique().tolist()), format="d")
        x = alt.X(_LENGTH, type="quantitative", axis=ticks).scale(base=2, **_LOGARITHMIC)
        y = alt.Y(_VALUE, type="quantitative", title=self.unit).scale(**_LOGARITHMIC)
        tooltip = _tooltip([*shown, _LENGTH], self.unit)
        chart = alt.Chart(points).mark_line(point=True).encode(x=x, y=y, tooltip=tooltip)
        if shown:
            legend = alt.selection_point(fields=shown[:1], bind="legend")
            opacity = alt.when(legend).then(alt.value(1.0)).otherwise(alt.value(0.15))
            colour = self._channel(alt.Color, shown[0], points)
            chart = chart.encode(color=colour, opacity=opacity).add_params(legend)
        if len(shown) > 1:
            chart = chart.encode(strokeDash=self._channel(alt.StrokeDash, shown[1], points))
        # Without the key, scrolling the page would zoom the chart under the pointer.
        zoom = alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")
        return panels.facetted(chart.add_params(zoom))

    def _channel(self, channel: Any, name: str, points: pd.DataFrame) -> Any:
        if name != _MEASURE:
            return _nominal(channel, name, points)
        titles = [measure.title for measure in self.measures]
        return channel(name, type="nominal", sort=titles, title=None)


@dataclass(frozen=True)
class SpeedUps:
    """Bars that show how many times faster each value of an axis is than its first one."""

    cells: CellFilter
    axis: str
    column: str = "step_ms_median"

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        if self.axis not in chosen.cells or self.column not in chosen.cells:
            return None
        axes = _distinguished_axes(chosen, without=(self.axis,))
        bars = self._speed_ups(chosen.cells, axes)
        if len(bars) < 2:
            return None
        across, rest = _across(axes)
        bars, panels = _in_panels(bars, rest, _runs(chosen))
        drawn = alt.Chart().mark_bar().encode(
            x=_across_channel(across, bars),
            xOffset=_nominal(alt.XOffset, self.axis, bars),
            y=alt.Y(_VALUE, type="quantitative", title="times faster"),
            color=_nominal(alt.Color, self.axis, bars),
            tooltip=_tooltip([*axes, self.axis], "times faster"),
        )  # fmt: skip
        equally_fast = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(y=alt.datum(1))
        return panels.facetted(alt.layer(drawn, equally_fast, data=bars))

    def _speed_ups(self, cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
        """Return the rows of all values but the first, with their speed-up as `value`."""
        times = _medians(cells, [*axes, self.axis], (ChartMeasure("", self.column),))
        times = times.drop(columns=_MEASURE)
        values = ordered_values(self.axis, times[self.axis])
        if len(values) < 2:
            return times.iloc[:0]
        is_first = times[self.axis] == values[0]
        baseline = times[is_first].drop(columns=self.axis).rename(columns={_VALUE: "baseline"})
        both: pd.DataFrame
        if axes:
            both = times[~is_first].merge(baseline, on=axes)
        else:
            both = times[~is_first].merge(baseline, how="cross")
        return both.assign(value=both["baseline"] / both[_VALUE]).drop(columns="baseline")


@dataclass(frozen=True)
class Phases:
    """Stacked bars with the share of each phase in a step, in panels for other axes."""

    cells: CellFilter

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        axes = _distinguished_axes(chosen)
        measures = tuple(ChartMeasure(phase, f"{phase}_ms_median") for phase in _PHASES)
        bars = _medians(chosen.cells, axes, measures)
        if len(bars) < 2:
            return None
        across, rest = _across(axes)
        bars, panels = _in_panels(bars, rest, _runs(chosen))
        bars = bars.assign(order=bars[_MEASURE].map(_PHASES.index))
        drawn = alt.Chart(bars).mark_bar().encode(
            x=_across_channel(across, bars),
            y=alt.Y(_VALUE, type="quantitative", title="share of the time", stack="normalize"),
            color=alt.Color(_MEASURE, type="nominal", sort=list(_PHASES), title="phase"),
            order=alt.Order("order", type="quantitative"),
            tooltip=_tooltip([*axes, _MEASURE], "ms"),
        )  # fmt: skip
        return panels.facetted(drawn)


@dataclass(frozen=True)
class KernelClasses:
    """Stacked bars with the kernel time of each phase of a step, one panel for each cell."""

    def draw(self, results: Results) -> Chart | None:
        kernels = results.kernels()
        # Without the number of steps, the milliseconds of a step are unknown.
        inside = kernels[(kernels["name"] != OUTSIDE_OPERATORS) & kernels["ms"].notna()]
        if inside.empty:
            return None
        titles, panels = _panels_of_cells(results, inside.groupby("cell")["ms"].sum())
        drawn = inside[inside["cell"].isin(titles)]
        totals = drawn.groupby(["cell", "phase", "kernel_class"], as_index=False)["ms"].sum()
        columns = {
            _PANEL: totals["cell"].map(titles),
            "phase": totals["phase"].replace("", OUTSIDE_PHASES),
            "class": totals["kernel_class"],
            _VALUE: totals["ms"],
        }
        bars = pd.DataFrame(columns)
        if len(bars) < 2:
            return None
        order = [*_PHASES, OUTSIDE_PHASES]
        chart = alt.Chart(bars).mark_bar().encode(
            x=alt.X("phase", type="nominal", sort=order, axis=alt.Axis(labelAngle=0)),
            y=alt.Y(_VALUE, type="quantitative", title="ms a step"),
            color=alt.Color("class", type="nominal"),
            tooltip=_tooltip([_PANEL, "phase", "class"], "ms a step"),
        )  # fmt: skip
        return panels.with_own_scales(chart, ["y"])


@dataclass(frozen=True)
class LiveMemory:
    """Stacked areas of live memory by role during one step, one panel for each cell."""

    def draw(self, results: Results) -> Chart | None:
        live = results.live()
        if live.empty:
            return None
        sums = live.groupby(["cell", "event"])["live_bytes"].sum()
        titles, panels = _panels_of_cells(results, sums.groupby("cell").max())
        moments = _moments(live[live["cell"].isin(titles)], titles)
        inside = moments[moments["phase"] != ""]
        begins = inside.groupby([_PANEL, "phase"])[_AT_MS].min().rename(_BEGIN_MS).reset_index()
        # Areas and phases are rows of one frame, because the layers of a facet share their data.
        data = pd.concat([moments, begins], ignore_index=True)
        order: list[Any] = [role for role in ROLES if role in moments]
        layers = alt.layer(_areas(order), *_phase_marks(), data=data)
        return panels.with_own_scales(layers, ["x", "y"])


def _areas(roles: list[Any]) -> alt.Chart:
    areas = alt.Chart().transform_filter(f"isValid(datum.{_AT_MS})")
    areas = areas.transform_fold(roles, as_=["role", _VALUE])
    areas = areas.transform_calculate(order=f"indexof({roles}, datum.role)")
    tooltips = [alt.Tooltip(name, type="nominal") for name in ("phase", "role")]
    chart: alt.Chart = areas.mark_area(interpolate="step-after").encode(
        x=alt.X(_AT_MS, type="quantitative", title="ms into the step"),
        y=alt.Y(_VALUE, type="quantitative", title="GiB", stack="zero"),
        color=alt.Color("role", type="nominal", sort=roles, scale=alt.Scale(domain=roles)),
        order=alt.Order("order", type="quantitative"),
        tooltip=tooltips + _tooltip([], "GiB"),
    )
    return chart


def _phase_marks() -> tuple[alt.Chart, alt.Chart]:
    """Return dashed lines where phases begin, and the names of the phases."""
    marks = alt.Chart().transform_filter(f"isValid(datum.{_BEGIN_MS})")
    marks = marks.encode(x=alt.X(_BEGIN_MS, type="quantitative"))
    names = marks.mark_text(align="left", baseline="top", dx=3, fontSize=9)
    names = names.encode(text=alt.Text("phase", type="nominal"), y=alt.value(2))
    return marks.mark_rule(strokeDash=[4, 3]), names


@dataclass(frozen=True)
class Panels:
    """The panels of a chart.

    titles: in order, empty for a single panel. note: lines about panels that are not drawn.
    """

    titles: Sequence[str] = ()
    note: Sequence[str] = ()

    def facetted(self, chart: Any) -> Chart:
        """Return the chart in panels of three columns, with the note as its title."""
        whole: Chart
        if len(self.titles) < 2:
            whole = chart.properties(**_SINGLE_SIZE)
        else:
            facet = alt.Facet(_PANEL, type="nominal", sort=list(self.titles), title=None)
            whole = chart.properties(**_PANEL_SIZE).facet(facet=facet, columns=3)
        return whole.properties(title=list(self.note)) if self.note else whole

    def with_own_scales(self, chart: Any, channels: Sequence[str]) -> Chart:
        """Return the chart in panels that have scales of their own if some are not drawn."""
        whole = self.facetted(chart)
        if not self.note or not isinstance(whole, alt.FacetChart):
            return whole
        # On a shared scale, the largest cells would flatten the others.
        scales: dict[str, Any] = dict.fromkeys(channels, "independent")
        own: Chart = whole.resolve_scale(**scales)
        return own.properties(title=[*self.note, "each panel has its own scale"])


def _panels_of_cells(results: Results, amount: pd.Series[float]) -> tuple[dict[str, str], Panels]:
    """Return the title of each drawn cell, which names what differs between them, and the panels.

    amount: how much each cell has to show, by cell.
    """
    cells = results.cells[results.cells["cell"].isin(amount.index)]
    axes = key_axes(replace(results, cells=cells))
    differing = _varying_among(cells, ["task", *axes])
    panels = _first_runs_first(cells.set_index("cell")[differing], _runs(results))
    choice = choose_panels(panels, differing, Shown(amount.to_dict()), "cells")
    drawn = sort_cells(cells, axes)
    drawn = drawn[drawn["cell"].isin(choice.chosen)]
    # An axis that one task lacks does not distinguish the cells of another task.
    varying = varying_axes(replace(results, cells=drawn))
    named = [*_varying_among(drawn, ["task"]), *(axis for axis in axes if axis in varying)]
    titles = dict(zip(drawn["cell"], _titles(drawn, named), strict=True))
    return titles, Panels(list(titles.values()), _note(choice, drawn, differing))


def _note(choice: PanelChoice, shown: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    if not choice.note:
        return []
    # Values that all drawn panels share are in no title, but the panels that are not drawn differ.
    varying = _varying_among(shown, axes)
    (shared,) = _titles(shown.iloc[:1], [axis for axis in axes if axis not in varying])
    return [choice.note, f"all of these: {shared}"] if shared else [choice.note]


def _titles(rows: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    titles = []
    for row in each(rows):
        words = [_named(axis, row[axis]) for axis in axes if not is_null(row[axis])]
        titles.append(" · ".join(words))
    return titles


def _moments(live: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """Return one row for each moment of a cell: panel, time, phase, and live GiB of each role."""
    columns = {
        _PANEL: live["cell"].map(labels),
        _AT_MS: live["at_ms"].round(_DIGITS_OF_MS),
        _VALUE: (live["live_bytes"] / GIB).round(_DIGITS_OF_GIB),
    }
    keys = [_PANEL, "event", _AT_MS, "phase"]
    named = live.assign(**columns)
    wide = named.pivot_table(index=keys, columns="role", values=_VALUE, fill_value=0.0)
    order = wide.sum(axis=1).sort_values(ascending=False, kind="stable").index
    # A stacked chart adds up rows of the same time, so that only the highest of them may remain.
    highest = wide.loc[order].reset_index().drop_duplicates([_PANEL, _AT_MS])
    return highest.sort_values([_PANEL, "event"]).drop(columns="event").rename_axis(columns=None)


def _distinguished_axes(results: Results, without: tuple[str, ...] = ()) -> list[str]:
    """Return the axes that a chart distinguishes. Seeds count as repetitions."""
    return _varying_among(results.cells, key_axes(results, without=(*without, "seed")))


def _medians(
    cells: pd.DataFrame, axes: list[str], measures: Sequence[ChartMeasure]
) -> pd.DataFrame:
    """Return one row for each combination of axes and measure: the median over its cells."""
    parts = [pd.DataFrame(columns=[*axes, _MEASURE, _VALUE])]
    for measure in measures:
        if measure.column in cells:
            values = cells[measure.column].astype(float) * measure.scale
            parts.append(cells[axes].assign(measure=measure.title, value=values))
    rows = pd.concat(parts[1:] or parts, ignore_index=True).dropna(subset=[_VALUE])
    for axis in axes:
        # A null becomes a text too, so that cells without a value of the axis are drawn.
        if not pd.api.types.is_numeric_dtype(rows[axis]):
            rows[axis] = rows[axis].map(str)
    by = [*axes, _MEASURE]
    return rows.groupby(by, dropna=False)[[_VALUE]].median().reset_index()


def _across(axes: list[str]) -> tuple[str, list[str]]:
    """Return the axis along a panel, and the axes that make the panels."""
    across = _LENGTH if _LENGTH in axes else "".join(axes[-1:])
    return across, [axis for axis in axes if axis != across]


def _across_channel(across: str, bars: pd.DataFrame) -> Any:
    return _nominal(alt.X, across, bars) if across else alt.value(_PANEL_SIZE["width"] / 2)


def _in_panels(
    points: pd.DataFrame, axes: list[str], runs: Sequence[str] = ()
) -> tuple[pd.DataFrame, Panels]:
    """Add the title of its panel to each row. Without varying axes there are no panels.

    runs: names of the runs in the order of the command line.
    """
    axes = _varying_among(points, axes)
    if not axes:
        return points, Panels()
    ranks = pd.DataFrame({axis: value_ranks(axis, points[axis]) for axis in axes})
    ranks = ranks.replace(-1, len(points))  # panels without a value of the axis come last
    ordered = points.loc[ranks.sort_values(axes, kind="stable").index]
    number = ordered.groupby(axes, dropna=False, sort=False).ngroup()
    panels = ordered[axes].assign(number=number).drop_duplicates("number").set_index("number")
    marks = _marks(ordered.drop(columns=[*axes, _VALUE]), number)
    amount = {panel: len(own) for panel, own in marks.items()}
    # Of panels that repeat each other, the first one is drawn: the fullest, or of the first run.
    panels = _first_runs_first(panels, runs)
    fullest_first = sorted(panels.index, key=lambda panel: len(marks[panel]), reverse=True)
    choice = choose_panels(panels.loc[fullest_first], axes, Shown(amount, marks))
    shown = ordered[number.isin(choice.chosen)]
    texts = _titles(shown, _varying_among(shown, axes))
    titles = list(dict.fromkeys(texts))
    return shown.assign(**{_PANEL: texts}), Panels(titles, _note(choice, shown, axes))


def _marks(points: pd.DataFrame, number: pd.Series[int]) -> dict[int, frozenset[tuple[str, ...]]]:
    """Return for each panel the keys of what it shows."""
    marks = {}
    for panel, rows in points.astype(str).groupby(number):
        marks[panel] = frozenset(rows.itertuples(index=False, name=None))
    return marks


def _first_runs_first(panels: pd.DataFrame, runs: Sequence[str]) -> pd.DataFrame:
    if RUN not in panels:
        return panels
    position = {run: index for index, run in enumerate(runs)}
    in_order = panels[RUN].map(position).astype(float).sort_values(kind="stable")
    return panels.loc[in_order.index]


def _runs(results: Results) -> Sequence[str]:
    """Return the names of the runs in the order of the command line; empty for a single run."""
    named: Sequence[str] = results.manifest.get("runs", ())
    return named


def _named(axis: str, value: Any) -> str:
    """Return a value with the name of its axis, unless it is a word that needs none."""
    return value if isinstance(value, str) else f"{axis}={value}"


def _varying_among(points: pd.DataFrame, axes: Iterable[str]) -> list[str]:
    return [axis for axis in axes if points[axis].nunique(dropna=False) > 1]


def _nominal(channel: Any, axis: str, points: pd.DataFrame) -> Any:
    upright = {"axis": alt.Axis(labelAngle=0)} if channel is alt.X else {}
    return channel(axis, type="nominal", sort=ordered_values(axis, points[axis]), **upright)


def _tooltip(axes: list[str], unit: str) -> list[alt.Tooltip]:
    value = alt.Tooltip(_VALUE, type="quantitative", title=unit, format=".4~g")
    return [*map(alt.Tooltip, axes), value]
