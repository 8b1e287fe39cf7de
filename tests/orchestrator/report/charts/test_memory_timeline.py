"""Live memory by role: the curves that the page zooms hold every peak, and have a budget."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.common.units import GIB, MIB
from orchestrator.report.charts.memory_timeline import live_memory, role_colours, timelines
from orchestrator.store.run import Run
from tasks.spec.tables import ROLES
from tests.conftest import ROOT

# One worker makes what these tests share.
pytestmark = pytest.mark.xdist_group("timeline")


@pytest.fixture(scope="module")
def measured() -> Results:
    """Cells of an H200, four of which recorded a snapshot."""
    return load_results(Run(ROOT / "tests" / "data" / "h200_cells"))


def test_a_curve_holds_the_peak_of_every_phase(measured: Results) -> None:
    live = measured.live()
    found = timelines(live)
    assert set(found) == set(live["cell"])
    for cell, own in live.groupby("cell"):
        curve: Any = found[str(cell)]
        totals = pd.DataFrame(curve["roles"]).sum(axis=1)
        assert len(curve["at"]) == len(totals) <= 250
        assert curve["at"] == sorted(curve["at"])
        by_moment = own.groupby(["event", "at_ms", "phase"], as_index=False)["live_bytes"].sum()
        assert totals.max() == pytest.approx(by_moment["live_bytes"].max() / MIB, abs=0.5)
        begins = dict(curve["phases"])
        for phase, moments in by_moment[by_moment["phase"] != ""].groupby("phase"):
            assert begins[phase] >= moments["at_ms"].min() - 1e-3
            peak = moments["live_bytes"].max() / MIB
            assert (totals - peak).abs().min() < 0.5


def test_the_curves_of_many_cells_have_fewer_moments(measured: Results) -> None:
    live = measured.live()
    many = pd.concat([live.assign(cell=live["cell"] + str(n)) for n in range(50)])
    few, lots = timelines(live), timelines(many)
    assert max(len(curve["at"]) for curve in lots.values()) < 80  # type: ignore[arg-type]
    assert len(json.dumps(lots)) < 50 * len(json.dumps(few)) / 2
    for name, curve in few.items():
        sums = [
            max(map(sum, zip(*one["roles"].values(), strict=True)))
            for one in (curve, lots[f"{name}7"])
        ]  # type: ignore[attr-defined]
        assert sums[0] == pytest.approx(sums[1])


def test_the_chart_has_the_cells_that_need_most_and_links_to_them(measured: Results) -> None:
    chart = live_memory(measured)
    assert chart is not None
    assert [entry.text for entry in chart.legend] == list(role_colours(measured.live()))
    peaks = []
    for panel in chart.panels:
        rows = pd.DataFrame(panel["layer"][0]["data"]["values"])  # type: ignore[index]
        peaks.append(rows.groupby("at")["gib"].sum().max())
        assert rows["href"].str.fullmatch("#cell=.*:[0-9a-f]{12}").all()
        assert rows["label"].str.contains("at most .* GiB").all()
    assert peaks == sorted(peaks, reverse=True)
    live = measured.live()
    most = live.groupby(["cell", "event"])["live_bytes"].sum().max() / GIB
    assert peaks[0] == pytest.approx(most, rel=1e-3)


def test_every_role_has_a_colour_of_its_own() -> None:
    every = pd.DataFrame({"role": list(ROLES)})
    colours = role_colours(every)
    assert list(colours) == list(ROLES)
    assert len(set(colours.values())) == len(ROLES)
