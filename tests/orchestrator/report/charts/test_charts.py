"""Charts: which cells they choose, what their marks show, and how a drawing gets onto the page."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.bars import kernel_classes, longest_kernels, memory_parts
from orchestrator.report.charts.chart import log_ticks
from orchestrator.report.charts.registry import PLOTS, drawn_figures
from orchestrator.report.charts.theme import COLOURS, with_variables
from orchestrator.report.text.cell_names import choose_slice, evenly

NO_ROWS = pd.DataFrame(columns=["cell", "attempt", "name", "total_ns", "steps"])
AXES = ("size", "context_length", "precision", "compile", "attention", "pass", "batch_size", "run")


def cells_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """Return measured steps; a row has the values that differ from the usual ones."""
    usual = {
        "task": "train_step", "status": "ok", "device": "cuda", "size": "small",
        "context_length": 128, "precision": "fp32", "compile": "eager", "attention": "naive",
        "pass": "train_step", "batch_size": 4, "cpu_bound": False, "step_ms_median": 100.0,
    }  # fmt: skip
    frame = pd.DataFrame([{"cell": f"c{n}", **usual, **row} for n, row in enumerate(rows)])
    low, high = frame["step_ms_median"] * 0.9, frame["step_ms_median"] * 1.1
    frame = frame.assign(step_ms_ci_low=low, step_ms_ci_high=high, attempt=1)
    return frame.assign(cpu_bound=frame["cpu_bound"].astype("boolean"))


def results_of(*rows: dict[str, Any], **tables: pd.DataFrame) -> Results:
    frame = cells_of(*rows)
    axes = tuple(axis for axis in AXES if axis in frame)
    return Results(frame, axes, {"name": "r"}, lambda name: tables.get(name, NO_ROWS))


def drawn(name: str, results: Results) -> Any:
    (plot,) = (plot for plot in PLOTS if plot.name == name)
    return plot.layout(results)


def values_of(panel: Any) -> list[dict[str, Any]]:
    """Return the data of the marks with labels."""
    (layer,) = (layer for layer in panel["layer"] if "href" in layer.get("encoding", ()))
    return list(layer.get("data", panel.get("data"))["values"])


def test_a_slice_has_usual_values_and_the_run_with_most_cells() -> None:
    rows = [{"run": "full", "context_length": n} for n in (128, 256, 512)]
    rows += [{"run": "again", "context_length": n} for n in (128, 256)]
    rows += [{"run": "full", "context_length": n, "compile": "blocks"} for n in range(8)]
    rows += [{"run": "full", "context_length": 128, "batch_size": 8}]
    chosen, note = choose_slice(cells_of(*rows), AXES, ["context_length"])
    assert set(chosen["run"]) == {"full"}
    assert list(chosen["context_length"]) == [128, 256, 512]
    assert note == "training step, fp32, eager, batch 4, naive attention, run full"


def test_few_of_many_values_have_the_first_and_the_last() -> None:
    assert evenly([1, 2, 3], 4) == [1, 2, 3]
    assert evenly(list(range(100)), 5) == [0, 25, 50, 74, 99]


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [((0.5, 4.2), [1.0, 1.5, 2.0, 3.0, 4.0]), ((40, 2500), [50, 100, 200, 500, 1000, 2000]),
     ((1, 1e6), [1, 10, 100, 1e3, 1e4, 1e5, 1e6])],
)  # fmt: skip
def test_a_logarithmic_axis_has_round_ticks(ends: tuple[float, float], ticks: list[float]) -> None:
    found = [tick for tick in log_ticks(*ends) if tick >= 1]
    assert found == pytest.approx(ticks)


def test_a_colour_that_two_variables_share_is_the_same_in_both_themes() -> None:
    themes = defaultdict(set)
    for light, dark in COLOURS.values():
        themes[light].add(dark)
    assert all(len(dark) == 1 for dark in themes.values())
    assert with_variables('fill="#6b7178" stroke="#123456"') == (
        'fill="var(--fp32)" stroke="#123456"'
    )


def test_lines_have_a_point_for_each_cell_with_a_label_and_a_link() -> None:
    rows = [
        {"size": size, "context_length": n, "precision": precision, "step_ms_median": ms,
         "cpu_bound": size == "small"}
        for size, ms in (("small", 97.6), ("xl", 1593.0))
        for n in (128, 512)
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    chart = drawn("step-time", results_of(*rows))
    assert [panel["title"] for panel in chart.panels] == ["small", "xl"]
    assert [entry.text for entry in chart.legend] == ["fp32", "bf16", "GPU-bound", "CPU-bound"]
    points = values_of(chart.panels[0])
    assert len(points) == 4
    assert points[3]["label"] == (
        "small, context 512, bf16, eager, training step: 97.6 ms [87.8 to 107], CPU-bound"
    )
    assert (points[3]["href"], points[3]["hollow"]) == ("#cell=r:c3", True)
    assert not any(point["hollow"] for point in values_of(chart.panels[1]))


def test_lines_need_two_points() -> None:
    assert drawn("step-time", results_of({"size": "small"})) is None
    sizes = drawn("step-time", results_of({"size": "xl"}, {"size": "small"}))
    (panel,) = sizes.panels
    assert sizes.across == "model"
    assert "range" not in sizes.note
    few = {"step_ms_coverage": 0.75}
    short = drawn("step-time", results_of({"size": "xl", **few}, {"size": "small", **few}))
    assert "of fewer than 6 steps the bar is their range" in short.note
    assert [point["x"] for point in values_of(panel)] == ["small", "xl"]


def with_axes(results: Results, *axes: str) -> Results:
    return replace(results, axes=(*results.axes, *axes))


def test_arguments_of_a_model_are_the_axes_of_a_chart() -> None:
    names = ("model_args.depth", "model_args.width", "model_args.bias")
    rows = []
    for depth, width, bias in product((1, 2, 4), (16, 64), (True, False)):
        values = dict(zip(names, (depth, width, bias), strict=True))
        own = {"size": None, "model": "gpt:GPT", "attention": None}
        rows.append({**own, "step_ms_median": 10.0 * depth, **values})
    chart = drawn("step-time", with_axes(results_of(*rows), "model", *names))
    assert chart.across == "depth"
    assert [entry.text for entry in chart.legend[:2]] == ["width 16", "width 64"]
    assert [panel["title"] for panel in chart.panels] == ["bias False", "bias True"]
    points = values_of(chart.panels[0])
    assert [point["x"] for point in points] == [1, 1, 2, 2, 4, 4]
    assert "gpt:GPT depth=1 width=16 bias=False," in points[0]["label"]
    assert "naive" not in chart.note  # a model of the user has its own attention


def test_a_chart_counts_the_cells_that_have_no_place_on_its_axis() -> None:
    rows = [{"size": None, "model": "gpt:GPT", "model_args.depth": n} for n in (None, 1, 2)]
    chart = drawn("step-time", with_axes(results_of(*rows), "model", "model_args.depth"))
    assert chart.note.endswith("1 cell without depth left out")
    assert len(values_of(chart.panels[0])) == 2


def test_contexts_are_where_their_logarithms_are() -> None:
    lengths = (256, 1024, 4096, 8192, 16384)
    rows = [
        {"task": "attention", "size": None, "context_length": n, "step_ms_median": (n / 256) ** 2}
        for n in lengths
    ]
    chart = drawn("attention-scaling", results_of(*rows))
    (panel,) = chart.panels
    x = panel["layer"][0]["encoding"]["x"]
    assert (x["type"], x["scale"]["type"]) == ("quantitative", "log")
    assert x["axis"]["values"] == list(lengths)
    assert x["axis"]["labelOverlap"]  # ticks without room are left out
    assert chart.note.startswith("log scales; ")
    assert "n^2.0" in json.dumps(panel)


def test_steps_without_warm_up_are_on_a_linear_axis() -> None:
    rows = [
        {"size": size, "warmup_steps": steps, "step_ms_median": 100.0 - steps}
        for size in ("small", "xl")
        for steps in (0, 1, 5)
    ]
    chart = drawn("step-time", with_axes(results_of(*rows), "warmup_steps"))
    assert chart.across == "warmup steps"
    assert chart.panels[0]["layer"][0]["encoding"]["x"]["scale"]["type"] == "linear"
    assert chart.note.startswith("log scale upwards; ")


def of_commits(times: dict[str, tuple[float, ...]], **values: Any) -> Results:
    """Return the step times of cells, by id, in runs of one commit each, the latest first."""
    rows = []
    for number, run in reversed(list(enumerate(("old", "new", "newest")))):
        for cell, ms in times.items():
            if number < len(ms):
                rows.append(
                    {"cell": f"{run}:{cell}", "run": run, "size": cell, "host": "h", **values,
                     "step_ms_median": ms[number], "cpu_bound": cell == "small",
                     "commit": f"{number}bcdef01234", "started_at": pd.Timestamp(2026, 1, 1 + number)}
                )  # fmt: skip
    return results_of(*rows)


def test_the_same_cells_are_lines_over_commits_in_the_order_of_time() -> None:
    times = {"xl": (200.0, 210.0, 190.0), "small": (10.0, 10.0, 12.0), "medium": (50.0,)}
    chart = drawn("commits", of_commits(times, peak_allocated_bytes=2.0 * GIB))
    assert [panel["title"] for panel in chart.panels] == ["step time, ms", "peak memory, GiB"]
    assert [entry.text for entry in chart.legend] == ["small", "xl", "GPU-bound", "CPU-bound"]
    points = values_of(chart.panels[0])
    assert chart.panels[0]["layer"][0]["encoding"]["x"]["sort"] == [
        "old 0bcdef0", "new 1bcdef0", "newest 2bcdef0",
    ]  # fmt: skip
    found = {(one["part"], one["x"].split()[0]): one for one in points}
    assert len(points) == 6  # a cell of one commit has no line
    large = found["xl", "new"]
    assert (large["shown"], large["low"], large["high"]) == (1.05, 0.945, 1.155)
    assert "new 1bcdef0, 210 ms: 1.05× the first [0.945 to 1.16], GPU-bound" in large["label"]
    assert found["small", "newest"]["hollow"]
    assert chart.note == ("2 cells on 1 host, training step, fp32, eager, batch 4, naive attention")
    assert drawn("commits", of_commits({"xl": (200.0,)})) is None
    collectives = of_commits(times, task="collectives")  # no cell that the chart is about
    assert drawn("commits", collectives) is None


def test_at_most_six_cells_are_lines_over_commits() -> None:
    times = {f"s{n:02}": (10.0 + n, 10.0 + n) for n in range(20)}
    chart = drawn("commits", of_commits(times))
    names = [entry.text for entry in chart.legend if entry.mark == "line"]
    assert (len(names), names[0], names[-1]) == (6, "s00", "s19")


def test_the_speed_up_of_compiling_is_a_ratio_with_an_interval() -> None:
    rows = [
        {"context_length": n, "compile": scope, "step_ms_median": ms}
        for n in (128, 512)
        for scope, ms in (("eager", 100.0), ("blocks", 50.0))
    ]
    chart = drawn("compile-speed-up", results_of(*rows))
    for point in values_of(chart.panels[0]):
        assert (point["shown"], point["low"], point["high"]) == (2.0, 1.6364, 2.4444)
    eager = [row for row in rows if row["compile"] == "eager"]
    assert drawn("compile-speed-up", results_of(*eager)) is None


def test_the_speed_up_of_a_precision_has_a_panel_for_each_size_with_one_scale() -> None:
    rows = [
        {"size": size, "context_length": n, "precision": precision, "step_ms_median": ms}
        for size in ("xl", "small")
        for n in (512, 128)
        for precision, ms in (("fp32", 100.0), ("bf16", 25.0))
    ]
    chart = drawn("precision-speed-up", results_of(*rows))
    assert [panel["title"] for panel in chart.panels] == ["small", "xl"]
    for panel in chart.panels:
        points = values_of(panel)
        assert [(one["x"], one["part"], one["shown"]) for one in points] == [
            (128, "bf16", 4.0), (512, "bf16", 4.0),
        ]  # fmt: skip
    scales = {json.dumps(panel["layer"][1]["encoding"]["y"]["scale"]) for panel in chart.panels}
    assert len(scales) == 1  # so that panels can be compared
    assert "as fast as in fp32" in [one.text for one in chart.legend if one.mark == "dash"]


def kernel(cell: str, name: str, ms: float, of: str = "GEMM") -> dict[str, Any]:
    return {"cell": cell, "attempt": 1, "phase": "forward", "kernel_class": of, "operator": "",
            "name": name, "total_ns": 2e6 * ms, "steps": 2, "count": 6}  # fmt: skip


def test_bars_of_kernels_add_up_to_the_kernel_time_of_the_longest_context() -> None:
    rows = [{"context_length": n, "precision": p} for n in (128, 512) for p in ("bf16", "fp32")]
    kernels = pd.DataFrame(
        [*(kernel(f"c{n}", "sgemm", 10.0 + n) for n in range(4)),
         kernel("c2", "odd", 1.0, "unknown"), kernel("c2", "exp", 2.0, "softmax")]
    )  # fmt: skip
    results = results_of(*rows, kernels=kernels)
    (panel,) = kernel_classes(results).panels  # type: ignore[union-attr]
    assert panel["title"] == "small, context 512"
    bars = values_of(panel)
    order = panel["layer"][0]["encoding"]["y"]["sort"]
    assert order == ["fp32 eager", "bf16 eager"]
    own = {bar["part"]: bar["value"] for bar in bars if bar["variant"] == "bf16 eager"}
    assert own == {"matrix products": 12.0, "other": 1.0, "softmax and attention": 2.0}
    first, last = longest_kernels(results).panels  # type: ignore[union-attr]
    assert (first["title"], last["title"]) == ("small, fp32 eager", "small, bf16 eager")
    assert [bar["label"] for bar in values_of(last)] == [
        "sgemm: 12.0 ms in 6 launches", "exp: 2.00 ms in 6 launches", "odd: 1.00 ms in 6 launches",
    ]  # fmt: skip
    on_cpu = results_of(*({**row, "device": "cpu"} for row in rows), kernels=kernels)
    first, _ = longest_kernels(on_cpu).panels  # type: ignore[union-attr]
    assert values_of(first)[0]["label"].endswith("ms in 6 calls")


def test_a_long_name_of_a_kernel_ends_in_an_ellipsis() -> None:
    names = (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8",
        "void cutlass::Kernel2<A, B>",
    )
    kernels = pd.DataFrame([kernel("c0", name, 10.0 - n) for n, name in enumerate(names)])
    (panel,) = longest_kernels(results_of({}, kernels=kernels)).panels  # type: ignore[union-attr]
    shown = [bar["name"] for bar in values_of(panel)]
    assert shown == ["1. sm80_xmma_gemm_f32f32_f32f32_f3…", "2. cutlass::Kernel2<…>"]
    assert names[0] in values_of(panel)[0]["label"]


def test_parts_of_the_memory_are_predicted_and_the_tick_is_measured() -> None:
    rows = [
        {"size": size, "peak_allocated_bytes": 30.0 * GIB, "predicted_of_parameters_bytes": 8.0 * GIB,
         "predicted_of_slack_bytes": 1.0 * GIB, "predicted_of_workspace_bytes": 2.0 * GIB}
        for size in ("small", "xl")
    ]  # fmt: skip
    (panel,) = memory_parts(results_of(*rows)).panels  # type: ignore[union-attr]
    text = json.dumps(panel)
    assert '"measured": 30.0' in text
    assert '"part": "temporary, workspace", "value": 3.0' in text
    assert '"card": 24' in text
    assert '"card": 40' not in text
    signs = [(one.mark, one.text) for one in memory_parts(results_of(*rows)).legend]  # type: ignore[union-attr]
    assert signs[-2:] == [("tick", "measured peak"), ("dash", "GPUs with 24 GiB")]


def collectives(ranks: tuple[int, ...], names: tuple[str, ...], **more: Any) -> Results:
    """Return collectives of two sizes, the larger one with ten times the bandwidth."""
    rows = [
        {"task": "collectives", **dict.fromkeys(AXES), "gpus": gpus, "collective": name, "size_mb": mb,
         "busbw_gb_s": mb * 15.0, **more}
        for gpus in ranks for name in names for mb in (1.0, 10.0)
    ]  # fmt: skip
    return with_axes(results_of(*rows), "gpus", "collective", "size_mb", "dtype")


def test_bus_bandwidths_are_lines_under_the_peak_of_the_link() -> None:
    names = ("all_reduce", "broadcast")
    chart = drawn("bus-bandwidth", collectives((2, 4), names, link_peak_gb_s=450.0))
    assert [panel["title"] for panel in chart.panels] == ["2 GPUs", "4 GPUs"]
    lines = [entry.text for entry in chart.legend if entry.mark == "line"]
    assert (chart.across, lines) == ("size in MB", list(names))
    assert ("dash", "peak of the slowest link, one way") in [
        (entry.mark, entry.text) for entry in chart.legend
    ]
    for panel in chart.panels:
        assert panel["layer"][0]["data"]["values"] == [{"rule": 450.0}]
        encoding = panel["layer"][1]["encoding"]
        assert encoding["x"]["scale"]["type"] == "log"
        assert encoding["y"]["scale"]["domain"] == [0.0, 472.5]
    label = "collectives, 10 MB, broadcast, 4 GPUs: 150 GB/s, GPU-bound"
    assert values_of(chart.panels[1])[-1]["label"] == label


@pytest.mark.parametrize("unknown", [{}, {"link_peak_gb_s": pd.NA}])
def test_numbers_of_ranks_are_lines_of_a_single_collective(unknown: dict[str, Any]) -> None:
    chart = drawn("bus-bandwidth", collectives((2, 4), ("all_reduce",), **unknown))
    assert [panel["title"] for panel in chart.panels] == ["all_reduce"]
    assert [entry.text for entry in chart.legend][:2] == ["2 GPUs", "4 GPUs"]
    assert "dash" not in [entry.mark for entry in chart.legend]  # no peak is known
    assert chart.note == "log scale across"


def test_other_dtypes_than_the_usual_one_are_left_out() -> None:
    bf16, fp32 = (collectives((2,), ("all_reduce",), dtype=name) for name in ("bf16", "fp32"))
    more = fp32.cells.assign(collective="broadcast", cell="d" + fp32.cells["cell"])
    cells = pd.concat([bf16.cells, fp32.cells.assign(cell="e" + fp32.cells["cell"]), more])
    chart = drawn("bus-bandwidth", replace(fp32, cells=cells.reset_index(drop=True)))
    assert "dtype fp32" in chart.note
    assert len(values_of(chart.panels[0])) == 4


PARTS = {"compute_ms": 60.0, "exposed_transfer_ms": 20.0, "exposed_wait_ms": 10.0,
         "exposed_copies_ms": 0.0, "overlap_idle_ms": 30.0}  # fmt: skip


def strategies(*rows: dict[str, Any]) -> Results:
    own = [{"gpus": 2, "parallel": "ddp", "bucket_mb": None, **PARTS, **row} for row in rows]
    return with_axes(results_of(*own), "gpus", "parallel", "bucket_mb")


def test_bars_of_strategies_add_up_to_the_step_and_a_tick_is_the_step_without_the_profiler() -> (
    None
):
    results = strategies(
        {"gpus": 1, "parallel": "none", **dict.fromkeys(PARTS)},
        {"parallel": "naive", "step_ms_median": 90.0},
        {"bucket_mb": 25.0},  # naive has no buckets: it is no other slice
        {"size": "xl", "attention": "flash", "bucket_mb": 25.0},
        {"bucket_mb": 1.0},
        {"gpus": 4, "bucket_mb": 25.0},
    )
    chart = drawn("step-parts", results)
    assert [panel["title"] for panel in chart.panels] == [
        "small, context 128, 2 GPUs", "small, context 128, 4 GPUs", "xl, context 128, 2 GPUs",
    ]  # fmt: skip
    *stacked, tick = chart.panels[0]["layer"]
    bars = values_of({"layer": stacked})
    assert {bar["variant"] for bar in bars} == {"naive", "ddp"}
    sums = defaultdict(float)
    for bar in bars:
        sums[bar["variant"]] += bar["value"]
    assert sums == {"naive": 120.0, "ddp": 120.0}
    assert [one["measured"] for one in tick["data"]["values"]] == [90.0, 100.0]
    assert {bar["href"] for bar in bars} == {"#cell=r:c1", "#cell=r:c2"}
    names = [entry.text for entry in chart.legend]
    assert names == [
        "compute", "copies", "exposed transfer", "exposed wait", "idle", "step without the profiler",
    ]  # fmt: skip
    assert "bucket mb 25" in chart.note


@pytest.mark.parametrize("name", ["bus-bandwidth", "step-parts"])
def test_charts_of_several_gpus_need_their_data(name: str) -> None:
    one_gpu = strategies({"gpus": 1, "parallel": "none", **dict.fromkeys(PARTS)})
    one_size = collectives((2,), ("all_reduce",))
    one_size = replace(one_size, cells=one_size.cells.iloc[:1])
    for results in (one_gpu, one_size, results_of({}, {"context_length": 512})):
        chart = drawn(name, results)
        assert chart is None or not chart.panels


@pytest.mark.render
def test_a_panel_for_the_page_follows_the_theme_and_links_to_cells() -> None:
    rows = [{"context_length": n, "precision": p} for n in (128, 512) for p in ("fp32", "bf16")]
    figures = drawn_figures(results_of(*rows))
    assert [figure.picture.problem for figure in figures] == [""] * len(figures)
    (figure,) = (figure for figure in figures if figure.plot.name == "step-time")
    (panel,) = figure.picture.panels
    assert "http" not in panel
    assert 'stroke="var(--fp32)"' in panel
    assert sorted(re.findall('href="(.*?)"', panel)) == [f"#cell=r:c{n}" for n in range(4)]
    assert "small, context 512, bf16" in panel
    # A file has a legend and a title, and no link, since its targets are on the page.
    assert ">bf16</text>" in figure.picture.svg
    assert ">bf16</text>" not in panel
    assert ">Step time by context length</text>" in figure.picture.svg
    # Its axes have titles, and its signs are explained; on the page, the caption does both.
    for text in ("context length", "ms of a step", "● GPU-bound · ○ CPU-bound"):
        assert f">{text}</t" in figure.picture.svg
        assert f">{text}</t" not in panel
    assert "href" not in figure.picture.svg
    assert "var(" not in figure.picture.svg
    assert figure.picture.png.startswith(b"\x89PNG")
