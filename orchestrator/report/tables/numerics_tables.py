"""Tables of numerical experiments: sums, autocast and norms in low precision."""

from __future__ import annotations

from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.cell_filters import of_task
from orchestrator.report.tables.layouts import Column, cell_rows
from orchestrator.report.tables.table import Table


def _norm_columns(variant: str) -> tuple[Column, ...]:
    """Return the columns of one way to compute a norm: its error, and its share of NaN and inf."""
    return (
        (f"{variant} error", show.number(f"{variant}_error", ".2e")),
        (f"{variant} not finite", show.number(f"{variant}_nonfinite", ".0%")),
    )


NUMERICS_TABLES: tuple[Table, ...] = (
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
