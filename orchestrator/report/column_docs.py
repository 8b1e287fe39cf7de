"""Descriptions of all columns: `run.columns` of a loaded run, and the page docs/columns.md.

    python -m orchestrator.report.column_docs > docs/columns.md

All of it is generated from declarations: stored tables, metrics, facts and axes in tasks/spec, and
derived fields in orchestrator/analysis. Only the guide at the top of the page is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from orchestrator.analysis.cells import RUN_FIELDS
from orchestrator.analysis.derived_fields import DERIVED_FIELDS
from orchestrator.report.column_guide import guide
from tasks.spec.facts import EVIDENCE, FACT_COLUMNS, FACTS
from tasks.spec.fields import Fact, Field, name_pattern
from tasks.spec.metrics import METRICS, PREDICTED_METRICS, Metric
from tasks.spec.registry import all_axes
from tasks.spec.tables import ATTEMPT, STORED_TABLES, StoredTable

PARAMETER = "a parameter of the cell"  # of a task that is not part of this program
_CELLS = """One row per cell. A run has the columns that its instruments and tasks fill; `run.columns` lists them. A name
with braces stands for several columns: `{phase}` is any phase of a step, `step` the whole step, `{statistic}` one of
n, mean, sd, min, median, ci_low, ci_high and coverage. `ci_low` to `ci_high` is the interval of the median."""
_PARAMETERS = """Parameters distinguish cells. The README lists the tasks that have each of them, and their defaults. A
parameter is null if the cell's task does not have it, if it belongs to the other `timing`, or if the model is named by
another parameter."""


@dataclass(frozen=True)
class ColumnDoc:
    """The description of a column, or of several if the name has a placeholder."""

    name: str
    unit: str
    doc: str

    def matches(self, column: str) -> bool:
        return name_pattern(self.name).fullmatch(column) is not None


@cache
def cell_columns() -> tuple[ColumnDoc, ...]:
    """Return the descriptions of all columns of `cells` that are not parameters."""
    (attempts,) = (table for table in STORED_TABLES if table.name == "attempts")
    stored = {field.name: field for field in (*attempts.fields, ATTEMPT)}
    names = (
        "cell",
        "task",
        "status",
        "stage",
        "phase",
        "attempt",
        "started_at",
        "wall_s",
        "commit",
    )
    found = [_of_field(stored[name]) for name in names]
    found += [ColumnDoc(one.name, one.unit, one.doc) for one in (*RUN_FIELDS, *DERIVED_FIELDS)]
    found += [_of_fact(fact) for fact in FACT_COLUMNS]
    for metric in (*METRICS, *PREDICTED_METRICS):
        found += [ColumnDoc(one.name, one.unit or "", one.doc) for one in metric.columns]
    by_name: dict[str, ColumnDoc] = {}
    for one in found:
        by_name.setdefault(one.name, one)
    return tuple(by_name.values())


@cache
def parameter_columns() -> tuple[ColumnDoc, ...]:
    """Return the descriptions of the parameters of all tasks."""
    return tuple(ColumnDoc(name, axis.unit, axis.doc) for name, axis in all_axes().items())


def describe_columns(names: Iterable[str]) -> list[ColumnDoc]:
    """Return the description of each column of `cells`.

    A column that is described nowhere is a parameter of a task of the user's own.
    """
    return [_describe(name) for name in names]


def _describe(name: str) -> ColumnDoc:
    for one in (*cell_columns(), *parameter_columns()):
        if one.matches(name):
            return ColumnDoc(name, one.unit, one.doc)
    return ColumnDoc(name, "", PARAMETER)


def _of_field(field: Field) -> ColumnDoc:
    return ColumnDoc(field.name, field.unit, field.doc)


def _of_fact(fact: Fact) -> ColumnDoc:
    return ColumnDoc(fact.name, fact.unit, fact.doc)


# ---------------------------------------------------------------------- docs/columns.md


def page() -> str:
    """Return docs/columns.md."""
    lines = [
        *guide(),
        *("", "## cells", "", _CELLS, "", *_markdown(cell_columns(), "column")),
        *("", "## Parameters", "", _PARAMETERS, "", *_markdown(parameter_columns(), "parameter")),
    ]
    for table in STORED_TABLES:
        lines += ["", f"## {table.name}", "", table.doc, "", *_fields(table), *_values(table)]
    return "\n".join(lines) + "\n"


def _fields(table: StoredTable) -> Iterator[str]:
    yield from _markdown([_of_field(field) for field in table.fields], "column")


def _values(table: StoredTable) -> Iterator[str]:
    """Yield what may be in a table's columns: their values, keys of JSON objects, and metrics."""
    for field in table.fields:
        if field.values:
            yield from _titled(f"Values of `{field.name}`:", _words(field.values), field.name)
    if table.name == "attempts":
        yield from _titled("Keys of `facts`:", [_of_fact(fact) for fact in FACTS], "key")
        yield from _titled("Keys of `evidence`:", [_of_fact(fact) for fact in EVIDENCE], "key")
    if table.name == "samples":
        for instrument in dict.fromkeys(metric.instrument for metric in METRICS):
            own = [metric for metric in METRICS if metric.instrument == instrument]
            yield from _titled(f"Metrics of `{instrument}`:", _metrics(own), "metric")
    if table.name == "predictions":
        yield from _titled("Metrics:", _metrics(PREDICTED_METRICS), "metric")


def _words(values: Mapping[str, str]) -> list[ColumnDoc]:
    return [ColumnDoc(str(word), "", doc) for word, doc in values.items()]


def _metrics(metrics: Iterable[Metric]) -> list[ColumnDoc]:
    return [ColumnDoc(metric.name, metric.unit, metric.doc) for metric in metrics]


def _titled(title: str, rows: Sequence[ColumnDoc], heading: str) -> Iterator[str]:
    yield from ("", title, "", *_markdown(rows, heading))


def _markdown(rows: Sequence[ColumnDoc], heading: str) -> Iterator[str]:
    """Yield a Markdown table, without the column of units if no row has one."""
    has_units = any(row.unit for row in rows)
    yield f"| {heading} | unit | meaning |" if has_units else f"| {heading} | meaning |"
    yield "|---|---|---|" if has_units else "|---|---|"
    for row in rows:
        name = f"`{row.name}`" if row.name else "(empty)"
        unit = f" {row.unit} |" if has_units else ""
        yield f"| {name} |{unit} {row.doc} |"


if __name__ == "__main__":
    print(page(), end="")
