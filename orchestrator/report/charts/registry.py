"""All charts as data. A new chart is one entry in PLOTS; it appears on the page, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.analysis.axes import COMPILE_AXES
from orchestrator.analysis.results import Results
from orchestrator.report.charts.bars import KernelClasses, LiveMemory, LongestKernels, MemoryParts
from orchestrator.report.charts.chart import CONFIG, ChartLayout, Drawn, LegendEntry
from orchestrator.report.charts.lines import Dots, Lines
from orchestrator.report.charts.measures import of_column, peaks, ratios, step_times
from orchestrator.report.charts.rendering import Picture, begin, draw
from orchestrator.report.text.cell_names import NAME
from tasks.spec.messages import typed_error_text

PICTURES = ("svg", "png")
_NARROW = ("tf32", "bf16", "fp16", "bf16_pure")


@dataclass(frozen=True)
class Plot:
    """A chart of the report. section: of the page. read: what is shown, for the caption."""

    name: str
    section: str
    title: str
    read: str
    layout: ChartLayout


@dataclass(frozen=True)
class Figure:
    """A drawn chart: one SVG for each panel, and a picture of the whole.

    problem: the reason for a missing drawing, otherwise empty.
    """

    plot: Plot
    specs: Sequence[Mapping[str, object]] = ()  # of the panels, and of the whole as the last
    legend: Sequence[LegendEntry] = ()
    note: str = ""
    columns: int = 2
    panels: Sequence[str] = ()
    svg: str = ""
    png: bytes = b""
    problem: str = ""


PLOTS: tuple[Plot, ...] = (
    Plot(
        "step-time",
        "time",
        "Step time by context length",
        "median ms of a step, log scale; bars: 95% interval",
        Lines(step_times("train_step"), " ms", "precision"),
    ),
    Plot(
        "precision-speed-up",
        "time",
        "Speed-up over fp32",
        "times as fast as in fp32, log scale; bars: interval from both medians",
        Dots(
            tuple((f"{name} over fp32", ratios("precision", "fp32", (name,))) for name in _NARROW),
            "×",
            (NAME, "context_length"),
            "precision",
            baseline=1.0,
        ),
    ),
    Plot(
        "gpu-busy",
        "where",
        "Share of the step in which GPU kernels run",
        "kernel time over step time",
        Lines(of_column("train_step", "busy_timed"), "", "precision", is_log=False, top=1.0),
    ),
    Plot(
        "mfu",
        "where",
        "Share of the GPU's peak that a step reaches",
        "model FLOPs over the dense peak in that precision (MFU)",
        Lines(of_column("train_step", "mfu"), "", "precision", is_log=False, dashed=True),
    ),
    Plot(
        "kernel-classes",
        "where",
        "Kernel time by class of work",
        "ms of kernels in a step",
        KernelClasses(),
    ),
    Plot("top-kernels", "where", "The longest kernels", "ms in a step", LongestKernels()),
    Plot(
        "compile-speed-up",
        "compile",
        "Speed-up by compiling",
        "times as fast as eager, log scale; bars: interval from both medians",
        Lines(
            ratios("compile", "eager", ("blocks", "model"), COMPILE_AXES),
            "×",
            NAME,
            panel="precision",
            baseline=1.0,
        ),
    ),
    Plot(
        "memory-parts",
        "memory",
        "What the peak is made of",
        "predicted GiB by part",
        MemoryParts(),
    ),
    Plot(
        "memory-timeline",
        "memory",
        "Live memory during a step",
        "requested GiB by role; dashed lines mark the beginning of a phase",
        LiveMemory(),
    ),
    Plot(
        "attention",
        "attention",
        "Implementations of attention",
        "log scales; bars: 95% interval",
        Dots(
            (("ms", step_times("attention")), ("peak GiB", peaks("attention"))),
            "",
            ("attention",),
            "attention",
            at_longest=True,
        ),
    ),
    Plot(
        "attention-scaling",
        "attention",
        "Attention by context length",
        "median ms, log scales; n^: exponent of the three longest contexts",
        Lines(step_times("attention"), " ms", "attention", has_slopes=True),
    ),
)


@dataclass(frozen=True)
class Drawing:
    """The charts of a report, possibly still being drawn. `figures()` waits for them."""

    figures: Callable[[], list[Figure]] = list


def begin_drawing(results: Results) -> Drawing:
    """Start to draw the charts that the data supports."""
    charts = [chart for chart in (_chart(plot, results) for plot in PLOTS) if chart is not None]
    specs = [spec for chart in charts for spec in chart.specs]
    if not specs:
        return Drawing(lambda: charts)
    wholes = [spec is chart.specs[-1] for chart in charts for spec in chart.specs]
    pictures = begin(len(results.cells), draw, specs, wholes)
    return Drawing(lambda: _with_pictures(charts, pictures()))


def _chart(plot: Plot, results: Results) -> Figure | None:
    """Return a figure without its pictures, or None if the data does not support the chart."""
    try:
        drawn = plot.layout.draw(results)
        if drawn is None or not drawn.panels:
            return None
        panels = [panel.to_dict(validate=False) for panel in drawn.panels]
        specs = [*(_panel_spec(plot, panel) for panel in panels), _whole_spec(plot, drawn, panels)]
    except Exception as error:
        # A chart that fails must not cost the report: the figure shows the problem.
        return Figure(plot, problem=typed_error_text(error))
    return Figure(plot, specs, tuple(drawn.legend), drawn.note, drawn.columns)


def _panel_spec(plot: Plot, panel: Mapping[str, object]) -> dict[str, object]:
    """Return the specification of one panel. Its legend is text of the page."""
    text = ", ".join(filter(None, (plot.title, str(panel.get("title", "")))))
    spec: dict[str, object] = _without_legends({**panel, "description": text, "config": CONFIG})
    return spec


def _without_legends(spec: Any) -> Any:
    if isinstance(spec, list):
        return [_without_legends(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    # Data are not searched: they are most of a specification.
    changed = {
        name: part if name == "data" else _without_legends(part) for name, part in spec.items()
    }
    return {**changed, "legend": None} if "scale" in changed and "field" in changed else changed


def _whole_spec(
    plot: Plot, drawn: Drawn, panels: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return the specification of all panels in rows, with their legend and a title."""
    subtitle = ": ".join(filter(None, (plot.read, drawn.note)))
    of_whole = ("config", "$schema")
    inner = [{n: part for n, part in panel.items() if n not in of_whole} for panel in panels]
    return {
        "$schema": panels[0]["$schema"],
        "config": {**CONFIG, "background": "#ffffff"},
        "title": {"text": plot.title, "subtitle": subtitle, "fontSize": 14},
        "concat": inner,
        "columns": min(drawn.columns, 3),
        "resolve": {"scale": {"color": "shared"}},
    }


def _with_pictures(charts: Sequence[Figure], pictures: Sequence[Picture]) -> list[Figure]:
    drawn = iter(pictures)
    figures = []
    for chart in charts:
        own = [next(drawn) for _ in chart.specs]  # none of a chart with a problem
        problem = next((picture.problem for picture in own if picture.problem), chart.problem)
        if own and not problem:
            panels = [picture.svg for picture in own[:-1]]
            chart = replace(chart, panels=panels, svg=own[-1].svg, png=own[-1].png)
        figures.append(replace(chart, problem=problem))
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
