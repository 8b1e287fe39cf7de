"""All charts as data. A new chart is one entry in PLOTS; it appears on the page, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.layouts import (
    ChartMeasure,
    KernelClasses,
    Lines,
    LiveMemory,
    Phases,
    PlotLayout,
    SpeedUps,
)
from orchestrator.report.charts.rendering import Picture, begin, draw, script_of_charts
from orchestrator.report.tables.cell_filters import of_task, varying, with_eager_baseline
from orchestrator.report.tables.formatters import KERNEL_TIME
from tasks.spec.messages import typed_error_text

PICTURES = ("svg", "png")
_SEVERAL_PRECISIONS = varying("precision", "train_step")
# The first font is vl-convert's own, so that a chart is equally wide on every machine. The others
# have the same letter widths, for the machine that shows the page.
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"


@dataclass(frozen=True)
class Plot:
    """A chart of the report. read: how to read it, in one line."""

    name: str
    title: str
    read: str
    layout: PlotLayout


@dataclass(frozen=True)
class Figure:
    """A drawn chart.

    spec: Vega-Lite with its data. problem: the reason for a missing drawing, otherwise empty.
    """

    plot: Plot
    spec: Mapping[str, Any]
    svg: str = ""
    png: bytes = b""
    problem: str = ""


PLOTS: tuple[Plot, ...] = (
    Plot(
        "step-time",
        "Step time by context length",
        "Median of the whole step, both scales logarithmic: a power of the length is a straight"
        " line. Cells that ran out of memory have no point. Click the legend to select a series;"
        " hold shift and turn the wheel to zoom.",
        Lines(of_task("train_step"), "ms a step", (ChartMeasure("step", "step_ms_median"),)),
    ),
    Plot(
        "compile-speed-up",
        "Speed-up by compiling",
        "How many times faster the compiled step is than the eager one;"
        " below the dashed line it is slower.",
        SpeedUps(with_eager_baseline, "compile"),
    ),
    Plot(
        "compile-kernels",
        "Speed-up by compiling: kernels alone",
        "How many times faster the kernels of the compiled step are than those of the eager one."
        " The CPU has no influence.",
        SpeedUps(with_eager_baseline, "compile", KERNEL_TIME),
    ),
    Plot(
        "precision-speed-up",
        "Speed-up by precision",
        "How many times faster a step is than in the first precision;"
        " below the dashed line it is slower.",
        SpeedUps(_SEVERAL_PRECISIONS, "precision"),
    ),
    Plot(
        "precision-kernels",
        "Speed-up by precision: kernels alone",
        "How many times faster the kernels of a step are than in the first precision."
        " The CPU has no influence.",
        SpeedUps(_SEVERAL_PRECISIONS, "precision", KERNEL_TIME),
    ),
    Plot(
        "peak-memory",
        "Peak memory by context length",
        "The allocator's peak in steady state, both scales logarithmic; predicted and measured.",
        Lines(
            of_task("train_step"),
            "GiB",
            (
                ChartMeasure("measured", "peak_allocated_bytes", 1 / GIB),
                ChartMeasure("predicted", "predicted_peak_allocated_bytes", 1 / GIB),
            ),
        ),
    ),
    Plot(
        "attention-scaling",
        "Attention by context length",
        "Median of forward and backward pass, both scales logarithmic. Time that is quadratic in"
        " the length rises by two decades for each decade of length.",
        Lines(
            of_task("attention"),
            "ms",
            (
                ChartMeasure("forward", "forward_ms_median"),
                ChartMeasure("backward", "backward_ms_median"),
            ),
        ),
    ),
    Plot(
        "phases",
        "Share of each phase in a step",
        "The share of each phase in the medians of all phases; the timing waits at the end of each.",
        Phases(of_task("train_step")),
    ),
    Plot(
        "kernel-classes",
        "Kernels by phase and class",
        "Milliseconds of kernels in a step, stacked by the class of work.",
        KernelClasses(),
    ),
    Plot(
        "memory-timeline",
        "Live memory during a step",
        "Requested GiB by role during the recorded step, on the host's clock;"
        " dashed lines mark the beginning of a phase.",
        LiveMemory(),
    ),
)


@dataclass(frozen=True)
class Drawing:
    """The charts of a report, possibly still being drawn. `figures()` waits for them.

    script: returns the script that shows them on a page; empty without any chart.
    """

    figures: Callable[[], list[Figure]] = list
    script: Callable[[], str] = str


def begin_drawing(results: Results) -> Drawing:
    """Start to draw the charts that the data supports."""
    charts = [chart for chart in (_chart(plot, results) for plot in PLOTS) if chart is not None]
    specs = [_with_title(chart) for chart in charts if not chart.problem]
    if not specs:
        return Drawing(lambda: charts)
    cells = len(results.cells)
    pictures, script = begin(cells, draw, specs), begin(cells, script_of_charts)
    return Drawing(lambda: _with_pictures(charts, pictures()), script)


def _with_title(chart: Figure) -> dict[str, Any]:
    """Return the specification of a picture: the plot's title, and the chart's own as subtitle."""
    # On the page, the title is a heading of the page and only the note belongs to the chart.
    title: Any = chart.plot.title
    if chart.spec.get("title"):
        title = {"text": title, "subtitle": chart.spec["title"]}
    return {**chart.spec, "title": title}


def _chart(plot: Plot, results: Results) -> Figure | None:
    """Return a figure without its pictures, or None if the data does not support the chart."""
    try:
        chart = plot.layout.draw(results)
        if chart is None:
            return None
        spec = chart.properties(description=f"{plot.title}. {plot.read}").to_dict()
    except Exception as error:
        # A chart that fails must not cost the report: the figure shows the problem.
        return Figure(plot, {}, problem=typed_error_text(error))
    return Figure(plot, {**spec, "config": {**spec["config"], "font": _FONT}})


def _with_pictures(charts: Sequence[Figure], pictures: Sequence[Picture]) -> list[Figure]:
    drawn = iter(pictures)  # charts with a problem have none
    figures = []
    for chart in charts:
        if not chart.problem:
            picture = next(drawn)
            spec = {} if picture.problem else chart.spec
            chart = Figure(chart.plot, spec, picture.svg, picture.png, picture.problem)
        figures.append(chart)
    return figures


def figure_files(
    figures: Sequence[Figure], pictures: Collection[str] = PICTURES
) -> dict[str, str | bytes]:
    """Return the content of the requested formats by path within the report folder."""
    files: dict[str, str | bytes] = {}
    for figure in figures:
        made: dict[str, str | bytes] = {"svg": figure.svg, "png": figure.png}
        for suffix in pictures if not figure.problem else ():
            files[f"figures/{figure.plot.name}.{suffix}"] = made[suffix]
    return files
