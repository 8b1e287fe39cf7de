"""Charts of points and lines: a value over an axis that varies, and the same cells over commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import RUN, axis_text, each
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.common.units import GIB
from orchestrator.report.charts import chart
from orchestrator.report.charts.chart import Channel, Drawn, Layer, LegendEntry, Panel
from orchestrator.report.charts.theme import FUSED, MOST_COLOURS, colours_of, light
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import COMPILED, LENGTH, NAME, NOT_SHOWN
from orchestrator.report.text.numbers import number, rounded
from tasks.spec.parameters import TIMING_AXES

RATIO = "×"  # the unit of speed-ups
_HEIGHT = 140
_WIDTHS = {1: 380, 2: 380, 3: 300, 4: 190}  # of a panel by their number in a row
_NARROW = 150  # of more than four
_NUMBERS = ("shown", "low", "high")  # columns of a value and its interval
_SLOPE_LENGTHS = 3  # lengths from which on a slope is printed
_MARGIN = 0.06  # between the first point and the axis, as a share of the width
_DASHED = [4, 3]
_HUGE = 1e6  # longer numbers are abbreviated on the horizontal axis
# Which scales are logarithmic: the horizontal and the vertical one.
_SCALES = {
    (True, True): "log scales",
    (True, False): "log scale across",
    (False, True): "log scale upwards",
    (False, False): "",
}
# Implementations of attention, with the colours of their points.
_KERNELS = {"one fused kernel": "bf16", "separate kernels": "fp32"}


@dataclass(frozen=True)
class Lines:
    """Lines of a value over the context length or another axis that varies, in panels.

    points: if they have a column `rule`, lines go across at its values, and at 1 if unit is RATIO.
    title: of the vertical axis. colour, panel: axes; one that does not vary gives way to another
    that does, unless `across` names the horizontal axis. dashed: the eager lines are dashed. top: of
    a linear scale. has_zero: a linear scale begins at 0. has_slopes: the exponent stands at the end
    of a line. rule: what the values of the column `rule` are, for the legend.
    """

    points: chart.Points
    unit: str
    title: str
    colour: str = "precision"
    panel: str = NAME
    is_log: bool = True
    dashed: bool = False
    top: float | None = None
    has_zero: bool = True
    has_slopes: bool = False
    across: str = ""
    rule: str = ""

    def __call__(self, results: Results) -> Drawn | None:
        points = self.points(results)
        across, colour, panel = self._axes(points, results.axes)
        if not across:
            return None
        dash = ["compile"] * (self.dashed and points["compile"].nunique() > 1)
        shown = list(filter(None, dict.fromkeys((across, colour, panel, *dash))))
        points, note = cell_names.choose_slice(points, results.axes, shown)
        nowhere = int(points[across].isna().sum())
        points = points[points[across].notna()]
        # A line of a single point is invisible.
        by_line = points.groupby([colour, panel, *dash], dropna=False)
        points = points[by_line[across].transform("nunique") > 1]
        if points.empty:
            return None
        notes = [_SCALES[_is_log(points[across]), self.is_log], chart.interval_note(points), note]
        if nowhere:
            where = cell_names.axis_title(across)
            notes.append(f"{counted(nowhere, 'cell')} without {where} left out")
        points = cell_names.sort_by(points, (across,))
        # Numbers of Python, which a specification can hold, not those of NumPy.
        points = points.assign(x=pd.Series(points[across].tolist(), points.index, dtype=object))
        names: dict[str, list[str]] = {}
        roles = (("part", colour, MOST_COLOURS), ("panel", panel, chart.MOST_PANELS))
        for role, axis, most in roles:
            noun = f"values of {cell_names.axis_title(axis)}"
            values, few = chart.some_of(cell_names.axis_values(axis, points), most, noun)
            notes.append(few)
            show = cell_names.value_text if axis == "attention" else cell_names.setting_text
            names[role] = [show(axis, value) for value in values]
            texts = dict(zip(map(axis_text, values), names[role], strict=True))
            points[role] = points[axis].map(axis_text).map(texts)
            if role == "part":
                colours = dict(zip(names[role], colours_of(axis, values).values(), strict=True))
        points = points.dropna(subset=["part", "panel"])
        points["dash"] = points["compile"] if dash else ""
        points["scope"] = cell_names.scopes_of(points, shown)
        drawn = self.draw(points, colours, names["panel"], cell_names.axis_title(across))
        return replace(drawn, note=chart.joined(*notes))

    def _axes(self, points: pd.DataFrame, axes: Sequence[str]) -> tuple[str, str, str]:
        """Return the axes across, of colours and of panels; the first is empty without a chart."""
        if self.across:
            free = cell_names.free_axes(points, (self.colour, self.panel, self.across))
            colour, panel = self.colour, self.panel
            if colour not in free:
                colour, panel = panel, colour
            return self.across if self.across in free else "", colour, panel
        dash = ["compile"] * self.dashed
        others = [axis for axis in axes if axis not in (*NOT_SHOWN, *TIMING_AXES)]
        first = (self.panel, self.colour, *dash, NAME, LENGTH, "batch_size")
        free = cell_names.free_axes(points, (*first, *others, *TIMING_AXES))
        left = [axis for axis in free if axis not in (*dash, self.panel, self.colour)]
        # Models are in a row only if no number varies.
        across = next((axis for axis in left if _is_number(points[axis])), NAME)
        if across not in free:
            return "", "", ""
        unused = iter([axis for axis in left if axis not in (across, NAME)])

        def free_or_other(axis: str) -> str:
            if axis in free and axis != across:
                return axis
            return next(unused, "task" if axis == across else axis)  # all are of one task

        return across, free_or_other(self.colour), free_or_other(self.panel)

    def draw(
        self,
        points: pd.DataFrame,
        colours: Mapping[str, str],
        panels: Sequence[str],
        x_title: str,
    ) -> Drawn:
        """Return the chart of points with `x`, `part` for the colour, `panel`, `dash` and `scope`."""
        points = _mark_data(points, self.unit)
        if "rule" not in points:
            points["rule"] = 1.0 if self.unit == RATIO else np.nan
        titles = [title for title in panels if title in set(points["panel"])]
        columns = min(len(titles), 5)
        channels = {
            "x": _across(points["x"], x_title),
            "y": self._vertical(points),
            "color": chart.colour_channel("part:N", colours),
        }
        size = {"width": _WIDTHS.get(columns, _NARROW), "height": _HEIGHT}
        parts = []
        for title in titles:
            layers = self._layers(points[points["panel"] == title], channels)
            parts.append({**layers, "title": title, **size})
        entries = chart.legend("line", colours)
        if points["dash"].nunique() > 1:
            entries += [LegendEntry("line", "compiled"), LegendEntry("dash", "eager")]
        if points["rule"].notna().any():
            entries.append(LegendEntry("dash", self.rule or self.title.removeprefix("times ")))
        return Drawn(parts, [*entries, *chart.bound_legend(points)], "", columns, x_title)

    def _layers(self, own: pd.DataFrame, shared: Mapping[str, Channel]) -> Panel:
        lines = dict(shared)
        if (own["dash"] != "").any():
            dashes = {"domain": ["eager", *COMPILED], "range": [_DASHED, [1, 0], [1, 0]]}
            lines["strokeDash"] = chart.channel("dash:N", scale=dashes, legend=None)
        layers = [
            chart.marks("line", lines, strokeWidth=1.6, aria=False),
            *_points(own, shared, "y"),
        ]
        rules = own[["rule"]].dropna().drop_duplicates()
        if len(rules):
            look = {"strokeDash": _DASHED, "color": light("ink2")}
            rule = chart.marks("rule", {"y": "rule:Q"}, aria=False, **look)
            layers.insert(0, chart.with_data(rules, rule))
        if self.has_slopes:
            layers += _slopes(own, shared)
        return chart.with_data(own, {"layer": layers})

    def _vertical(self, points: pd.DataFrame) -> Channel:
        values = _numbers(points)
        if self.is_log:
            scale, ticks = chart.log_scale(values[values > 0])
            axis: Channel = {"values": ticks, "format": chart.NUMBER_FORMAT}
        else:
            highest = max(float(values.max()), float(points["rule"].fillna(0.0).max()))
            low, high = float(values.min()), self.top or highest * 1.05
            low = 0.0 if self.has_zero else low - (high - low) * _MARGIN
            scale = {"domain": [low, high], "zero": self.has_zero, "nice": False}
            # In `,~g`, 400 would be 4e+2.
            axis = {"tickCount": 5, "format": ",~r" if self.unit else "%"}
        return chart.channel("shown:Q", title=self.title, scale=scale, axis=axis)


def _across(values: pd.Series[Any], title: str) -> Channel:
    """Return the channel of the horizontal axis: logarithmic if all values are positive numbers."""
    axis: dict[str, object] = {"labelAngle": 0}
    axis |= {"labelOverlap": True, "labelSeparation": 8, "grid": False}
    ticks = values.drop_duplicates().to_list()
    if not _is_number(values):
        return chart.channel("x:N", sort=ticks, title=title, scale={"domain": ticks}, axis=axis)
    low, high, is_log = float(min(ticks)), float(max(ticks)), _is_log(values)
    pad = (high / low) ** _MARGIN if is_log else (high - low) * _MARGIN
    domain = [low / pad, high * pad] if is_log else [low - pad, high + pad]
    scale = {"type": "log" if is_log else "linear", "domain": domain, "nice": False, "zero": False}
    axis |= {"values": ticks, "format": chart.NUMBER_FORMAT if high < _HUGE else "~s"}
    return chart.channel("x:Q", title=title, scale=scale, axis=axis)


def _is_log(values: pd.Series[Any]) -> bool:
    return _is_number(values) and bool(values.min() > 0)


def _is_number(values: pd.Series[Any]) -> bool:
    kinds = set(map(type, values.dropna().to_list()))
    return bool(kinds) and kinds <= {int, float}


def _mark_data(points: pd.DataFrame, unit: str) -> pd.DataFrame:
    """Return the points with rounded numbers, and what `_points` draws: label, link and filling."""
    is_bound = points["cpu_bound"].fillna(False).astype(bool) if "cpu_bound" in points else False
    labels = [chart.mark_label(row, unit) for row in each(points)]
    points = points.assign(label=labels, href="#cell=" + points[chart.KEY], hollow=is_bound)
    numbers = points.columns.intersection(list(_NUMBERS))
    points[numbers] = points[numbers].apply(rounded)
    return points


def _points(rows: pd.DataFrame, shared: Mapping[str, Channel], along: str) -> list[Layer]:
    """Return the intervals, if they are known, and points, hollow ones for CPU-bound cells.

    shared: the channels x, y and color. along: the channel of the value, x or y.
    """
    layers = []
    if "low" in rows:
        ends = {**shared, along: chart.channel("low:Q"), f"{along}2": {"field": "high"}}
        layers.append(chart.marks("rule", ends, aria=False))
    hollow = {"test": {"field": "hollow", "equal": True}, "value": light("bg")}
    fill = {**shared["color"], "condition": hollow}
    encoding = {**shared, "fill": fill, "description": "label:N", "href": "href:N"}
    return [*layers, chart.marks("point", encoding, size=36, strokeWidth=1.4, opacity=1)]


def _slopes(own: pd.DataFrame, shared: Mapping[str, Channel]) -> list[Layer]:
    """Return the exponents with which lines end, written before their last points."""
    rows = []
    for part, line in own.groupby("part", sort=False):
        line = line.sort_values("x").tail(_SLOPE_LENGTHS)
        if len(line) == _SLOPE_LENGTHS:
            logs = np.log(line[["x", "shown"]].astype(float))
            slope = np.polyfit(logs["x"], logs["shown"], 1)[0]
            last = line.iloc[-1]
            end = {"x": last["x"], "shown": last["shown"], "part": part}
            rows.append({**end, "slope": f"n^{slope:.1f}"})
    encoding = {**shared, "text": "slope:N"}
    texts = chart.marks("text", encoding, align="right", dx=-8, dy=-2, fontSize=10, aria=False)
    return [chart.with_data(pd.DataFrame(rows), texts)] if rows else []


def attention_dots(results: Results) -> Drawn | None:
    """Return time and peak of each implementation at the longest context with most of them."""
    peaks = chart.of_column("attention", "peak_allocated_bytes", scale=1 / GIB)
    shown, note, context = {}, "", None
    for unit, points in (("ms", chart.step_times("attention")), ("GiB", peaks)):
        cells = points(results)
        if len(cells):
            context = context or cell_names.fullest_context(cells, "attention")
            cells = cells[cells[LENGTH] == context]
            cells, note = cell_names.choose_slice(cells, results.axes, ["attention"])
            shown[unit] = cell_names.sort_by(cells, ("attention",))
    panels = []
    for unit, cells in shown.items():
        title = f"{'peak ' * (unit == 'GiB')}{unit}, context {context:,}"
        panels += [{**_dots(cells, unit), "title": title}] * (len(cells) > 1)
    bound = chart.bound_legend(pd.concat(shown.values())) if shown else ()
    return Drawn(panels, [*chart.legend("box", _KERNELS), *bound], note)


def _dots(cells: pd.DataFrame, unit: str) -> Panel:
    """Return a dot with its interval for each implementation of attention, on a logarithmic axis."""
    fused, separate = _KERNELS
    kinds = np.where(cells["attention"].isin(FUSED), fused, separate)
    data = cells.assign(scope=cell_names.scopes_of(cells, ["attention"]), kind=kinds)
    data = _mark_data(data, f" {unit}")
    order = list(data["attention"])
    scale, ticks = chart.log_scale(_numbers(data))
    axis = {"values": ticks, "format": chart.NUMBER_FORMAT}
    shared = {
        "x": chart.channel("shown:Q", title=unit, scale=scale, axis=axis),
        "y": chart.channel("attention:N", sort=order, title=None, axis={"labelLimit": 140}),
        "color": chart.colour_channel("kind:N", _KERNELS),
    }
    size = {"width": _WIDTHS[2], "height": max(15 * len(order), 60)}
    return chart.with_data(data, {"layer": _points(data, shared, "x"), **size})


def _numbers(points: pd.DataFrame) -> pd.Series[float]:
    """Return the values of points and the ends of their intervals."""
    values = points.filter(items=list(_NUMBERS)).to_numpy(dtype=float)
    return pd.Series(values.ravel()).dropna()


def over_commits(results: Results) -> Drawn | None:
    """Return time and peak of the same cells in runs of several commits, over those of the first.

    The cells are some of those in most runs, from the shortest step to the longest.
    """
    facts = results.cells.filter(items=["commit", "started_at", "host"])
    if RUN not in results.cells or len(facts.columns) < 3:
        return None
    peaks = chart.of_column("train_step", "peak_allocated_bytes", scale=1 / GIB)
    tables = {"step time, ms": chart.step_times("train_step"), "peak memory, GiB": peaks}
    points = pd.concat([of(results).assign(panel=title) for title, of in tables.items()])
    if points.empty:
        return None
    points = points.join(facts).assign(own=points["cell"].str.rpartition(":")[2])
    by_cell = points.groupby(["panel", "own"])
    points = points[by_cell["commit"].transform("nunique") > 1].sort_values("started_at")
    if points.empty:
        return None
    timed = points[points["panel"] == points["panel"].iloc[0]].sort_values("shown")
    counts = timed.groupby("own")[RUN].nunique()
    names = [own for own in dict.fromkeys(timed["own"]) if counts[own] == counts.max()]
    names = cell_names.evenly(names, MOST_COLOURS)
    points = points[points["own"].isin(names)].reset_index(drop=True)
    axes = [axis for axis in results.axes if axis != RUN]
    free = cell_names.free_axes(points, (NAME, LENGTH, *axes))
    texts = []
    for row in points.to_dict("records"):
        settings = [cell_names.setting_text(axis, row[axis]) for axis in free]
        texts.append(", ".join(settings) or row[NAME])
    runs = points[RUN] + " " + points["commit"].str[:7]
    values = points["shown"].map(number) + points["panel"].str.split(",").str[1]
    points = points.assign(
        x=runs,
        dash="",
        part=texts,
        scope=pd.Series(cell_names.scopes_of(points, free)) + ", " + runs + ", " + values,
    )
    numbers = points.columns.intersection(list(_NUMBERS))
    first = points.groupby(["panel", "own"])["shown"].transform("first")
    points[numbers] = points[numbers].astype(float).div(first, axis=0)
    # Runs are in the order of their first cells; a run that went on with another commit is two.
    points = points.iloc[points.groupby("x")["started_at"].transform("min").argsort(kind="stable")]
    of_names = dict(zip(points["own"], points["part"], strict=True))
    colours = colours_of("", list(map(of_names.get, names)))
    own = chart.of_column("", "")
    look = Lines(own, "× the first", "over the first", is_log=False, has_zero=False)
    drawn = look.draw(points, colours, list(tables), "run and commit, in order of time")
    hosts = points["host"].nunique()
    count = f"{counted(len(names), 'cell')} on {counted(hosts, 'host')}"
    note = ", ".join(filter(None, (count, cell_names.shared_settings(points, free))))
    return replace(drawn, note=note)
