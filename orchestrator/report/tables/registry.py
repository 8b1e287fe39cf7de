"""All tables of the report, in the order in which it shows them.

No column of a table may have the name of a parameter, such as `optimizer`: that is the title of the
parameter's own column, which a table has if the parameter varies.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.report.tables.allocation_tables import ALLOCATION_TABLES
from orchestrator.report.tables.attention_tables import (
    ATTENTION,
    ATTENTION_COMPILE,
    ATTENTION_LADDER,
    ATTENTION_MEMORY,
)
from orchestrator.report.tables.compile_tables import COMPILATION, COMPILE, PRECISION
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.numerics_tables import ACCUMULATION, AUTOCAST_DTYPES, NORMS
from orchestrator.report.tables.status_tables import FAILURES, TIME_SPENT
from orchestrator.report.tables.table import Table
from orchestrator.report.tables.timing_tables import (
    CPU_BOUND,
    PHASES,
    SCALING,
    TIMINGS,
    UTILISATION,
    WARMUP,
)

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
