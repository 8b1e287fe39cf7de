"""Charts of points and lines: a value over the context length, and ratios with their intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import MAIN, RUN
from orchestrator.analysis.results import Results
from orchestrator.report.charts.chart import (
    MOST_PANELS,
    NUMBER_FORMAT,
    Channel,
    Drawn,
    Layer,
    LegendEntry,
    Panel,
    bound_legend,
    channel,
    colour_channel,
    data_of,
    legend,
    log_scale,
    mark_label,
    marks,
    with_data,
)
from orchestrator.report.charts.measures import KEY, Points
from orchestrator.report.charts.theme import FUSED, MOST_COLOURS, colours_of, light
from orchestrator.report.text.cell_names import (
    LENGTH,
    NAME,
    NAMING,
    fullest_context,
    ordered,
    sort_by,
)
from orchestrator.report.text.numbers import rounded
from orchestrator.report.text.slices import choose_slice, evenly
from tasks.spec.parameters import TIMING_AXES

RATIO = "×"  # the unit of speed-ups
_HEIGHT = 140
_NUMBERS = ("shown", "low", "high")  # columns of a value and its interval
_HORIZONTAL = ("context_length", "batch_size", "num_layers", "d_model", "d_head")
# Axes that name a model, or that a caption does not mention or names otherwise.
_NO_PANELS = (*dict(NAMING), "seed", "pass", "precision", RUN, *TIMING_AXES)
_SLOPE_LENGTHS = 3  # lengths from which on a slope is printed
# Colours of rows that are implementations of attention.
_FUSED, _UNFUSED = "bf16", "fp32"
_KERNEL_LEGEND = (
    LegendEntry("full", "one fused kernel", _FUSED),
    LegendEntry("full", "separate kernels", _UNFUSED),
)


@dataclass(frozen=True)
class Lines:
    """Lines of a value over the context length, in panels.

    unit: if it is RATIO, a line goes across at 1. colour, panel: axes; an empty `panel` is the
    model. dashed: the eager lines are dashed. has_slopes: the exponent stands at the end of a line.
    """

    points: Points
    unit: str
    colour: str
    panel: str = ""
    is_log: bool = True
    dashed: bool = False
    top: float | None = None
    has_slopes: bool = False

    def __call__(self, results: Results) -> Drawn | None:
        points = self.points(results)
        across = _first_varying(points, _HORIZONTAL)
        if not across or self.colour not in points:
            return None
        dash = ("compile",) if self.dashed and points["compile"].nunique() > 1 else ()
        panel = self.panel or _panel_axis(points, results.axes, (across, self.colour))
        shown = list(dict.fromkeys((across, self.colour, panel, *dash)))
        points, note = choose_slice(points, results.axes, shown)
        # A line of a single point is invisible.
        by_line = points.groupby([panel, self.colour, *dash], dropna=False)
        points = points[by_line[across].transform("nunique") > 1]
        if points.empty:
            return None
        values = evenly(ordered(self.colour, points), MOST_COLOURS)
        points = points[points[self.colour].isin(values)]
        colours = colours_of(self.colour, values)
        points = points.assign(across=points[across].astype(str), order=points[across])
        points = _mark_data(points, self.unit)
        panels = evenly(ordered(panel, points), MOST_PANELS)
        width = 150 if len(panels) > 3 else 250
        parts = []
        for value in panels:
            title = value if isinstance(value, str) else f"{panel} {value}"
            drawn = self._panel(points, points[points[panel] == value], colours)
            parts.append({**drawn, "title": title, "width": width, "height": _HEIGHT})
        entries = legend("line", colours)
        if dash:
            entries += [LegendEntry("line", "compiled"), LegendEntry("dash", "eager")]
        return Drawn(parts, [*entries, *bound_legend(points)], note, min(len(parts), 5))

    def _panel(self, points: pd.DataFrame, own: pd.DataFrame, colours: Mapping[str, str]) -> Panel:
        ticks = list(map(str, sorted(points["order"].unique())))
        axis = {"labelAngle": 0, "labelOverlap": True, "grid": False}
        x = channel("across:N", sort=ticks, title=None, scale={"domain": ticks}, axis=axis)
        colour = colour_channel(f"{self.colour}:N", colours)
        shared = {"x": x, "y": self._vertical(points), "color": colour}
        lines = {**shared, "order": channel("order:Q")}
        if self.dashed:
            dashes = {"domain": ["eager", "blocks", "model"], "range": [[4, 3], [1, 0], [1, 0]]}
            lines["strokeDash"] = channel("compile:N", scale=dashes, legend=None)
        layers = [marks("line", lines, strokeWidth=1.6, aria=False), *_points(own, shared, "y")]
        if self.unit == RATIO:
            rule = marks("rule", {"y": "one:Q"}, aria=False, strokeDash=[4, 3], color=light("ink2"))
            layers.insert(0, with_data([{"one": 1.0}], rule))
        if self.has_slopes:
            layers += _slopes(own, self.colour, shared)
        columns = ["across", "order", "shown", "low", "high", "label", "href", "hollow"]
        return with_data(data_of(own, (*columns, self.colour, "compile")), {"layer": layers})

    def _vertical(self, points: pd.DataFrame) -> Channel:
        values = _numbers(points)
        if self.is_log:
            scale, ticks = log_scale(values[values > 0])
            axis: Channel = {"values": ticks, "format": NUMBER_FORMAT}
        else:
            scale = {"domain": [0, self.top or float(values.max()) * 1.05]}
            axis = {"tickCount": 5, "format": NUMBER_FORMAT if self.unit else "%"}
        return channel("shown:Q", title=None, scale=scale, axis=axis)


def _mark_data(points: pd.DataFrame, unit: str) -> pd.DataFrame:
    """Return the points with rounded numbers, and what `_points` draws: label, link and filling."""
    is_bound = points["cpu_bound"].fillna(False).astype(bool) if "cpu_bound" in points else False
    points = points.assign(
        label=list(map(mark_label, points.to_dict("records"), repeat(unit))),
        href="#cell=" + points[KEY],
        hollow=is_bound,
    )
    numbers = points.columns.intersection(list(_NUMBERS))
    points[numbers] = points[numbers].apply(rounded)
    return points


def _points(rows: pd.DataFrame, shared: Mapping[str, Channel], along: str) -> list[Layer]:
    """Return the intervals, if they are known, and points, hollow ones for CPU-bound cells.

    shared: the channels x, y and color. along: the channel of the value, x or y.
    """
    layers = []
    if "low" in rows:
        ends = {**shared, along: channel("low:Q"), f"{along}2": {"field": "high"}}
        layers.append(marks("rule", ends, aria=False))
    hollow = {"test": "datum.hollow", "value": light("bg")}
    fill = {**shared["color"], "condition": hollow}
    encoding = {**shared, "fill": fill, "description": "label:N", "href": "href:N"}
    return [*layers, marks("point", encoding, size=36, strokeWidth=1.4, opacity=1)]


def _slopes(own: pd.DataFrame, axis: str, shared: Mapping[str, Channel]) -> list[Layer]:
    """Return the exponents with which lines end, written behind their last points."""
    rows = []
    for value, line in own.groupby(axis, observed=True):
        line = line.sort_values("order").tail(_SLOPE_LENGTHS)
        if len(line) == _SLOPE_LENGTHS:
            logs = np.log(line[["order", "shown"]].astype(float))
            slope = np.polyfit(logs["order"], logs["shown"], 1)[0]
            last = line.iloc[-1]
            rows.append({"across": last["across"], "shown": last["shown"], axis: value,
                         "slope": f"n^{slope:.1f}"})  # fmt: skip
    if not rows:
        return []
    encoding = {**shared, "text": "slope:N"}
    texts = marks("text", encoding, align="left", dx=7, fontSize=10, aria=False)
    return [with_data(rows, texts)]


@dataclass(frozen=True)
class Dots:
    """A dot with its interval for each row, on a logarithmic axis.

    points: of each panel, with its title. unit: if it is RATIO, a line goes across at 1. rows: axes
    whose values name a row; without the context, all are of the longest one with most rows.
    colour: an axis.
    """

    points: tuple[tuple[str, Points], ...]
    unit: str
    rows: tuple[str, ...]
    colour: str

    def __call__(self, results: Results) -> Drawn | None:
        parts, note, longest = {}, "", None
        for title, points in self.points:
            cells = points(results)
            shown = list(dict.fromkeys((*self.rows, self.colour)))
            if cells.empty or not set(shown) <= set(cells):
                continue
            if LENGTH not in self.rows:
                longest = longest or fullest_context(cells, self.rows[0])
                cells = cells[cells[LENGTH] == longest]
                title += f", context {longest:,}"
            cells, note = choose_slice(cells, results.axes, shown)
            if len(cells) > 1:
                parts[title] = cells
        if not parts:
            return None
        every = pd.concat(parts.values(), ignore_index=True)
        values = ordered(self.colour, every)
        colours = colours_of(self.colour, values)
        entries = [*legend("full", colours), *bound_legend(every)]
        if self.colour in self.rows:
            colours = {name: _FUSED if name in FUSED else _UNFUSED for name in values}
            entries = [one for one in _KERNEL_LEGEND if one.colour in colours.values()]
        panels = []
        for title, cells in parts.items():
            panels.append({**self._panel(cells, colours), "title": title})
        return Drawn(panels, entries, note)

    def _panel(self, cells: pd.DataFrame, colours: Mapping[str, str]) -> Panel:
        cells = sort_by(cells, self.rows)
        row_names = cells[list(self.rows)].map(_with_commas).agg("  ".join, axis=1)
        data = _mark_data(cells, self.unit).assign(row=row_names)
        scale, ticks = log_scale(_numbers(data))
        axis = {"values": ticks, "format": NUMBER_FORMAT}
        x = channel("shown:Q", title=None, scale=scale, axis=axis)
        order = list(dict.fromkeys(row_names))
        y = channel("row:N", sort=order, title=None, axis={"labelLimit": 140})
        shared = {"x": x, "y": y, "color": colour_channel(f"{self.colour}:N", colours)}
        layers = []
        if self.unit == RATIO:
            rule = marks("rule", {"x": "one:Q"}, aria=False, color=light("ink2"))
            layers.append(with_data([{"one": 1.0}], rule))
        layers += _points(data, shared, "x")
        chosen = ["row", "label", "href", "hollow", *_NUMBERS, self.colour]
        size = {"width": 260, "height": max(15 * len(order), 60)}
        return with_data(data_of(data, chosen), {"layer": layers, **size})


def _numbers(points: pd.DataFrame) -> pd.Series[float]:
    """Return the values of points and the ends of their intervals."""
    values = points.filter(items=list(_NUMBERS)).to_numpy(dtype=float)
    return pd.Series(values.ravel()).dropna()


def _with_commas(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _first_varying(cells: pd.DataFrame, axes: Iterable[str]) -> str:
    """Return the first of these axes that has several values; empty if none has."""
    for axis in axes:
        if axis in cells and cells[axis].astype("string").nunique() > 1:
            return axis
    return ""


def _panel_axis(cells: pd.DataFrame, axes: Sequence[str], taken: Collection[str]) -> str:
    """Return the axis whose values are panels: the model, or else another axis that varies."""
    skipped = {*taken, *_NO_PANELS, *MAIN}
    others = [axis for axis in axes if axis not in skipped]
    return _first_varying(cells, (NAME, *others)) or NAME
