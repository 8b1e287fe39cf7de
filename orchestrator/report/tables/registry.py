"""All tables of the report, in the order in which it shows them.

No column of a table may have the name of a parameter, such as `optimizer`: that is the title of the
parameter's own column, which a table has if the parameter varies.
"""

from __future__ import annotations

from orchestrator.report.tables.allocation_tables import ALLOCATION_TABLES
from orchestrator.report.tables.attention_tables import (
    ATTENTION,
    ATTENTION_AXIS,
    ATTENTION_COMPILE,
    ATTENTION_LADDER,
    ATTENTION_MEMORY,
    ATTENTION_SCALING,
)
from orchestrator.report.tables.compile_tables import COMPILATION, COMPILE, JIT, PRECISION
from orchestrator.report.tables.kernel_tables import KERNEL_TABLES
from orchestrator.report.tables.memory_tables import MEMORY_TABLES
from orchestrator.report.tables.numerics_tables import ACCUMULATION, AUTOCAST_DTYPES, NORMS
from orchestrator.report.tables.status_tables import FAILURES, TIME_SPENT
from orchestrator.report.tables.table import Table
from orchestrator.report.tables.timing_tables import (
    CEILING,
    CPU_BOUND,
    MODES,
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
    CEILING,
    COMPILE,
    COMPILATION,
    JIT,
    ATTENTION,
    ATTENTION_COMPILE,
    ATTENTION_LADDER,
    ATTENTION_MEMORY,
    ATTENTION_AXIS,
    MODES,
    CPU_BOUND,
    *MEMORY_TABLES,
    SCALING,
    ATTENTION_SCALING,
    ACCUMULATION,
    AUTOCAST_DTYPES,
    NORMS,
    *ALLOCATION_TABLES,
    *KERNEL_TABLES,
    TIME_SPENT,
    FAILURES,
)
