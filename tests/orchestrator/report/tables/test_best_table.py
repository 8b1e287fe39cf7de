"""The table of `sweep best`, and its chart, from the rows of a run and what run.json has of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.results import Results, load_results
from orchestrator.planning.invocation import RunOptions
from orchestrator.report.charts.registry import PLOTS
from orchestrator.report.findings.registry import findings
from orchestrator.report.formats.terminal import Screen, table_text
from orchestrator.report.tables.registry import lay_out
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.support.fake_sweep import FakeScheduler, go, request_for

CONFIG = """
name: test
grids:
  - task: train_step
    axes: {size: [tiny, mini], attention: [naive, sdpa], optimizer: [course, fused]}
    fixed: {device: cpu, context_length: 16, batch_size: 4}
"""
GIB = 2**30
# By attention and optimizer: ms of a step and GiB of the peak.
MEASURED = {
    ("naive", "course"): (100, 4), ("naive", "fused"): (80, 5),
    ("sdpa", "course"): (50, 2), ("sdpa", "fused"): (40, 3),
}  # fmt: skip


def measured(attempt: Attempt, first: float = 1.0) -> Outcome:
    """Return the outcome of a cell. first: how many times as long the first attempt takes if naive."""
    values = attempt.cell.params.values()
    step_ms, gib = MEASURED[values["attention"], values["optimizer"]]
    if values["size"] == "mini" and values["attention"] == "naive":
        return Outcome(attempt, Status.OOM, "build", "", {}, {}, (), 1.7e9, 1.0)
    step_ms *= 2 if values["size"] == "mini" else 1
    if attempt.number == 1 and values["attention"] == "naive":
        step_ms *= first
    samples = [
        Sample("timing", "duration", "ms", step_ms + 0.01 * step, "synced", "step", step)
        for step in range(7)
    ]
    samples.append(
        Sample("memory", "peak_allocated_bytes", "bytes", gib * GIB, "steady", "backward")
    )
    facts = {"host": "one", "tokens": 64}
    return Outcome(attempt, Status.OK, "", "", {}, facts, tuple(samples), 1.7e9, 2.0)


def searched(
    write_config: Callable[..., Path],
    out: Path,
    left_out: Mapping[str, str],
    repeat: int = 1,
    first: float = 1.0,
) -> Results:
    """Return the results of a search that measured all but those cells of `tiny`, by the reason."""
    request = request_for(write_config(CONFIG), [], [], out)
    groups = []
    for size in ("tiny", "mini"):
        cells = [one for one in request.expansion.cells if one.params.values()["size"] == size]
        reasons = {
            one.id: left_out.get(str(one.params.values()["optimizer"]), "")
            if one.params.values()["attention"] == "naive" and size == "tiny"
            else ""
            for one in cells
        }
        groups.append({"default": cells[0].id, "candidates": reasons, "ended": "of little gain"})
    unmeasured = {cell for group in groups for cell, why in group["candidates"].items() if why}  # type: ignore[attr-defined]
    chosen = tuple(one for one in request.expansion.cells if one.id not in unmeasured)
    request = replace(request, expansion=replace(request.expansion, cells=chosen))
    go(request, FakeScheduler(partial(measured, first=first)), RunOptions(repeat=repeat))
    results = load_results(request.run)
    best = {"over": ["attention", "optimizer"], "groups": groups}
    return replace(results, manifest={**results.manifest, "best": best})


def rows_of(results: Results) -> list[dict[str, str]]:
    (page,) = lay_out(results, ["best"])
    columns = page.grid.columns
    count = len(columns[0].entries)
    return [{one.name: str(one.entries[row]) for one in columns} for row in range(count)]


def test_a_row_is_an_answer_with_what_each_option_adds(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    rows = rows_of(searched(write_config, tmp_path / "out", {"fused": "does not fit"}))
    assert [row["size"] for row in rows] == ["tiny", "mini"]
    tiny = rows[0]
    assert (tiny["attention"], tiny["optimizer"]) == ("sdpa", "fused")
    assert tiny["step ms"] == "40.03 [40.0, 40.1]"
    assert tiny["tokens/s"] == "1,599"
    assert tiny["× default"] == "2.50"
    assert tiny["peak GiB"] == "3.00"
    assert (tiny["measured"], tiny["candidates"]) == ("3", "4")
    # Of naive attention with this optimizer there is no time.
    assert tiny["each option adds"] == "optimizer=fused instead of course 1.25×"
    assert tiny["not measured"] == "1: does not fit"
    assert "rounds" not in tiny
    # Where the default ran out of memory, there is nothing to compare with.
    assert (rows[1]["× default"], rows[1]["not measured"]) == ("–", "2: little to gain")


def test_rounds_decide_the_ratio(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """The first attempts of naive attention took twice as long, which no number shows."""
    results = searched(write_config, tmp_path / "out", {}, repeat=4, first=2.0)
    tiny = rows_of(results)[0]
    assert (tiny["rounds"], tiny["× default"]) == ("3", "2.50")
    assert tiny["each option adds"].startswith("attention=sdpa instead of naive 2.00×")
    (found,) = [one for one in findings(results) if one.label == "best over default"]
    assert found.number == "2.50×"


def test_an_answer_of_many_axes_is_whole_in_a_file(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {})
    over = ["attention", "optimizer", "checkpointing", "precision", "batch_size"]
    best = {**results.manifest["best"], "over": over}
    results = replace(results, manifest={**results.manifest, "best": best})
    (page,) = lay_out(results, ["best"])
    lines = table_text(page, Screen(), None, "COMMAND").splitlines()
    assert max(map(len, lines)) <= 100
    (row,) = [line.split() for line in lines if line.startswith(" tiny")]
    assert row[:7] == ["tiny", "sdpa", "fused", "none", "fp32", "4", "40.03"]


def test_a_run_without_a_search_has_neither_table_nor_chart(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    results = searched(write_config, tmp_path / "out", {})
    plain = replace(results, manifest={})
    assert lay_out(plain, ["best"]) == []
    assert chart_of(plain) is None


def chart_of(results: Results) -> Any:
    (plot,) = (plot for plot in PLOTS if plot.name == "best")
    return plot.layout(results)


def test_the_chart_joins_what_no_candidate_beats(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    drawn = chart_of(searched(write_config, tmp_path / "out", {}))
    tiny, mini = drawn.panels
    assert "tiny" in tiny["title"]
    points = tiny["data"]["values"]
    speeds = {row["gib"]: row["speed"] for row in points}
    assert speeds == pytest.approx({4: 640, 5: 800, 2: 1280, 3: 1600}, rel=0.01)
    line, _ = tiny["layer"]
    assert [row["gib"] for row in line["data"]["values"]] == [3, 2]
    assert not any(row["hollow"] for row in points)
    assert len(mini["data"]["values"]) == 2
