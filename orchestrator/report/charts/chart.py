"""Parts that all charts share: values to show, panels, legends, scales, and the label of a mark."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import Row, each, has_value, is_null, ranks_text
from orchestrator.analysis.pairs import (
    BASE,
    COVERAGE,
    HIGH,
    LOW,
    MIN_COVERAGE,
    TIME,
    measured,
    pairs,
)
from orchestrator.analysis.results import Results
from orchestrator.report.charts.theme import FONT, light
from orchestrator.report.text.cell_names import NAME, cell_keys, evenly, names_of
from orchestrator.report.text.numbers import number

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


KEY = "key"  # column of RUN:ID of a cell
_IS_READ = re.compile(
    r"(cell|task|device|status|cpu_bound|busy_timed|mfu|step_(kernel_time_)?ms_.*|peak_allocated_bytes)$"
    r"|predicted_of_|busbw_gb_s$|link_peak_gb_s$|compute_ms$|exposed_.*_ms$|overlap_idle_ms$"
)
# Cells with the columns `shown`, `low` and `high`, and the name of their model.
Points = Callable[[Results], pd.DataFrame]
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


def interval_note(cells: pd.DataFrame) -> str:
    """Return how the intervals of cells with too few steps for 95% are to be read; else nothing."""
    if "low" not in cells or COVERAGE not in cells or not (cells[COVERAGE] < MIN_COVERAGE).any():
        return ""
    return "of fewer than 6 steps the bar is their range"


def bound_legend(cells: pd.DataFrame) -> tuple[LegendEntry, ...]:
    """Return the legend of filled and hollow points, if it is known what limits a cell."""
    if "cpu_bound" not in cells or cells["cpu_bound"].isna().all():
        return ()
    return (LegendEntry("full", "GPU-bound"), LegendEntry("hollow", "CPU-bound"))


def some_of(values: Iterable[Any], most: int, noun: str) -> tuple[list[Any], str]:
    """Return at most `most` of the distinct values, and a note if there are others."""
    known = list(dict.fromkeys(values))
    chosen = evenly(known, most)
    return chosen, f"{len(chosen)} of {len(known)} {noun}" if len(chosen) < len(known) else ""


def joined(*notes: str) -> str:
    """Return the notes that are not empty as one."""
    return "; ".join(filter(None, notes))


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


def with_data(rows: pd.DataFrame, layer: Layer) -> Layer:
    """Return a layer with the data of the fields that it shows; missing numbers become null.

    A layer without data has that of its panel.
    """
    shown = set(re.findall(r'"field": "(\w+)"', json.dumps(layer)))
    names = [name for name in rows if name in shown]
    # By column: a frame of objects takes two to eight times as long.
    lists = (rows[name].tolist() for name in names)
    columns = [[None if is_null(value) else value for value in values] for values in lists]
    records = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return {"data": {"values": records}, **layer}


# ---------------------------------------------------------------------- values that charts show


def of_column(
    task: str, column: str, interval: tuple[str, str] = ("", ""), scale: float = 1.0
) -> Points:
    """Return a function of the cells of a task with a positive number in a column."""

    def points(results: Results) -> pd.DataFrame:
        cells = measured(replace(results, cells=_named(results)), task, column)
        values = {"shown": column, "low": interval[0], "high": interval[1]}
        for name, source in values.items():
            if source in cells:
                cells = cells.assign(**{name: cells[source].astype(float) * scale})
        return cells

    return points


def step_times(task: str) -> Points:
    """Return a function of the step times of a task, with their intervals."""
    return of_column(task, TIME, (LOW, HIGH))


def bandwidths(results: Results) -> pd.DataFrame:
    """Return the collectives with their bus bandwidth, and the peak of their link as a rule."""
    cells = of_column("collectives", "busbw_gb_s")(results)
    cells = cells.assign(ranks=list(map(ranks_text, each(cells))))
    # `ranks` stands for two of these, and no collective depends on the third.
    cells = cells.drop(columns=["gpus", "processes", "precision"], errors="ignore")
    return cells.rename(columns={"link_peak_gb_s": "rule"})


def ratios(axis: str, base: str, others: tuple[str, ...]) -> Points:
    """Return a function of the speed-ups over the base value of an axis."""

    def points(results: Results) -> pd.DataFrame:
        cells = _named(results)
        cells = cells[cells["task"] == "train_step"]
        found = pairs(cells, results.axes, axis, (base, *others))
        if found.empty:
            return found
        found = found.merge(cells[["cell", KEY, NAME]], on="cell")
        # A pair may have no times, where only memory was measured.
        found = found[found["ratio"] > 0]
        is_known = found[["bound", "bound" + BASE]].notna().all(axis=1)
        is_bound = found["is_cpu_bound"].astype("boolean").where(is_known)
        return found.rename(columns={"ratio": "shown"}).assign(cpu_bound=is_bound)

    return points


def _named(results: Results) -> pd.DataFrame:
    cells = results.cells
    if "task" not in cells:
        return cells.assign(**{"task": "", NAME: "", KEY: ""}).iloc[:0]
    # Of several hundred columns only these are read, and choosing rows copies all of them.
    chosen = [name for name in cells if name in results.axes or _IS_READ.match(str(name))]
    return cells[chosen].assign(**{NAME: names_of(cells), KEY: cell_keys(results)})
