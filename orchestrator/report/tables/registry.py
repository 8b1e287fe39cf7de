"""All tables of the report, in the order in which it shows them, with those of numerics.

No column of a table may have the name of a parameter, such as `optimizer`: that is the title of the
parameter's own column, which a table has if the parameter varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.analysis.results import Results
from orchestrator.common.errors import ConfigError
from orchestrator.common.suggestions import suggestion
from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.best_table import BEST_TABLE
from orchestrator.report.tables.comparison_tables import ATTENTION, ATTENTION_MEMORY, TRADEOFFS
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.layouts import Measure, cell_rows, of_task
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.parallel_tables import PARALLEL_TABLES
from orchestrator.report.tables.table import Entry, RenderedTable, Table, grid_of_rows
from orchestrator.report.tables.timing_tables import TIMING_TABLES
from orchestrator.report.text.provenance import provenance
from tasks.spec.messages import typed_error_text

_PROBLEM = "this table cannot be made"


def _norm_columns(variant: str) -> tuple[Measure, ...]:
    """Return the columns of one way to compute a norm: its error, and its share of NaN and inf."""
    return (
        (f"{variant} error", show.number(f"{variant}_error", ".2e")),
        (f"{variant} not finite", show.number(f"{variant}_nonfinite", ".0%")),
    )


_NUMERICS: tuple[Table, ...] = (
    Table(
        "accumulation",
        "Sums in low precision",
        "The computed sum and its error. `upcast`: each addend is cast before it is added."
        " `at_once`: torch's sum, which accumulates in fp32 whatever dtype its result has.",
        cell_rows(("sum", show.number("sum", ".9f")), ("error", show.number("error", "+.9f"))),
        of_task("accumulation"),
    ),
    Table(
        "autocast-dtypes",
        "Dtypes under autocast",
        "The dtypes in a small model on the named device. CPU and CUDA treat the norm differently.",
        cell_rows(
            ("on", show.text("device")),
            show.col("dtype_parameters", "parameters"),
            show.col("dtype_fc1", "first linear"),
            show.col("dtype_relu", "ReLU"),
            show.col("dtype_norm", "norm's result"),
            show.col("dtype_logits", "logits"),
            show.col("dtype_loss", "loss's dtype"),
            show.col("dtype_gradients", "gradients"),
        ),
        of_task("autocast_dtypes"),
    ),
    Table(
        "norms",
        "Norms in low precision",
        "The largest error relative to the root mean square of the exact result, and the share of"
        " elements that are NaN or infinite. narrow: computed in the dtype; wide: computed in fp32"
        " and rounded once; library: torch's own kernel.",
        cell_rows(*_norm_columns("narrow"), *_norm_columns("wide"), *_norm_columns("library")),
        of_task("norm_sensitivity"),
    ),
)

TABLES: tuple[Table, ...] = (
    *TIMING_TABLES,
    ATTENTION,
    ATTENTION_MEMORY,
    *MEMORY_TABLES,
    TRADEOFFS,
    BEST_TABLE,
    *KERNEL_TABLES,
    *PARALLEL_TABLES,
    *_NUMERICS,
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
            page = table.render(results, measured_with)
        except Exception as error:  # one table that fails must not cost the report
            grid = grid_of_rows([], [_PROBLEM], [[Entry(typed_error_text(error))]])
            page = RenderedTable(table, grid, measured_with)
        if page.grid.columns:
            rendered.append(page)
    return rendered
