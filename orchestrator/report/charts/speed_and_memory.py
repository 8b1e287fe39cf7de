"""The chart of `sweep best`: speed against peak memory, with the front that nothing beats in both."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.fastest import StoredSearch, stored_searches
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts import chart
from orchestrator.report.charts.chart import Drawn, LegendEntry, Panel
from orchestrator.report.charts.theme import light
from orchestrator.report.text.cell_names import NOT_SHOWN, cell_keys, free_axes, scopes_of
from orchestrator.report.text.numbers import number, rounded
from orchestrator.store.manifest import BEST
from tasks.spec.messages import assignments


def speed_and_memory(results: Results) -> Drawn | None:
    """Return a panel of points for each group of the last search, or None without peaks."""
    searches = [one for one in stored_searches(results) if one.winner]
    if not searches:
        return None
    over = results.manifest[BEST]["over"]
    cells = results.cells.assign(key=cell_keys(results))
    others = (axis for axis in results.axes if axis not in (*NOT_SHOWN, *over))
    named = cells.drop(columns=over)
    cells = cells.assign(scope=scopes_of(named, free_axes(named, others))).set_index("cell")
    panels = []
    for search in searches:
        points = _points(search, cells)
        if len(points) > 1:
            panels.append({**_panel(points), "title": points["group"].iloc[0]})
    chosen, few = chart.some_of(range(len(panels)), chart.MOST_PANELS, "groups")
    legend = [LegendEntry("full", "measured"), LegendEntry("hollow", "ended early")]
    return Drawn([panels[number] for number in chosen], legend, few)


def _points(search: StoredSearch, cells: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each measured candidate with a known peak."""
    front = [*search.measured[:1], *search.front(search.measured[0])]
    rows = []
    for one in search.measured:
        if one.speed and one.speed.peak_bytes and one.row:
            cell = cells.loc[one.row["cell"]]
            speed, gib = 1 / one.pace_s, one.speed.peak_bytes / GIB
            rows.append(
                {
                    "gib": gib,
                    "speed": speed,
                    "hollow": one.speed.is_beaten,
                    "front": one in front,
                    "group": cell["scope"],
                    "href": f"#cell={cell['key']}",
                    "label": f"{' '.join(assignments(one.options))}: {number(speed)} per s, "
                    f"{number(gib)} GiB",
                }
            )
    points = pd.DataFrame(rows, columns=list(rows[0]) if rows else ["group"])
    return points.assign(**{name: rounded(points[name]) for name in ("gib", "speed") if rows})


def _panel(points: pd.DataFrame) -> Panel:
    shared = {
        "x": chart.channel("gib:Q", title="peak, GiB", scale={"zero": True}),
        "y": chart.channel("speed:Q", title="tokens/s", scale={"zero": True}),
    }
    hollow = {"test": {"field": "hollow", "equal": True}, "value": light("bg")}
    encoding = {
        **shared,
        "fill": {"value": light("ink2"), "condition": hollow},
        "description": "label:N",
        "href": "href:N",
    }
    dots = chart.marks("point", encoding, size=36, strokeWidth=1.4, opacity=1, color=light("ink2"))
    line = chart.marks("line", shared, aria=False, color=light("ink2"), strokeWidth=1)
    on_front = points[points["front"]]
    layers = [chart.with_data(on_front, line), dots]
    return chart.with_data(points, {"layer": layers, "width": 380, "height": 180})
