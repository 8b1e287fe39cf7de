"""Parts that all charts share: panels, legends, scales, and the label of a mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import Row, has_value
from orchestrator.analysis.results import Results
from orchestrator.report.charts.theme import FONT, light
from orchestrator.report.text.cell_names import axis_title
from orchestrator.report.text.numbers import number
from orchestrator.report.text.slices import axis_values, evenly

# Parts of Vega-Lite: https://vega.github.io/vega-lite/docs
Channel = Mapping[str, object]
Layer = dict[str, object]
Panel = dict[str, object]
_TYPES = {"N": "nominal", "Q": "quantitative"}
MOST_PANELS = 12
NUMBER_FORMAT = ",~g"  # 0.5, 20 and 2,000
CONFIG: dict[str, object] = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": light("ink2"),
        "labelFontSize": 11,
        "titleColor": light("ink2"),
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "gridColor": light("rule"),
        "domainColor": light("rule2"),
        "ticks": False,
        "labelPadding": 4,
    },
    "title": {
        "anchor": "start",
        "frame": "group",
        "color": light("ink"),
        "fontSize": 12,
        "fontWeight": 600,
        "subtitleColor": light("ink2"),
        "subtitleFontSize": 11,
    },
    "legend": {"title": None, "orient": "top", "labelColor": light("ink2")},
    "concat": {"spacing": 14},
}
# The legend of a panel is text of the page.
PANEL_CONFIG: dict[str, object] = {**CONFIG, "legend": {"disable": True}}


@dataclass(frozen=True)
class LegendEntry:
    """One entry of a legend. mark: line, dash, box, full or hollow. colour: a name in COLOURS."""

    mark: str
    text: str
    colour: str = "ink2"


def legend(mark: str, colours: Mapping[str, str]) -> list[LegendEntry]:
    """Return one entry for each value or part, in its colour."""
    return list(map(LegendEntry, repeat(mark), colours, colours.values()))


@dataclass(frozen=True)
class Drawn:
    """A chart as panels.

    note: what all marks share. columns: panels in a row on a wide page. across: the axis over which
    a value is shown, for the title.
    """

    panels: Sequence[Panel]
    legend: Sequence[LegendEntry] = ()
    note: str = ""
    columns: int = 2
    across: str = ""


# Turns results into a chart, or into None if they have too little to show.
ChartLayout = Callable[[Results], Drawn | None]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: the fewer of each decade, the more decades it has."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1, 2, 5) if decades <= 4 else (1,)
    if decades < 1:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    ticks = np.outer(10.0 ** np.arange(first, last + 1), steps).ravel()
    return [float(tick) for tick in ticks if low <= tick <= high]


def log_scale(values: pd.Series[float]) -> tuple[dict[str, object], list[float]]:
    """Return a logarithmic scale that holds all values, and its ticks."""
    low, high = float(values.min()) / 1.15, float(values.max()) * 1.15
    return {"type": "log", "domain": [low, high], "nice": False}, log_ticks(low, high)


def mark_label(row: Row, unit: str) -> str:
    """Return what a mark shows: its cell, the value, its interval, and what limits the cell.

    The row has the settings of the cell as `scope`.
    """
    text = f"{row['scope']}: {number(row['shown'])}{unit}"
    if has_value(row, "low") and has_value(row, "high"):
        text += f" [{number(row['low'])} to {number(row['high'])}]"
    if has_value(row, "cpu_bound"):
        text += ", CPU-bound" if row["cpu_bound"] else ", GPU-bound"
    return text


def bound_legend(cells: pd.DataFrame) -> tuple[LegendEntry, ...]:
    """Return the legend of filled and hollow points, if it is known what limits a cell."""
    if "cpu_bound" not in cells or cells["cpu_bound"].isna().all():
        return ()
    return (LegendEntry("full", "GPU-bound"), LegendEntry("hollow", "CPU-bound"))


def some_of(axis: str, cells: pd.DataFrame, most: int) -> tuple[list[Any], str]:
    """Return at most `most` values of an axis, and a note if there are others."""
    values = axis_values(axis, cells)
    chosen = evenly(values, most)
    few = len(chosen) < len(values)
    return chosen, f"{len(chosen)} of {len(values)} values of {axis_title(axis)}" if few else ""


def data_of(rows: pd.DataFrame, columns: Sequence[str]) -> list[dict[Any, Any]]:
    """Return the columns as data of a chart; missing numbers become null."""
    own = rows.filter(items=list(dict.fromkeys(columns))).astype(object)
    return own.where(own.notna(), None).to_dict("records")


def channel(shorthand: str, **properties: object) -> Channel:
    """Return what a channel encodes: a field and its type, such as `value:Q` or `part:N`."""
    field, _, letter = shorthand.partition(":")
    return {"field": field, "type": _TYPES[letter], **properties}


def colour_channel(shorthand: str, colours: Mapping[str, str]) -> Channel:
    """Return the channel of a field whose values have given names of colours."""
    scale = {"domain": list(colours), "range": list(map(light, colours.values()))}
    return channel(shorthand, scale=scale)


def marks(mark: str, encoding: Mapping[str, object], **properties: object) -> Layer:
    """Return a layer of marks. encoding: a text is the shorthand of a channel."""
    channels = {}
    for name, value in encoding.items():
        channels[name] = channel(value) if isinstance(value, str) else value
    return {"mark": {"type": mark, **properties}, "encoding": channels}


def with_data(rows: Sequence[Mapping[Any, Any]], layer: Layer) -> Layer:
    """Return a layer with its own data. Other layers have that of their panel."""
    return {"data": {"values": rows}, **layer}
