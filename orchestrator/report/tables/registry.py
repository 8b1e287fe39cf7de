"""All tables of the report, in the order in which it shows them.

No column of a table may have the name of a parameter, such as `optimizer`: that is the title of the
parameter's own column, which a table has if the parameter varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables.attention_tables import ATTENTION, ATTENTION_MEMORY
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.numerics_tables import NUMERICS_TABLES
from orchestrator.report.tables.table import Entry, Heading, RenderedTable, Table, TableGrid
from orchestrator.report.tables.timing_tables import TIMING_TABLES
from orchestrator.report.tables.tradeoff_tables import TRADEOFFS
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import typed_error_text

_PROBLEM = "this table cannot be made"

TABLES: tuple[Table, ...] = (
    *TIMING_TABLES,
    ATTENTION,
    ATTENTION_MEMORY,
    *MEMORY_TABLES,
    TRADEOFFS,
    *KERNEL_TABLES,
    *NUMERICS_TABLES,
)


def lay_out(
    results: Results, names: Iterable[str] = (), tables: Sequence[Table] = TABLES
) -> list[RenderedTable]:
    """Return the named tables, or all, without those that have no rows.

    Raise ConfigError for an unknown name.
    """
    by_name = {table.name: table for table in tables}
    names = dict.fromkeys(names)
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no table {name!r}", suggestion(name, by_name))
    rendered, measured_with = [], provenance(results)
    for name in names or by_name:
        table = by_name[name]
        try:
            chosen = table.choose(results)
            grid, settings = table.lay_out(chosen), table.settings(chosen)
        except Exception as error:  # one table that fails must not cost the report
            settings = {}
            grid = TableGrid([], [Heading(_PROBLEM)], [[Entry(typed_error_text(error))]])
        if grid.rows:
            rendered.append(RenderedTable(table, grid, measured_with, settings))
    return rendered
