from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.results import Results
from orchestrator.report.charts.layouts import (
    Chart,
    KernelClasses,
    LiveMemory,
    SpeedUps,
    _in_panels,
)
from orchestrator.report.charts.panels import MOST_PANELS
from orchestrator.report.charts.registry import PLOTS, Figure, _with_title
from orchestrator.report.tables.cell_filters import varying


def points(*rows: tuple[str | None, str, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["run", "size", "context_length"]).assign(value=1.0)


def test_a_panel_is_named_by_the_axes_that_vary() -> None:
    rows = points(
        ("full", "small", 128), ("full", "small", 256), ("full", "large", 128), (None, "large", 256)
    )
    shown, panels = _in_panels(rows, ["run", "size"])
    assert list(panels.titles) == [
        "full · small",
        "full · large",
        "large",
    ]  # a null is in no title
    assert shown["panel"].value_counts().to_dict() == {
        "full · small": 2,
        "full · large": 1,
        "large": 1,
    }
    assert list(_in_panels(rows[:3], ["run", "size"])[1].titles) == ["small", "large"]
    assert list(_in_panels(rows[:2], ["run", "size"])[1].titles) == []
    assert not panels.note


def test_panels_that_repeat_another_run_are_not_shown_if_there_are_too_many() -> None:
    """The fullest panel is shown, among equals that of the first run; new content is no repetition."""
    poor = [(f"a{number:02}", "small", 128) for number in range(MOST_PANELS)]
    rich = [
        (run, size, context)
        for run in ("b", "c")
        for size in ("small", "large")
        for context in (128, 256)
    ]
    own = [("a00", "large", 512)]
    shown, panels = _in_panels(points(*poor, *rich, *own), ["run", "size"], ["a00", "c", "b"])
    assert list(panels.titles) == ["a00 · large", "c · small", "c · large"]
    assert list(panels.note) == [
        "3 of 17 panels: none that repeats another run's; the tables have the others"
    ]
    assert len(shown) == 5


def test_the_note_names_a_shared_value_if_panels_that_are_not_drawn_differ_in_it() -> None:
    rows = [
        ("full", size, context, "eager")
        for size in ("small", "large")
        for context in range(MOST_PANELS)
    ]
    more = [(*row[:3], "blocks") for row in rows[:1]]
    cells = pd.DataFrame(
        [*rows, *more], columns=["run", "size", "context_length", "compile"]
    ).assign(value=1.0)
    _, panels = _in_panels(cells, ["size", "context_length", "compile"])
    assert list(panels.note)[1:] == ["all of these: eager"]


def results_of_speed_ups(sizes: Sequence[str]) -> Results:
    """Return the results of two runs; the second repeats a part of the first."""
    rows = [
        {
            "run": run,
            "size": size,
            "compile": compiled,
            "pass": passed,
            "precision": precision,
            "context_length": context,
        }
        for run, contexts in (("full", (128, 256)), ("again", (128,)))
        for size in sizes
        for compiled in ("eager", "blocks")
        for passed in ("forward", "train_step")
        for precision in ("fp32", "bf16")
        for context in contexts
    ]
    cells = pd.DataFrame(rows).assign(task="train_step", step_ms_median=1.0).convert_dtypes()
    return Results(cells, tuple(rows[0]), {"runs": ["full", "again"]})


def test_speed_ups_are_shown_for_every_size() -> None:
    sizes = ["small", "medium", "large", "xl", "2.7B"]
    chart = SpeedUps(varying("precision", "train_step"), "precision").draw(
        results_of_speed_ups(sizes)
    )
    assert facets_of(chart) == [
        f"{size} · {compiled}" for size in sizes for compiled in ("eager", "blocks")
    ]
    assert title_of(chart) == [
        "10 of 40 panels: none that repeats another run's, equally many of each size, the most different first; "
        "the tables have the others",
        "all of these: full · train_step",
    ]
    small = SpeedUps(varying("precision", "train_step"), "precision").draw(
        results_of_speed_ups(["small"])
    )
    assert (len(facets_of(small)), title_of(small)) == (8, None)


def facets_of(chart: Chart | None) -> list[str]:
    assert chart is not None
    facets: list[str] = chart.to_dict()["facet"]["sort"]
    return facets


def title_of(chart: Chart | None) -> object:
    assert chart is not None
    return chart.to_dict().get("title")


def results_with_kernels(cells: Sequence[dict[str, Any]]) -> Results:
    """Return results with a kernel of each phase in each cell."""
    frame = pd.DataFrame(
        [{"cell": f"c{place}", "attempt": 1, **cell} for place, cell in enumerate(cells)]
    ).convert_dtypes()
    kernels = pd.DataFrame(
        [
            {
                "cell": cell,
                "attempt": 1,
                "phase": phase,
                "kernel_class": "GEMM",
                "operator": "",
                "name": "k",
                "total_ns": 1e6,
                "steps": 1,
            }
            for cell in frame["cell"]
            for phase in ("forward", "backward")
        ]
    ).convert_dtypes()
    axes = tuple(name for name in frame if name not in ("cell", "attempt", "task"))
    return Results(frame, axes, {}, lambda table: kernels)


def titles_of(results: Results) -> tuple[list[str], object]:
    """Return the titles of the panels in order, and that of the chart."""
    chart = KernelClasses().draw(results)
    return facets_of(chart), title_of(chart)


def test_panels_of_cells_are_in_the_order_of_tables_and_titled_by_what_differs() -> None:
    shuffled = [
        {"task": "train_step", "size": size, "context_length": n}
        for n in (512, 128)
        for size in ("xl", "small")
    ]
    assert titles_of(results_with_kernels(shuffled)) == (
        [
            "small · context_length=128",
            "small · context_length=512",
            "xl · context_length=128",
            "xl · context_length=512",
        ],
        None,
    )
    alone = [{"task": "train_step", "size": "xl", "context_length": n} for n in (512, 128)]
    assert titles_of(results_with_kernels(alone))[0] == ["context_length=128", "context_length=512"]


def test_panels_that_are_not_drawn_are_counted_and_change_no_title() -> None:
    """An axis in which no drawn cells of one task differ is in no title."""
    many = [
        {"task": "train_step", "size": size, "seed": seed}
        for size in ("xl", "small")
        for seed in range(MOST_PANELS)
    ]
    titles, note = titles_of(results_with_kernels(many))
    seeds = [0, 1, 2, 3, 4, MOST_PANELS - 1]
    assert titles == [f"{size} · seed={seed}" for size in ("small", "xl") for seed in seeds]
    assert note == [
        f"{MOST_PANELS} of {2 * MOST_PANELS} cells: equally many of each size, the most different first; "
        "the tables have the others",
        "each panel has its own scale",
    ]
    two = [{"task": "train_step", "size": "xl"}, {"task": "attention", "d_head": 64}]
    assert set(titles_of(results_with_kernels(two))[0]) == {"train_step", "attention"}


def results_with_live_memory(cells: Sequence[dict[str, Any]]) -> Results:
    """Return results with one moment of each cell, with `peak` bytes."""
    frame = pd.DataFrame(
        [{"cell": f"c{place}", "attempt": 1, **cell} for place, cell in enumerate(cells)]
    )
    moment = {"event": 0, "at_ms": 1.0, "phase": "forward", "role": "activations"}
    live = frame[["cell", "attempt"]].assign(live_bytes=frame.pop("peak"), **moment)
    axes = tuple(name for name in frame if name not in ("cell", "attempt", "task"))
    return Results(frame.convert_dtypes(), axes, {}, read_table=lambda table: live)


def test_timelines_show_each_task_and_the_largest_cells_of_each_size() -> None:
    attention = [
        {"task": "attention", "attention": f"a{place:02}", "peak": 2**20 + place}
        for place in range(2 * MOST_PANELS)
    ]
    sizes = ["small", "medium", "large", "xl", "2.7B"]
    steps = [
        {
            "task": "train_step",
            "size": size,
            "context_length": context,
            "peak": 2**30 * (10**place + context),
        }
        for place, size in enumerate(sizes)
        for context in (128, 256, 512)
    ]
    chart = LiveMemory().draw(results_with_live_memory([*attention, *steps]))
    assert chart is not None
    assert facets_of(chart) == [
        *(f"attention · a{place}" for place in range(2 * MOST_PANELS - 6, 2 * MOST_PANELS)),
        *(f"train_step · {size} · context_length=512" for size in sizes[:4]),
        "train_step · 2.7B · context_length=256",
        "train_step · 2.7B · context_length=512",
    ]
    assert chart.to_dict()["resolve"] == {"scale": {"x": "independent", "y": "independent"}}
    few = LiveMemory().draw(results_with_live_memory(steps[:MOST_PANELS]))
    assert few is not None
    assert "resolve" not in few.to_dict()
    assert title_of(few) is None


def test_a_picture_has_the_title_of_the_plot_and_the_note_as_subtitle() -> None:
    (plot,) = (plot for plot in PLOTS if plot.name == "kernel-classes")
    assert _with_title(Figure(plot, {}))["title"] == plot.title
    assert _with_title(Figure(plot, {"title": "12 of 36"}))["title"] == {
        "text": plot.title,
        "subtitle": "12 of 36",
    }
