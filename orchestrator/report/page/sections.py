"""Sections of the page: questions, with the charts and tables that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.analysis.results import Results
from orchestrator.report.charts.registry import Figure
from orchestrator.report.findings.finding import Finding
from orchestrator.report.page.fit_map import FitPanel, fit_panels
from orchestrator.report.tables.table import RenderedTable


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
    Question("compile", "Compiling", "What does compiling change?", ("compile",)),
    Question(
        "memory", "Memory", "What fits, and where does the memory go?",
        ("oom-map", "memory", "memory-parts", "composition", "saved-tensors", "allocations"),
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
    found = []
    questions = list(QUESTIONS)
    statuses = set(results.cells["status"])
    if statuses and "ok" not in statuses:  # the reason is all that there is to say
        questions.sort(key=lambda question: question.name != "failures")
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
