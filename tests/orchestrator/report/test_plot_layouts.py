from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from orchestrator.report.frames import Results
from orchestrator.report.plot_layouts import MOST_PANELS, KernelClasses, _in_panels
from orchestrator.report.plots import PLOTS, Figure, _with_title


def points(*rows: tuple[str | None, str, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["run", "size", "context_length"]).assign(value=1.0)


def test_a_panel_is_named_by_what_tells_it_apart() -> None:
    rows = points(("full", "small", 128), ("full", "small", 256), ("full", "large", 128), (None, "large", 256))
    shown, panels = _in_panels(rows, ["run", "size"])
    assert panels == ["full · small", "full · large", "large"]  # what there is nothing of goes unsaid
    assert shown["panel"].value_counts().to_dict() == {"full · small": 2, "full · large": 1, "large": 1}
    assert _in_panels(rows[:3], ["run", "size"])[1] == ["small", "large"]
    assert _in_panels(rows[:2], ["run", "size"])[1] == []


def test_of_too_many_panels_those_that_show_most_are_shown_in_their_order() -> None:
    poor = [(f"a{number:02}", "small", 128) for number in range(MOST_PANELS)]
    rich = [("b", size, context) for size in ("small", "large") for context in (128, 256)]
    shown, panels = _in_panels(points(*poor, *rich), ["run", "size"])
    assert len(panels) == MOST_PANELS
    assert panels[-2:] == ["b · small", "b · large"]
    assert panels[0] == "a00 · small"
    assert len(shown) == MOST_PANELS - 2 + 4


def results_with_kernels(cells: Sequence[dict[str, Any]]) -> Results:
    """In the order given, a kernel of each phase in each cell."""
    frame = pd.DataFrame([{"cell": f"c{place}", "attempt": 1, **cell} for place, cell in enumerate(cells)]).convert_dtypes()
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
    return Results(frame, axes, {}, lambda: kernels)


def titles_of(results: Results) -> tuple[list[str], object]:
    """Of the panels, in their order, and of the whole."""
    chart = KernelClasses().draw(results)
    assert chart is not None
    spec = chart.to_dict()
    return spec["facet"]["sort"], spec.get("title")


def test_panels_of_cells_are_in_the_order_of_tables_and_titled_by_what_differs() -> None:
    shuffled = [{"task": "train_step", "size": size, "context_length": n} for n in (512, 128) for size in ("xl", "small")]
    assert titles_of(results_with_kernels(shuffled)) == (
        ["small · context_length=128", "small · context_length=512", "xl · context_length=128", "xl · context_length=512"],
        None,
    )
    alone = [{"task": "train_step", "size": "xl", "context_length": n} for n in (512, 128)]
    assert titles_of(results_with_kernels(alone))[0] == ["context_length=128", "context_length=512"]


def test_panels_that_are_not_drawn_are_counted_and_name_no_other() -> None:
    """What only the cells differ in that are left out is in no title; what another task does not have is in none of its."""
    many = [{"task": "train_step", "size": size, "seed": seed} for size in ("xl", "small") for seed in range(MOST_PANELS)]
    titles, how_many = titles_of(results_with_kernels(many))
    assert titles == [f"seed={seed}" for seed in range(MOST_PANELS)]
    assert how_many == f"{MOST_PANELS} of {2 * MOST_PANELS} cells: the tables have the others"
    two = [{"task": "train_step", "size": "xl"}, {"task": "attention", "d_head": 64}]
    assert set(titles_of(results_with_kernels(two))[0]) == {"train_step", "attention"}


def test_a_picture_has_the_title_and_below_it_what_the_chart_says_of_itself() -> None:
    (plot,) = (plot for plot in PLOTS if plot.name == "kernel-classes")
    assert _with_title(Figure(plot, {}))["title"] == plot.title
    assert _with_title(Figure(plot, {"title": "12 of 36"}))["title"] == {"text": plot.title, "subtitle": "12 of 36"}
