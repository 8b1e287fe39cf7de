"""Live memory by role during a step: a chart of some cells, and curves that the page can zoom.

Memory is recorded at up to about 250 moments of a step. Both show the highest of the moments that
they merge, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB, MIB
from orchestrator.report.charts import chart
from orchestrator.report.charts.chart import Drawn, Panel
from orchestrator.report.charts.theme import light
from orchestrator.report.text.cell_names import NOT_SHOWN, cell_keys, free_axes, scopes_of
from orchestrator.report.text.numbers import rounded
from tasks.spec.tables import ROLES

_MOST_PANELS = 4
_CHART_POINTS = 100
_ALL_POINTS = 12_000  # moments of all cells on the page: 100 to 200 kB
_FEWEST_POINTS, _MOST_POINTS = 40, 250
_MOMENT = ["event", "at_ms", "phase"]
# As in the chart of the parts of a peak.
_COLOURS = {
    "parameters": "m1", "optimizer state": "m2", "gradients": "m3", "autocast weight copies": "m4",
    "communication buffers": "m5", "activations": "m6", "temporary": "m7", "buffers": "k3",
    "inputs": "k5", "workspace": "k4", "slack": "k6", "unlabelled": "k2",
}  # fmt: skip


def live_memory(results: Results) -> Drawn | None:
    """Return areas of live memory by role, for the cells that need most."""
    live = results.live()
    if live.empty:
        return None
    most = live.groupby(["cell", "event"])["live_bytes"].sum().groupby("cell").max()
    chosen = most.nlargest(_MOST_PANELS).index
    cells = results.cells.assign(key=cell_keys(results))
    cells = cells[cells["cell"].isin(live["cell"])]
    free = free_axes(cells, (axis for axis in results.axes if axis not in NOT_SHOWN))
    cells = cells.assign(scope=scopes_of(cells, free)).set_index("cell").loc[chosen]
    colours = role_colours(live)
    panels = []
    for cell, row in cells.iterrows():
        curves = _highest(live[live["cell"] == cell], _CHART_POINTS)
        panels.append({**_areas(curves, colours, f"#cell={row['key']}"), "title": row["scope"]})
    count = live["cell"].nunique()
    few = f"the {len(panels)} largest of {count} cells" if count > len(panels) else ""
    return Drawn(panels, chart.legend("box", colours), few)


def role_colours(live: pd.DataFrame) -> dict[str, str]:
    """Return the roles that occur, in their order, with their colours."""
    occurring = set(live["role"])
    return {role: _COLOURS[role] for role in ROLES if role in occurring}


def timelines(live: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return for each cell the moments in ms, the begin of each phase, and MiB by role."""
    found: dict[str, dict[str, Any]] = {}
    each = _ALL_POINTS // max(live["cell"].nunique(), 1)
    for cell, own in live.groupby("cell"):
        curves = _highest(own, min(max(each, _FEWEST_POINTS), _MOST_POINTS))
        begins = curves.reset_index().groupby("phase", sort=False)["at_ms"].min()
        mebibytes = curves.div(MIB).round(1)
        found[str(cell)] = {
            "at": curves.index.get_level_values("at_ms").to_numpy().round(4).tolist(),
            "phases": [[name, round(at, 4)] for name, at in begins.items() if name],
            "roles": {role: column.tolist() for role, column in mebibytes.items()},
        }
    return found


def _highest(live: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return the bytes of each role at most at `most` moments, the highest of their intervals."""
    # A pivot table has the same values, and takes three times as long.
    means = live.groupby([*_MOMENT, "role"], observed=True)["live_bytes"].mean()
    curves = means.unstack("role", fill_value=0)
    curves = curves[[role for role in ROLES if role in curves]]
    phases = curves.index.get_level_values("phase")
    begins = np.append(True, phases[1:] != phases[:-1])
    count = len(curves)
    spans = np.arange(count) * most // max(count, most) + np.cumsum(begins) * count
    total = curves.sum(axis=1).reset_index(drop=True)
    return curves.iloc[total.groupby(spans).idxmax()]


def _areas(curves: pd.DataFrame, colours: Mapping[str, str], href: str) -> Panel:
    # A stacked chart adds up rows of the same time, so that only the highest of them may remain.
    total = curves.sum(axis=1)
    order = total.sort_values(ascending=False, kind="stable").index
    highest = curves.loc[order].reset_index().drop_duplicates("at_ms").sort_values("event")
    highest = highest.assign(at=highest["at_ms"].round(3), href=href)
    roles = [role for role in colours if role in highest]
    long = highest.melt(["at", "phase", "href"], roles, "role", "bytes")
    peaks = long.groupby("role")["bytes"].transform("max") / GIB
    long = long.assign(
        gib=rounded(long["bytes"] / GIB),
        rank=long["role"].map(list(colours).index),
        label=long["role"] + ": at most " + peaks.map("{:.3g} GiB".format),
    )
    encoding = {
        "x": chart.channel("at:Q", title="ms into the step"),
        "y": chart.channel("gib:Q", title="GiB", stack="zero"),
        "color": chart.colour_channel("role:N", colours),
        "order": "rank:Q",
        "description": "label:N",
        "href": "href:N",
    }
    areas = chart.marks("area", encoding, interpolate="step-after")
    begins = highest[highest["phase"] != ""].groupby("phase")[["at"]].min().reset_index()
    rules = chart.marks("rule", {"x": "at:Q"}, strokeDash=[4, 3], aria=False, color=light("ink2"))
    words = {"x": "at:Q", "y": {"value": 2}, "text": "phase:N"}
    look = {"align": "left", "baseline": "top", "dx": 3, "fontSize": 10, "color": light("ink")}
    layers = [chart.with_data(long, areas), rules, chart.marks("text", words, **look, aria=False)]
    return chart.with_data(begins, {"layer": layers, "width": 380, "height": 180})
