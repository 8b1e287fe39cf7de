"""The heat map and the map of what fits: each cell says what was measured there."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.page.sections import fit_panels
from orchestrator.report.text.heat_map import HeatMap, heat_map, shade_of
from orchestrator.report.text.numbers import number
from tests.orchestrator.report.findings.test_findings import results_of, step


def out_of_memory(phase: str, **values: Any) -> dict[str, Any]:
    return {**step(float("nan"), **values), "status": "oom", "phase": phase, "cpu_bound": None}


@pytest.fixture
def grid() -> HeatMap:
    cells = [
        step(100, size=size, precision=precision, context_length=length, cpu_bound=size == "small")
        for size in ("small", "xl") for precision in ("fp32", "bf16") for length in (128, 256)
    ]  # fmt: skip
    cells[0] = step(50, size="small", context_length=128, cpu_bound=True)
    cells[-1] = out_of_memory("backward", size="xl", precision="bf16", context_length=256)
    cells.append(step(10, size="xl", context_length=128, compile="blocks"))
    found = heat_map(results_of(*cells))
    assert found is not None
    return found


def test_the_heat_map_has_models_contexts_and_precisions_in_their_order(grid: HeatMap) -> None:
    assert (grid.panels, grid.rows, grid.columns) == (
        ["fp32", "bf16"], ["small", "xl"], ["128", "256"],
    )  # fmt: skip
    assert [switch.axis for switch in grid.switches] == ["compile"]
    assert grid.switches[0].options == [("eager", "eager"), ("blocks", "compiled")]
    assert [measure.name for measure in grid.measures] == ["step", "speed"]
    assert grid.has_failures
    assert grid.is_bound_known


def test_a_cell_of_the_heat_map_is_labelled_marked_and_linked(grid: HeatMap) -> None:
    first = grid.first_view((0, 0, 0))
    assert (first.text, first.style, first.key) == ("50.0", "cpu", "mine:id0")
    assert first.label == (
        "small, context 128, fp32, eager, training step: 50.0 ms per step, CPU-bound"
    )
    failed = grid.first_view((1, 1, 1))
    assert (failed.text, failed.style, failed.shade) == ("bwd", "bad", 0)
    assert failed.label.endswith(": out of memory in backward")


def test_the_map_holds_what_every_switch_shows(grid: HeatMap) -> None:
    assert len(grid.views) == 9
    assert grid.views["0,1,0,blocks"]["step"].text == "10.0"
    assert grid.views["1,0,0,eager"]["speed"].text == "0.50×"
    assert grid.views["0,0,0,eager"]["step"].shade < grid.views["0,0,1,eager"]["step"].shade


def test_there_is_no_switch_with_one_option() -> None:
    cells = [step(100, context_length=length, memory_limit_gib=None) for length in (128, 256)]
    cells.append(out_of_memory("forward", context_length=512, memory_limit_gib=1.0))
    found = heat_map(results_of(*cells))
    assert found is not None
    assert (found.switches, found.columns) == ([], ["128", "256"])


def run_of(*cells: dict[str, Any], axes: tuple[str, ...]) -> Results:
    """Return results with further axes."""
    results = results_of(*cells)
    return replace(results, axes=(*results.axes, *axes))


def test_axes_of_timing_are_columns_or_a_switch_so_that_no_cell_mixes_them() -> None:
    counts = (0, 1, 2, 5)
    cells = [
        step(100 + steps, size=size, warmup_steps=steps) for size in ("small", "xl") for steps in counts
    ]  # fmt: skip
    found = heat_map(run_of(*cells, axes=("warmup_steps",)))
    assert found is not None
    assert (found.column_title, found.columns) == ("warmup steps", ["0", "1", "2", "5"])
    assert [found.first_view((0, 1, column)).text for column in range(4)] == [
        "100",
        "101",
        "102",
        "105",
    ]
    longer = [{**cell, "context_length": 1024} for cell in cells]
    found = heat_map(run_of(*cells, *longer, axes=("warmup_steps",)))
    assert found is not None
    assert found.columns == ["512", "1,024"]
    (switch,) = found.switches
    assert (switch.axis, switch.options[0]) == ("warmup_steps", ("5", "5"))
    assert {found.first_view((0, row, column)).text for row in (0, 1) for column in (0, 1)} == {
        "105"
    }
    assert found.first_note == "training step, eager, warmup steps 5"


def test_cells_of_other_runs_have_the_timing_of_the_main_run_and_name_their_run() -> None:
    cells = [step(100, context_length=n, run="full", warmup_steps=5) for n in (128, 256, 512)]
    cells.append(step(40, context_length=1024, run="cold", warmup_steps=0))
    cells.append(step(90, context_length=2048, run="other", warmup_steps=5))
    peak_only = step(float("nan"), context_length=4096, run="peaks", warmup_steps=1)
    cells.append({**peak_only, "peak_allocated_bytes": 2.0 * GIB})
    found = heat_map(run_of(*cells, axes=("warmup_steps", "run")))
    assert found is not None
    assert found.columns == ["128", "256", "512", "2,048", "4,096"]  # no time of a cold step
    assert found.note.endswith("warmup steps 5, run full, and 2 cells of other, peaks")
    assert found.first_view((0, 0, 3)).label == (
        "small, context 2,048, run other, fp32, eager, training step: 90.0 ms per step"
    )


def test_arguments_of_a_model_are_rows_columns_panels_and_switches() -> None:
    names = ("model_args.n_experts", "model_args.width", "model_args.depth", "model_args.bias")
    cells = []
    for experts, width, depth, bias in product((1, 2, 4), (16, 32), (3, 6), (True, False)):
        values = dict(zip(names, (experts, width, depth, bias), strict=True))
        cells.append(
            step(1000 * experts + 10 * width + depth, size=None, model="gpt:GPT", **values)
        )
    found = heat_map(run_of(*cells, axes=("model", *names)))
    assert found is not None
    assert (found.row_title, found.rows) == ("n_experts", ["1", "2", "4"])
    assert (found.column_title, found.columns) == ("width", ["16", "32"])
    assert found.panels == ["depth 3", "depth 6"]
    assert [(switch.axis, switch.is_labelled) for switch in found.switches] == [
        ("model_args.bias", True)
    ]
    assert len(found.views) == 24  # no cell stands for another
    shown = found.first_view((1, 2, 0))
    assert shown.text == number(4166)
    assert "gpt:GPT n_experts=4 width=16 depth=6 bias=" in shown.label


def test_the_map_says_which_values_it_leaves_out() -> None:
    cells = [step(n, size=None, model="gpt:GPT", **{"model_args.width": n}) for n in range(1, 21)]
    found = heat_map(run_of(*cells, axes=("model", "model_args.width")))
    assert found is not None
    assert len(found.columns) == 8
    assert found.note.endswith("8 of 20 values of width")


@pytest.mark.parametrize(
    ("value", "ends", "is_log", "shade"),
    [(1, (1, 100), True, 6), (100, (1, 100), True, 100), (10, (1, 100), True, 53),
     (50, (0, 100), False, 53), (5, (5, 5), False, 6), (1000, (0, 100), False, 100)],
)  # fmt: skip
def test_a_shade_is_the_position_of_a_value(
    value: float, ends: tuple[float, float], is_log: bool, shade: int
) -> None:
    assert shade_of(value, ends, is_log) == shade


def test_a_run_of_one_cell_or_of_failures_alone() -> None:
    assert heat_map(results_of(step(10))) is None
    failed = [{**step(math.nan, context_length=n), "status": "crashed"} for n in (128, 256)]
    found = heat_map(results_of(*failed))
    assert found is not None
    assert [found.first_view((0, 0, column)).text for column in (0, 1)] == ["crashed", "crashed"]
    assert not found.has_failures  # of memory


def test_the_fit_map_has_the_smallest_limit_that_runs_and_the_peak_without_one() -> None:
    def cell(limit: float | None, gib: float | None, **values: Any) -> dict[str, Any]:
        values |= {"size": "xl", "memory_limit_gib": limit}
        if gib is None:
            return out_of_memory("forward", **values)
        return step(10, peak_allocated_bytes=gib * GIB, **values)

    cells = [
        *(cell(limit, 20.0, context_length=128) for limit in (24.0, 40.0, None)),
        cell(24.0, None, context_length=256), cell(40.0, 30.0, context_length=256),
        cell(24.0, None, context_length=512), cell(40.0, None, context_length=512),
        cell(None, 50.0, context_length=512),
        cell(24.0, None, context_length=1024),
    ]  # fmt: skip
    (panel,) = fit_panels(results_of(*cells))
    assert (panel.title, panel.columns) == ("fp32", ["128", "256", "512", "1,024"])
    ((name, found),) = panel.rows
    assert name == "xl"
    assert [(one.limit, one.peak, one.style) for one in found] == [
        ("24", "20.0", "f0"), ("40", "30.0", "f3"), ("over 40", "50.0", "f4"),
        ("out of memory", "", "bad"),
    ]  # fmt: skip
    assert found[0].key == "mine:id0"


def test_without_limits_there_is_no_fit_map() -> None:
    assert fit_panels(results_of(step(10), step(20, context_length=128))) == []


def test_peaks_may_be_of_a_nullable_type_if_no_cell_has_a_resident_set() -> None:
    # Several runs that are read together have such columns, and pandas warns if types do not fit.
    peaks = {"peak_allocated_bytes": 2.0 * GIB}
    cells = [step(100, context_length=length, **peaks) for length in (128, 256)]
    results = results_of(*cells, out_of_memory("forward", context_length=512))
    nullable = results.cells.astype({"peak_allocated_bytes": "Float64"})
    found = heat_map(replace(results, cells=nullable))
    assert found is not None
    assert found.first_view((0, 0, 0), "peak").text == "2.00"
