"""The charts, as data. Adding one is one entry in PLOTS. Each is defined once, for the page, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import vl_convert

from orchestrator.report.frames import Results
from orchestrator.report.plot_layouts import KernelClasses, Lines, LiveMemory, Measure, Phases, PlotLayout, SpeedUps
from orchestrator.report.selections import of_task, varying, with_baseline
from orchestrator.report.values import GIB

_PNG_SCALE = 2  # pixels a point: sharp in print


@dataclass(frozen=True)
class Plot:
    """A chart of the report. read: how to read it, in one line."""

    name: str
    title: str
    read: str
    layout: PlotLayout


@dataclass(frozen=True)
class Figure:
    """A chart drawn. spec: of Vega-Lite, its data included. problem: why there is no drawing, else empty."""

    plot: Plot
    spec: Mapping[str, Any]
    svg: str
    png: bytes
    problem: str = ""


PLOTS: tuple[Plot, ...] = (
    Plot(
        "step-time",
        "Step time by context length",
        "Median of the whole step, both scales logarithmic: a straight line is a power of the length. What ran out of memory has "
        "no point. A click on the legend singles out; shift and the wheel zoom.",
        Lines(of_task("train_step"), "context_length", "ms a step", (Measure("step", "step_ms_median"),)),
    ),
    Plot(
        "compile-speed-up",
        "Eager against compiled",
        "How many times faster the compiled step is than the eager one; below the dashed line it is slower.",
        SpeedUps(with_baseline("compile", "eager", ("compile_mode", "compile_cache")), "compile"),
    ),
    Plot(
        "precision-speed-up",
        "What precision gains",
        "How many times faster a step is than in the first precision; below the dashed line it is slower.",
        SpeedUps(varying("train_step", "precision"), "precision"),
    ),
    Plot(
        "peak-memory",
        "Peak memory by context length",
        "The allocator's peak in steady state, both scales logarithmic; what was predicted beside what was measured.",
        Lines(
            of_task("train_step"),
            "context_length",
            "GiB",
            (
                Measure("measured", "peak_allocated_bytes", 1 / GIB),
                Measure("predicted", "predicted_peak_allocated_bytes", 1 / GIB),
            ),
        ),
    ),
    Plot(
        "attention-scaling",
        "Attention by length",
        "Median of forward and backward pass, both scales logarithmic: quadratic in the length is two decades up for one across.",
        Lines(
            of_task("attention"),
            "context_length",
            "ms",
            (Measure("forward", "forward_ms_median"), Measure("backward", "backward_ms_median")),
        ),
    ),
    Plot(
        "phases",
        "What a step is made of",
        "The share of each phase in the medians of all phases, each waited for at its end.",
        Phases(of_task("train_step")),
    ),
    Plot(
        "kernel-classes",
        "Kernels by phase and class",
        "Milliseconds of kernels a step, stacked by the kind of work.",
        KernelClasses(),
    ),
    Plot(
        "memory-timeline",
        "What lives when",
        "GiB that were asked for, by role, over the recorded step on the host's clock; a dashed line is where a phase begins.",
        LiveMemory(),
    ),
)


def draw_figures(results: Results) -> list[Figure]:
    """The charts that the data supports. One that cannot be drawn says why, and takes nothing else with it."""
    figures = []
    for plot in PLOTS:
        try:
            chart = plot.layout.draw(results)
            figures += [_rendered(plot, chart)] if chart is not None else []
        except Exception as error:
            figures.append(Figure(plot, {}, "", b"", f"{type(error).__name__}: {error}"))
    return figures


def figure_files(figures: list[Figure]) -> dict[str, str | bytes]:
    """By path within the report's folder."""
    drawn = [figure for figure in figures if not figure.problem]
    return {f"figures/{figure.plot.name}.{suffix}": content for figure in drawn for suffix, content in
            (("svg", figure.svg), ("png", figure.png))}  # fmt: skip


def _rendered(plot: Plot, chart: Any) -> Figure:
    """The page has the title as a heading; the pictures have it in them."""
    spec = chart.properties(description=f"{plot.title}. {plot.read}").to_dict()
    svg = vl_convert.vegalite_to_svg({**spec, "title": plot.title})
    return Figure(plot, spec, svg, vl_convert.svg_to_png(svg, scale=_PNG_SCALE))
