"""All charts as data. A new chart is one entry in PLOTS; it appears on the page, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.bars import (
    kernel_classes,
    live_memory,
    longest_kernels,
    memory_parts,
)
from orchestrator.report.charts.chart import CONFIG, PANEL_CONFIG, ChartLayout, Drawn
from orchestrator.report.charts.lines import RATIO, Dots, Lines
from orchestrator.report.charts.measures import of_column, ratios, step_times
from orchestrator.report.charts.rendering import Picture, begin, draw
from orchestrator.report.text.cell_names import NAME
from tasks.spec.messages import typed_error_text

PICTURES = ("svg", "png")
_NARROW = ("tf32", "bf16", "fp16", "bf16_pure")
_NOT_DRAWN, _NO_PICTURE = Drawn(()), Picture()


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
    """A chart with what its panels share, and its picture, which may still be missing."""

    plot: Plot
    drawn: Drawn = _NOT_DRAWN
    picture: Picture = _NO_PICTURE


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
            tuple((f"{one} over fp32", ratios("precision", "fp32", (one,))) for one in _NARROW),
            RATIO,
            (NAME, "context_length"),
            "precision",
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
        kernel_classes,
    ),
    Plot("top-kernels", "where", "The longest kernels", "ms in a step", longest_kernels),
    Plot(
        "compile-speed-up",
        "compile",
        "Speed-up by compiling",
        "times as fast as eager, log scale; bars: interval from both medians",
        Lines(
            ratios("compile", "eager", ("blocks", "model")),
            RATIO,
            NAME,
            panel="precision",
        ),
    ),
    Plot(
        "memory-parts",
        "memory",
        "What the peak is made of",
        "predicted GiB by part",
        memory_parts,
    ),
    Plot(
        "memory-timeline",
        "memory",
        "Live memory during a step",
        "requested GiB by role; dashed lines mark the beginning of a phase",
        live_memory,
    ),
    Plot(
        "attention",
        "attention",
        "Implementations of attention",
        "log scales; bars: 95% interval",
        Dots(
            (
                ("ms", step_times("attention")),
                ("peak GiB", of_column("attention", "peak_allocated_bytes", scale=1 / GIB)),
            ),
            "",
            ("attention",),
            "attention",
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


def begin_drawing(results: Results) -> Callable[[], list[Figure]]:
    """Start to draw the charts that the data supports, and return a function that waits for them."""
    figures, charts = [], []
    for plot in PLOTS:
        try:
            drawn = plot.layout(results)
            if drawn is not None and drawn.panels:
                charts.append(_specs(plot, drawn))
                # The specifications hold the data; the panels would hold them a second time.
                figures.append(Figure(plot, replace(drawn, panels=())))
        except Exception as error:
            # A chart that fails must not cost the report: the figure shows the problem.
            charts.append([])
            figures.append(Figure(plot, picture=Picture(problem=typed_error_text(error))))
    if not any(charts):
        return lambda: figures
    pictures = begin(len(results.cells), draw, charts)
    return lambda: list(map(_with_picture, figures, pictures()))


def _with_picture(figure: Figure, picture: Picture) -> Figure:
    return figure if figure.picture.problem else replace(figure, picture=picture)


def _specs(plot: Plot, drawn: Drawn) -> list[dict[str, object]]:
    """Return the specification of each panel, and of the whole chart as the last."""
    specs = []
    for panel in drawn.panels:
        text = ", ".join(filter(None, (plot.title, str(panel.get("title", "")))))
        specs.append({**panel, "description": text, "config": PANEL_CONFIG})
    subtitle = ": ".join(filter(None, (plot.read, drawn.note)))
    whole = {
        "config": {**CONFIG, "background": "#ffffff"},
        "title": {"text": plot.title, "subtitle": subtitle, "fontSize": 14},
        "concat": drawn.panels,
        "columns": min(drawn.columns, 3),
        "resolve": {"scale": {"color": "shared"}},
    }
    return [*specs, whole]


def figure_files(
    figures: Sequence[Figure], pictures: Collection[str] = PICTURES
) -> dict[str, str | bytes]:
    """Return the content of the requested formats by path within the report folder."""
    files = {}
    for figure, suffix in product(figures, pictures):
        if not figure.picture.problem:
            files[f"figures/{figure.plot.name}.{suffix}"] = getattr(figure.picture, suffix)
    return files
