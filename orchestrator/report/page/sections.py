"""Sections of the page: questions, with the charts, tables and the map of limits that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from orchestrator.analysis.axes import has_value, is_null
from orchestrator.analysis.pairs import preferring
from orchestrator.analysis.results import Results
from orchestrator.common.units import GIB
from orchestrator.report.charts.registry import Figure
from orchestrator.report.findings.finding import Finding
from orchestrator.report.tables.table import RenderedTable
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import LENGTH, NAME, SCOPE_COLUMNS
from orchestrator.report.text.numbers import number
from tasks.spec.status import OUT_OF_MEMORY

_LIMIT, _PEAK = "memory_limit_gib", "peak_allocated_bytes"
# Of several hundred columns: each choice of rows copies all columns of its frame.
_READ = (*SCOPE_COLUMNS, "status", "attention", _LIMIT, _PEAK)
_SHADES = 4  # classes f0 to f4
_MOST_ROWS, _MOST_COLUMNS, _MOST_PANELS = 12, 8, 2


class FitCell(NamedTuple):
    """The smallest limit, and the peak below it. style: the shade, or `bad` if no limit is enough."""

    limit: str = ""
    peak: str = ""
    style: str = ""
    key: str = ""


class FitPanel(NamedTuple):
    """The map of one precision."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[FitCell]]]


def fit_panels(results: Results) -> list[FitPanel]:
    """Return a map for each precision; none if no cell had a memory limit."""
    cells = results.cells
    if not {"task", _LIMIT, LENGTH} <= set(cells) or cells[_LIMIT].nunique() < 2:
        return []
    added = {NAME: cell_names.names_of(cells), "key": cell_names.cell_keys(results)}
    cells = cells.filter(items=_READ).assign(**added)
    cells = cells[(cells["task"] == "train_step") & cells["status"].isin(("ok", *OUT_OF_MEMORY))]
    cells = preferring(cells, {"pass": "train_step", "compile": "eager", "attention": "naive"})
    grid = cells[cells[_LIMIT].notna()].drop_duplicates([NAME, LENGTH, "precision"])
    if len(grid) < 2:
        return []
    limits = sorted(cells[_LIMIT].dropna().unique())
    contexts = cell_names.evenly(cell_names.ordered(LENGTH, grid), _MOST_COLUMNS)
    by_place = dict(iter(cells.groupby(["precision", NAME, LENGTH], observed=True)))
    panels = []
    for precision in cell_names.evenly(cell_names.ordered("precision", grid), _MOST_PANELS):
        rows = []
        for name in cell_names.evenly(cell_names.ordered(NAME, grid), _MOST_ROWS):
            found = [by_place.get((precision, name, context)) for context in contexts]
            rows.append((name, [_cell(own, limits) for own in found]))
        panels.append(FitPanel(str(precision), [f"{context:,}" for context in contexts], rows))
    return panels


def _cell(cells: pd.DataFrame | None, limits: list[float]) -> FitCell:
    if cells is None:
        return FitCell()
    ran = cells[cells["status"] == "ok"].sort_values(_LIMIT)  # no limit comes last
    if ran.empty:
        return FitCell("out of memory", "", "bad", cells.iloc[-1]["key"])
    first, free = ran.iloc[0], ran.iloc[-1]
    peak = number(float(free[_PEAK]) / GIB) if has_value(free, _PEAK) else ""
    tried = cells[_LIMIT].max()
    limit, shade = "no limit" if is_null(tried) else f"over {tried:g}", _SHADES
    if not is_null(first[_LIMIT]):
        limit = f"{first[_LIMIT]:g}"
        shade = round((_SHADES - 1) * limits.index(first[_LIMIT]) / max(len(limits) - 1, 1))
    return FitCell(limit, peak, f"f{shade}", first["key"])


@dataclass(frozen=True)
class Question:
    """A section of the page. tables: the first one with rows is open, the others are links."""

    name: str
    link: str
    title: str
    tables: tuple[str, ...] = ()


QUESTIONS: tuple[Question, ...] = (
    Question(
        "time", "Time", "How long does a step take?",
        ("precision", "timings", "utilisation", "scaling"),
    ),
    Question(
        "where", "Where time goes", "Where does the time go?",
        ("kernel-classes", "kernels", "bound", "kernel-modules", "kernel-diff"),
    ),
    Question("best", "Fastest", "Which configuration is the fastest?", ("best",)),
    Question("compile", "Compiling", "What does compiling change?", ("compile",)),
    Question(
        "memory", "Memory", "What fits, and where does the memory go?",
        (
            "oom-map", "memory", "memory-parts", "composition", "saved-tensors", "allocations",
            "allocations-by-part",
        ),
    ),
    Question(
        "attention", "Attention", "Which attention should I use?",
        ("attention", "attention-memory"),
    ),
    Question(
        "parallel", "Several GPUs", "What do several GPUs gain?", ("parallel", "collectives", "ranks"),
    ),
    Question(
        "numerics", "Numerics", "How exact are the numbers of a low precision?",
        ("accumulation", "autocast-dtypes", "norms"),
    ),
    Question("failures", "Failures", "What did not end well, and why?", ("failures",)),
    # Tables that no section names are here too.
    Question("trust", "Trust", "Can I trust these numbers?", ("warmup", "coverage")),
)  # fmt: skip
_LAST = QUESTIONS[-1]
_WITH_TABLE = ("time", "attention")  # students hand in these tables


@dataclass(frozen=True)
class Section:
    """A question with its answer: sentences, charts and tables.

    is_alone: no chart is on the page, so that its numbers are in tables alone.
    """

    question: Question
    findings: Sequence[Finding]
    figures: Sequence[Figure]
    fit: Sequence[FitPanel]
    tables: Sequence[RenderedTable]
    is_alone: bool = False

    @property
    def open_tables(self) -> Sequence[RenderedTable]:
        """The table that is shown: none if sentences, a map or a chart answer the question."""
        is_answered = bool(self.figures or self.fit or self.findings)
        is_open = not is_answered or self.is_alone or self.question.name in _WITH_TABLE
        return self.tables[: int(is_open)]

    @property
    def closed_tables(self) -> Sequence[RenderedTable]:
        return self.tables[len(self.open_tables) :]


def sections(
    results: Results,
    findings: Sequence[Finding],
    figures: Sequence[Figure],
    tables: Sequence[RenderedTable],
) -> list[Section]:
    """Return the sections that have something to show."""
    by_name = {page.table.name: page for page in tables}
    named = {name for question in QUESTIONS for name in question.tables}
    others = tuple(name for name in by_name if name not in named)
    questions = list(QUESTIONS)
    statuses = set(results.cells["status"])
    if statuses and "ok" not in statuses:  # the reason is all that there is to say
        questions.sort(key=lambda question: question.name != "failures")
    found = []
    for question in questions:
        names = question.tables + (others if question is _LAST else ())
        section = Section(
            question,
            [finding for finding in findings if finding.section == question.name],
            [figure for figure in figures if figure.plot.section == question.name],
            fit_panels(results) if question.name == "memory" else (),
            [by_name[name] for name in names if name in by_name],
            is_alone=not figures,
        )
        if section.findings or section.figures or section.fit or section.tables:
            found.append(section)
    return found
