"""All tables of the report, in the order in which it shows them.

No column of a table may have the name of a parameter, such as `optimizer`: that is the title of the
parameter's own column, which a table has if the parameter varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.analysis.axes import NOTHING
from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables.allocation_tables import ALLOCATION_TABLES
from orchestrator.report.tables.attention_tables import (
    ATTENTION,
    ATTENTION_COMPILE,
    ATTENTION_LADDER,
    ATTENTION_MEMORY,
)
from orchestrator.report.tables.compile_tables import COMPILATION, COMPILE, PRECISION
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.numerics_tables import ACCUMULATION, AUTOCAST_DTYPES, NORMS
from orchestrator.report.tables.status_tables import FAILURES, TIME_SPENT
from orchestrator.report.tables.table import NOTES, Heading, RenderedTable, Table, TableGrid
from orchestrator.report.tables.timing_tables import (
    CPU_BOUND,
    PHASES,
    SCALING,
    TIMINGS,
    UTILISATION,
    WARMUP,
)
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import typed_error_text

_PROBLEM = "this table cannot be made"

TABLES: tuple[Table, ...] = (
    TIMINGS,
    PHASES,
    WARMUP,
    PRECISION,
    UTILISATION,
    COMPILE,
    COMPILATION,
    ATTENTION,
    ATTENTION_COMPILE,
    ATTENTION_LADDER,
    ATTENTION_MEMORY,
    CPU_BOUND,
    *MEMORY_TABLES,
    SCALING,
    ACCUMULATION,
    AUTOCAST_DTYPES,
    NORMS,
    *ALLOCATION_TABLES,
    *KERNEL_TABLES,
    TIME_SPENT,
    FAILURES,
)

# Names of earlier versions, and the tables that show the same now. Accepted, but not listed.
FORMER_NAMES: Mapping[str, str] = {
    "attention-axis": "attention-ladder",
    "attention-scaling": "scaling",
    "ceiling": "utilisation",
    "closed-form": "memory-parts",
    "gemm-share": "kernel-classes",
    "host": "cpu-bound",
    "jit": "compile",
    "kernel-coverage": "coverage",
    "largest-allocations": "top-allocations",
    "memory-cpu": "memory",
    "modes": "cpu-bound",
    "non-gemm": "kernels",
    "predicted-roles": "memory-parts",
    "prediction": "memory-prediction",
    "snapshots": "coverage",
    "softmax-matmul": "kernel-classes",
    "took": "time-spent",
}


def lay_out(
    results: Results, names: Iterable[str] = (), tables: Sequence[Table] = TABLES
) -> list[RenderedTable]:
    """Return the named tables, or all, without those that have no rows.

    Raise ConfigError for an unknown name. A name of an earlier version counts as the current one.
    """
    by_name = {table.name: table for table in tables}
    names = dict.fromkeys(FORMER_NAMES.get(name, name) for name in names)
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no table {name!r}", suggestion(name, by_name))
    rendered, measured_with = [], provenance(results)
    for name in names or by_name:
        table = by_name[name]
        try:
            grid, settings = table.lay_out(results), table.settings(results)
        except Exception as error:  # one table that fails must not cost the report
            settings = {}
            grid = TableGrid([], [Heading(_PROBLEM)], [[Entry(typed_error_text(error))]])
        if grid.rows:
            page = RenderedTable(table, grid, measured_with, settings=settings)
            rendered.append(_number_notes(page))
    return rendered


def _number_notes(page: RenderedTable) -> RenderedTable:
    """Replace the sentences in the column of notes by numbers, and list each sentence once."""
    if NOTES not in page.header:
        return page
    column = page.header.index(NOTES)
    numbers: dict[str, int] = {}
    rows = []
    for row in page.rows:
        notes = row[column].text.splitlines()
        own = {numbers.setdefault(note, len(numbers) + 1) for note in notes}
        text = ", ".join(map(str, sorted(own))) or NOTHING
        rows.append([*row[:column], Entry(text), *row[column + 1 :]])
    return replace(page, grid=page.grid._replace(rows=rows), notes=tuple(numbers))
