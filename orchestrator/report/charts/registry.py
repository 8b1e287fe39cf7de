"""All charts as data. A new chart is one entry in PLOTS; it appears on the page, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from orchestrator.analysis.results import Results
from orchestrator.report.charts import bars, chart
from orchestrator.report.charts.chart import CONFIG, PANEL_CONFIG, ChartLayout, Drawn
from orchestrator.report.charts.lines import RATIO, Lines, attention_dots, over_commits
from orchestrator.report.charts.memory_timeline import live_memory
from orchestrator.report.charts.rendering import Picture, draw
from orchestrator.report.charts.speed_and_memory import speed_and_memory
from orchestrator.report.text.cell_names import NAME
from tasks.spec.messages import typed_error_text

PICTURES = ("svg", "png")
_NARROW = ("tf32", "bf16", "fp16", "bf16_pure")
# Marks of a legend as signs in the text of a file.
_SIGNS = {"full": "●", "hollow": "○", "dash": "- -", "tick": "|"}
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

    @property
    def title(self) -> str:
        across = self.drawn.across
        return f"{self.plot.title} by {across}" if across else self.plot.title


PLOTS: tuple[Plot, ...] = (
    Plot(
        "step-time",
        "time",
        "Step time",
        "median ms of a step; bars: 95% interval",
        Lines(chart.step_times("train_step"), " ms", "ms of a step"),
    ),
    Plot(
        "precision-speed-up",
        "time",
        "Speed-up over fp32",
        "times as fast as in fp32; bars: interval from both medians",
        Lines(chart.ratios("precision", "fp32", _NARROW), RATIO, "times as fast as in fp32"),
    ),
    Plot(
        "commits",
        "time",
        "The same cells",
        "times the median of the first run; bars: 95% interval of each median",
        over_commits,
    ),
    Plot(
        "gpu-busy",
        "where",
        "Share of the step in which GPU kernels run",
        "kernel time over step time",
        Lines(chart.of_column("train_step", "busy_timed"), "", "GPU busy", is_log=False, top=1.0),
    ),
    Plot(
        "mfu",
        "where",
        "Share of the GPU's peak that a step reaches",
        "model FLOPs over the dense peak in that precision (MFU)",
        Lines(chart.of_column("train_step", "mfu"), "", "MFU", is_log=False, dashed=True),
    ),
    Plot(
        "kernel-classes",
        "where",
        "Kernel time by class of work",
        "ms of kernels in a step",
        bars.kernel_classes,
    ),
    Plot("top-kernels", "where", "The longest kernels", "ms in a step", bars.longest_kernels),
    Plot(
        "best",
        "best",
        "Speed and memory of the measured candidates",
        "tokens/s over the peak in GiB; line: candidates that no other one beats in both",
        speed_and_memory,
    ),
    Plot(
        "compile-speed-up",
        "compile",
        "Speed-up of compiled steps",
        "times as fast as eager; bars: interval from both medians",
        Lines(
            chart.ratios("compile", "eager", ("blocks", "model")),
            RATIO,
            "times as fast as eager",
            colour=NAME,
            panel="precision",
        ),
    ),
    Plot(
        "memory-parts",
        "memory",
        "What the peak is made of",
        "GiB by part, predicted",
        bars.memory_parts,
    ),
    Plot(
        "memory-timeline",
        "memory",
        "Live memory during a step",
        "requested GiB by role over the ms of a step; dashed: beginning of a phase",
        live_memory,
    ),
    Plot(
        "attention",
        "attention",
        "Implementations of attention",
        "log scales; bars: 95% interval",
        attention_dots,
    ),
    Plot(
        "bus-bandwidth",
        "parallel",
        "Bus bandwidth",
        "GB/s that each link must carry, from the median of all calls",
        Lines(
            chart.bandwidths,
            " GB/s",
            "bus bandwidth, GB/s",
            colour="collective",
            panel="ranks",
            is_log=False,
            across="size_mb",
            rule="peak of the slowest link, one way",
        ),
    ),
    Plot(
        "step-parts",
        "parallel",
        "What a step on several GPUs consists of",
        "ms of a step under the profiler, on the rank with the slowest steps; exposed: no kernel"
        " computes at the same time",
        bars.step_parts,
    ),
    Plot(
        "attention-scaling",
        "attention",
        "Attention",
        "median ms; n^: exponent of the three longest contexts",
        Lines(chart.step_times("attention"), " ms", "ms", colour="attention", has_slopes=True),
    ),
)


def drawn_figures(results: Results) -> list[Figure]:
    """Return the charts that the data supports, drawn."""
    figures = []
    for plot in PLOTS:
        try:
            drawn = plot.layout(results)
            if drawn is not None and drawn.panels:
                picture = draw(_specs(Figure(plot, drawn)))
                # Of the panels, which hold the data, the pictures are left.
                figures.append(Figure(plot, replace(drawn, panels=()), picture))
        except Exception as error:
            # A chart that fails must not cost the report: the figure shows the problem.
            figures.append(Figure(plot, picture=Picture(problem=typed_error_text(error))))
    return figures


def _specs(figure: Figure) -> list[dict[str, object]]:
    """Return the specification of each panel, and of the whole chart as the last."""
    specs, drawn = [], figure.drawn
    for panel in drawn.panels:
        text = ", ".join(filter(None, (figure.title, str(panel.get("title", "")))))
        # The caption on the page names the axes; a file has their titles.
        specs.append({**_untitled(panel), "description": text, "config": PANEL_CONFIG})
    # Vega draws the legend of colours only.
    signs = [f"{_SIGNS[one.mark]} {one.text}" for one in drawn.legend if one.mark in _SIGNS]
    read = chart.joined(figure.plot.read, drawn.note)
    lines = list(filter(None, (read, " · ".join(signs))))
    whole = {
        "config": {**CONFIG, "background": "#ffffff"},
        "title": {"text": figure.title, "subtitle": lines, "fontSize": 14},
        "concat": drawn.panels,
        "columns": min(drawn.columns, 3),
        "resolve": {"scale": {"color": "shared"}},
    }
    return [*specs, whole]


def _untitled(part: Any) -> Any:
    """Return a specification without the titles of axes."""
    if isinstance(part, Mapping):
        own = {**part, "title": None} if {"field", "title"} <= set(part) else part
        return {key: _untitled(value) for key, value in own.items()}
    return list(map(_untitled, part)) if isinstance(part, list) else part


def figure_files(
    figures: Sequence[Figure], pictures: Collection[str] = PICTURES
) -> dict[str, str | bytes]:
    """Return the content of the requested formats by path within the report folder."""
    files = {}
    for figure, suffix in product(figures, pictures):
        if not figure.picture.problem:
            files[f"figures/{figure.plot.name}.{suffix}"] = getattr(figure.picture, suffix)
    return files
