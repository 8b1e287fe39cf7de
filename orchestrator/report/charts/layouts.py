"""The types of charts. Each turns results into an Altair chart; `registry.PLOTS` defines which
charts exist.

A chart shows medians over axes that it does not distinguish, such as seeds. A chart with fewer
than two points is omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import altair as alt
import pandas as pd

from orchestrator.analysis.axes import (
    GIB,
    is_null,
    key_axes,
    ordered_values,
    sort_cells,
    varying_axes,
)
from orchestrator.analysis.results import Results
from orchestrator.report.charts.panels import PanelChoice, Shown, choose_panels
from orchestrator.report.tables.allocation_layouts import ROLES
from orchestrator.report.tables.cell_filters import CellFilter
from orchestrator.report.tables.kernel_layouts import OUTSIDE_OPERATORS, OUTSIDE_PHASES
from orchestrator.report.tables.layouts import each

Chart = alt.Chart | alt.FacetChart

_PANEL = "panel"
_MEASURE = "measure"
_VALUE = "value"
_ALONE = {"width": 560, "height": 300}
_BESIDE_OTHERS = {"width": 230, "height": 170}
_LOGARITHMIC: dict[str, Any] = {"type": "log", "nice": False, "padding": 12}
_AT_MS, _BEGIN_MS = "at_ms", "begin_ms"
_DIGITS_OF_MS, _DIGITS_OF_GIB = 3, 5  # more nobody sees, and the page has to hold them all
_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ChartMeasure:
    """A column of `cells` with a scale factor and the name in the legend."""

    title: str
    column: str
    scale: float = 1.0


class PlotLayout(Protocol):
    def draw(self, results: Results) -> Chart | None: ...


@dataclass(frozen=True)
class Lines:
    """A line for each combination of axes on logarithmic scales, where a power of `along` is a
    straight line.
    """

    cells: CellFilter
    along: str
    unit: str
    measures: tuple[ChartMeasure, ...]

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        axes = _varying(chosen, without=(self.along,))
        points = _medians(
            _melted(chosen.cells, [*axes, self.along], self.measures), [*axes, self.along, _MEASURE]
        )
        points = points[_lengths_of_series(points, [*axes, _MEASURE], self.along) > 1]
        if points.empty:
            return None
        axes = _telling(points, axes)
        told_apart = [*axes[:1], *_telling(points, [_MEASURE]), *axes[1:]]
        colour, dash, rest = told_apart[:1], told_apart[1:2], told_apart[2:]
        points, panels = _in_panels(points, rest, _runs(chosen))
        legend = alt.selection_point(fields=colour, bind="legend")
        lengths = sorted(points[self.along].unique().tolist())
        base = alt.Chart(points).mark_line(point=True)
        encodings: dict[str, Any] = {
            "x": alt.X(
                self.along, type="quantitative", axis=alt.Axis(values=lengths, format="d")
            ).scale(base=2, **_LOGARITHMIC),
            "y": alt.Y(_VALUE, type="quantitative", title=self.unit).scale(**_LOGARITHMIC),
            "tooltip": _tooltip([*told_apart, self.along], self.unit),
        }
        if colour:
            encodings["color"] = self._told_by(alt.Color, colour[0], points)
            encodings["opacity"] = alt.when(legend).then(alt.value(1.0)).otherwise(alt.value(0.15))
            base = base.add_params(legend)
        if dash:
            encodings["strokeDash"] = self._told_by(alt.StrokeDash, dash[0], points)
        zoom = alt.selection_interval(bind="scales", zoom="wheel![event.shiftKey]")
        return panels.facetted(base.encode(**encodings).add_params(zoom))

    def _told_by(self, channel: Any, name: str, points: pd.DataFrame) -> Any:
        if name != _MEASURE:
            return _nominal(channel, name, points)
        return channel(
            name, type="nominal", sort=[measure.title for measure in self.measures], title=None
        )


@dataclass(frozen=True)
class SpeedUps:
    """Bars that show how many times faster each value of an axis is than its first, in panels
    for other axes.
    """

    cells: CellFilter
    axis: str
    column: str = "step_ms_median"

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        if self.axis not in chosen.cells or self.column not in chosen.cells:
            return None
        axes = _varying(chosen, without=(self.axis,))
        bars = self._speed_ups(chosen.cells, axes)
        if len(bars) < 2:
            return None
        across, rest = _across(axes)
        bars, panels = _in_panels(bars, rest, _runs(chosen))
        drawn = alt.Chart().mark_bar().encode(
            x=_nominal(alt.X, across, bars) if across else alt.value(_BESIDE_OTHERS["width"] / 2),
            xOffset=_nominal(alt.XOffset, self.axis, bars),
            y=alt.Y(_VALUE, type="quantitative", title="times faster"),
            color=_nominal(alt.Color, self.axis, bars),
            tooltip=_tooltip([*axes, self.axis], "times faster"),
        )  # fmt: skip
        as_fast = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(y=alt.datum(1))
        return panels.facetted(alt.layer(drawn, as_fast, data=bars))

    def _speed_ups(self, cells: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
        """Return the rows of all values but the first, with their speed-up as `value`."""
        times = _medians(
            _melted(cells, [*axes, self.axis], (ChartMeasure("", self.column),)), [*axes, self.axis]
        )
        values = ordered_values(self.axis, times[self.axis])
        if len(values) < 2:
            return times.iloc[:0]
        is_first = times[self.axis] == values[0]
        baseline, others = times.loc[is_first].drop(columns=self.axis), times.loc[~is_first]
        both: pd.DataFrame = others.merge(
            baseline, on=axes or None, how="inner" if axes else "cross", suffixes=("", "_baseline")
        )
        return both.assign(value=both["value_baseline"] / both[_VALUE]).drop(
            columns="value_baseline"
        )


@dataclass(frozen=True)
class Phases:
    """Stacked bars with the share of each phase in a step, in panels for other axes."""

    cells: CellFilter

    def draw(self, results: Results) -> Chart | None:
        chosen = replace(results, cells=self.cells(results.cells))
        axes = _varying(chosen)
        measures = tuple(ChartMeasure(phase, f"{phase}_ms_median") for phase in _PHASES)
        bars = _medians(_melted(chosen.cells, axes, measures), [*axes, _MEASURE])
        if len(bars) < 2:
            return None
        across, rest = _across(axes)
        bars, panels = _in_panels(bars, rest, _runs(chosen))
        order = {phase: place for place, phase in enumerate(_PHASES)}
        bars = bars.assign(order=bars[_MEASURE].map(order))
        drawn = alt.Chart(bars).mark_bar().encode(
            x=_nominal(alt.X, across, bars) if across else alt.value(_BESIDE_OTHERS["width"] / 2),
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
        inside = kernels[kernels["name"] != OUTSIDE_OPERATORS]
        if inside.empty:
            return None
        titles, panels = _panels_of_cells(results, inside.groupby("cell")["ms"].sum())
        totals = (
            inside[inside["cell"].isin(titles)]
            .groupby(["cell", "phase", "kernel_class"], as_index=False)["ms"]
            .sum()
        )
        bars = pd.DataFrame(
            {
                _PANEL: totals["cell"].map(titles),
                "phase": totals["phase"].replace("", OUTSIDE_PHASES),
                "class": totals["kernel_class"],
                _VALUE: totals["ms"],
            }
        )
        if len(bars) < 2:
            return None
        order = [*_PHASES, OUTSIDE_PHASES]
        drawn = alt.Chart(bars).mark_bar().encode(
            x=alt.X("phase", type="nominal", sort=order, axis=alt.Axis(labelAngle=0)),
            y=alt.Y(_VALUE, type="quantitative", title="ms a step"),
            color=alt.Color("class", type="nominal"),
            tooltip=_tooltip([_PANEL, "phase", "class"], "ms a step"),
        )  # fmt: skip
        return panels.apart(drawn, ["y"])


@dataclass(frozen=True)
class LiveMemory:
    """Stacked areas of live memory by role during one step, one panel for each cell, with marks
    where phases begin.
    """

    def draw(self, results: Results) -> Chart | None:
        live = results.live()
        if live.empty:
            return None
        at_once = live.groupby(["cell", "event"])["live_bytes"].sum()
        titles, panels = _panels_of_cells(results, at_once.groupby("cell").max())
        moments = _moments(live[live["cell"].isin(titles)], titles)
        order: list[Any] = [role for role in ROLES if role in moments]
        begins = (
            moments[moments["phase"] != ""]
            .groupby([_PANEL, "phase"])[_AT_MS]
            .min()
            .rename(_BEGIN_MS)
            .reset_index()
        )
        areas = (
            alt.Chart()
            .transform_filter(f"isValid(datum.{_AT_MS})")
            .transform_fold(order, as_=["role", _VALUE])
        )
        areas = areas.transform_calculate(order=f"indexof({order}, datum.role)")
        tooltips = [alt.Tooltip(name, type="nominal") for name in ("phase", "role")]
        areas = areas.mark_area(interpolate="step-after").encode(
            x=alt.X(_AT_MS, type="quantitative", title="ms into the step"),
            y=alt.Y(_VALUE, type="quantitative", title="GiB", stack="zero"),
            color=alt.Color("role", type="nominal", sort=order, scale=alt.Scale(domain=order)),
            order=alt.Order("order", type="quantitative"),
            tooltip=tooltips + _tooltip([], "GiB"),
        )
        marks = (
            alt.Chart()
            .transform_filter(f"isValid(datum.{_BEGIN_MS})")
            .encode(x=alt.X(_BEGIN_MS, type="quantitative"))
        )
        names = marks.mark_text(align="left", baseline="top", dx=3, fontSize=9)
        layers = (
            areas,
            marks.mark_rule(strokeDash=[4, 3]),
            names.encode(text=alt.Text("phase", type="nominal"), y=alt.value(2)),
        )
        return panels.apart(
            alt.layer(*layers, data=pd.concat([moments, begins], ignore_index=True)), ["x", "y"]
        )


@dataclass(frozen=True)
class Panels:
    """The panels of a chart. titles: in order, empty for a single panel. note: lines about
    panels that are not drawn.
    """

    titles: Sequence[str] = ()
    note: Sequence[str] = ()

    def facetted(self, chart: Any) -> Chart:
        whole = _facetted(chart, list(self.titles))
        return whole.properties(title=list(self.note)) if self.note else whole

    def apart(self, chart: Any, channels: Sequence[str]) -> Chart:
        """Return a facetted chart whose panels have scales of their own, because the largest
        would flatten the others.
        """
        whole = self.facetted(chart)
        if not self.note or not isinstance(whole, alt.FacetChart):
            return whole
        scales: dict[str, Any] = dict.fromkeys(channels, "independent")
        own: Chart = whole.resolve_scale(**scales)
        return own.properties(title=[*self.note, "each panel has its own scale"])


def _panels_of_cells(results: Results, shows: pd.Series[float]) -> tuple[dict[str, str], Panels]:
    """Return one panel for each cell, with a title that names what differs between the drawn
    cells.

    shows: how much each cell has to show, by cell.
    """
    cells = results.cells[results.cells["cell"].isin(shows.index)]
    axes = key_axes(replace(results, cells=cells))
    apart = _telling(cells, ["task", *axes])
    panels = _first_named_first(cells.set_index("cell")[apart], _runs(results))
    choice = choose_panels(panels, apart, Shown(shows.to_dict()), "cells")
    drawn = sort_cells(cells, axes)
    drawn = drawn[drawn["cell"].isin(choice.chosen)]
    varying = varying_axes(replace(results, cells=drawn))
    telling = [*_telling(drawn, ["task"]), *(axis for axis in axes if axis in varying)]
    titles = dict(zip(drawn["cell"], _titles(drawn, telling), strict=True))
    return titles, Panels(list(titles.values()), _note(choice, drawn, apart))


def _note(choice: PanelChoice, shown: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    """Return the note, with the values that all drawn panels share and that therefore are in no
    title.
    """
    if not choice.note:
        return []
    alike = _titles(shown.iloc[:1], [axis for axis in axes if axis not in _telling(shown, axes)])
    return [choice.note, *(f"all of these: {title}" for title in alike if title)]


def _titles(rows: pd.DataFrame, axes: Sequence[str]) -> list[str]:
    return [
        " · ".join(_named(axis, row[axis]) for axis in axes if not is_null(row[axis]))
        for row in each(rows)
    ]


def _moments(live: pd.DataFrame, labels: Mapping[str, str]) -> pd.DataFrame:
    """Return one row for each moment of a cell: panel, time, phase, and live GiB of each role."""
    named = live.assign(
        **{
            _PANEL: live["cell"].map(labels),
            _AT_MS: live["at_ms"].round(_DIGITS_OF_MS),
            _VALUE: (live["live_bytes"] / GIB).round(_DIGITS_OF_GIB),
        }
    )
    wide = named.pivot_table(
        index=[_PANEL, "event", _AT_MS, "phase"], columns="role", values=_VALUE, fill_value=0.0
    )
    highest_first = wide.loc[
        wide.sum(axis=1).sort_values(ascending=False, kind="stable").index
    ].reset_index()
    apart = highest_first.drop_duplicates(
        [_PANEL, _AT_MS]
    )  # a chart would add up what stands at one place
    return apart.sort_values([_PANEL, "event"]).drop(columns="event").rename_axis(columns=None)


def _varying(results: Results, without: tuple[str, ...] = ()) -> list[str]:
    """Return the axes that a chart distinguishes. Seeds count as repetitions."""
    cells = results.cells
    return [
        axis
        for axis in key_axes(results, without=(*without, "seed"))
        if cells[axis].nunique(dropna=False) > 1
    ]


def _melted(
    cells: pd.DataFrame, axes: Sequence[str], measures: Sequence[ChartMeasure]
) -> pd.DataFrame:
    """Return one row for each known measure of a cell. Axes that are not numbers become texts."""
    parts = [
        cells[list(axes)].assign(
            measure=measure.title, value=cells[measure.column].astype(float) * measure.scale
        )
        for measure in measures
        if measure.column in cells
    ]
    if not parts:
        return pd.DataFrame(columns=[*axes, _MEASURE, _VALUE])
    rows = pd.concat(parts, ignore_index=True)
    for axis in axes:
        if not pd.api.types.is_numeric_dtype(rows[axis]):
            rows[axis] = rows[axis].map(str)
    return rows.dropna(subset=[_VALUE])


def _medians(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    return rows.groupby(by, dropna=False)[[_VALUE]].median().reset_index()


def _lengths_of_series(points: pd.DataFrame, series: list[str], along: str) -> pd.Series[int]:
    """Return for each row the number of points on its line."""
    return points.groupby(series, dropna=False)[along].transform("nunique")


def _across(axes: list[str]) -> tuple[str, list[str]]:
    """Return the axis along a panel, and the axes that make the panels."""
    across = "context_length" if "context_length" in axes else axes[-1] if axes else ""
    return across, [axis for axis in axes if axis != across]


def _in_panels(
    points: pd.DataFrame, axes: list[str], runs: Sequence[str] = ()
) -> tuple[pd.DataFrame, Panels]:
    """Add the title of its panel to each row. Without varying axes there are no panels.

    runs: names of the runs in the order of the command line.
    """
    axes = _telling(points, axes)
    if not axes:
        return points, Panels()
    orders = [ordered_values(axis, points[axis]) for axis in axes]
    ranks = [
        points[axis].map({value: place for place, value in enumerate(order)})
        for axis, order in zip(axes, orders, strict=True)
    ]
    ordered = points.loc[pd.concat(ranks, axis=1, keys=axes).sort_values(axes, kind="stable").index]
    number = ordered.groupby(axes, dropna=False, sort=False).ngroup()
    panels = ordered[axes].assign(number=number).drop_duplicates("number").set_index("number")
    marks = _marks(ordered.drop(columns=[*axes, _VALUE]), number)
    fullest_first = sorted(
        _first_named_first(panels, runs).index, key=lambda panel: len(marks[panel]), reverse=True
    )
    much = {panel: len(own) for panel, own in marks.items()}
    choice = choose_panels(panels.loc[fullest_first], axes, Shown(much, marks))
    shown = ordered[number.isin(choice.chosen)]
    texts = _titles(shown, _telling(shown, axes))
    return shown.assign(**{_PANEL: texts}), Panels(
        list(dict.fromkeys(texts)), _note(choice, shown, axes)
    )


def _marks(points: pd.DataFrame, number: pd.Series[int]) -> dict[int, frozenset[tuple[str, ...]]]:
    """Return for each panel the keys of what it shows."""
    rows = points.astype(str)
    return {
        panel: frozenset(own.itertuples(index=False, name=None))
        for panel, own in rows.groupby(number)
    }


def _first_named_first(panels: pd.DataFrame, runs: Sequence[str]) -> pd.DataFrame:
    if "run" not in panels:
        return panels
    named = {run: place for place, run in enumerate(runs)}
    return panels.loc[panels["run"].map(named).astype(float).sort_values(kind="stable").index]


def _runs(results: Results) -> Sequence[str]:
    """Return the names of the runs in the order of the command line; empty for a single run."""
    named: Sequence[str] = results.manifest.get("runs", ())
    return named


def _named(axis: str, value: Any) -> str:
    """Return a value with the name of its axis, unless it is a word that needs none."""
    return value if isinstance(value, str) else f"{axis}={value}"


def _telling(points: pd.DataFrame, axes: Iterable[str]) -> list[str]:
    """Return the axes that vary."""
    return [axis for axis in axes if points[axis].nunique(dropna=False) > 1]


def _facetted(chart: Any, panels: list[str]) -> Chart:
    if len(panels) < 2:
        alone: Chart = chart.properties(**_ALONE)
        return alone
    facet = alt.Facet(_PANEL, type="nominal", sort=panels, title=None)
    facetted: Chart = chart.properties(**_BESIDE_OTHERS).facet(facet=facet, columns=3)
    return facetted


def _nominal(channel: Any, axis: str, points: pd.DataFrame) -> Any:
    upright = {"axis": alt.Axis(labelAngle=0)} if channel is alt.X else {}
    return channel(axis, type="nominal", sort=ordered_values(axis, points[axis]), **upright)


def _tooltip(axes: list[str], unit: str) -> list[alt.Tooltip]:
    return [
        *(alt.Tooltip(axis) for axis in axes),
        alt.Tooltip(_VALUE, type="quantitative", title=unit, format=".4~g"),
    ]
