"""Kernels of cells as plain rows, with their time in a step, and the time of parts of the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from tasks.spec.tables import OUTSIDE_OPERATORS

GEMM = "GEMM"
ATTENTION_MATMULS = ("scores", "attention output")


class TimedKernel(NamedTuple):
    """Kernels of one name, class, phase and module.

    ms, kernels: milliseconds and number, of a step if the number of steps is known. The others are
    statistics of all instances in the trace.
    """

    name: str
    phase: str
    kernel_class: str
    module: str
    ms: float
    kernels: float
    instances: int
    total_ns: float
    mean_ns: float
    median_ns: float
    min_ns: float
    max_ns: float
    sd_ns: float


def inside_operators(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return the kernels that operators launched."""
    return kernels[kernels["name"] != OUTSIDE_OPERATORS]


def rows_by_cell(kernels: pd.DataFrame) -> defaultdict[str, list[TimedKernel]]:
    """Return the kernels of each cell as plain rows, for which pandas needs seconds.

    They are grouped per cell, phase and part, and most of these frames would have a few rows.
    """
    by_cell: defaultdict[str, list[TimedKernel]] = defaultdict(list)
    columns = per_step(kernels)[["cell", *TimedKernel._fields]]
    for cell, *values in columns.itertuples(index=False):
        by_cell[cell].append(TimedKernel(*values))
    return by_cell


def ms_of_parts(kernels: Iterable[TimedKernel], names: Collection[str]) -> float | None:
    """Return the milliseconds that some parts of the model take.

    Return None if there is no kernel of them, or if one of them is fused with another part.
    """
    total_ms = 0.0
    for module, ms in sums(kernels, "module").items():
        # The compiler names a fused kernel after all its parts, such as `scores+softmax`. Its time
        # cannot be divided, and without it the rest would look too fast.
        parts = set(str(module).split("+"))
        if parts <= set(names):
            total_ms += ms
        elif parts & set(names):
            return None
    return total_ms or None


def softmax_and_products_ms(
    kernels: Sequence[TimedKernel],
) -> tuple[float | None, float | None]:
    """Return the milliseconds of the softmax of attention and of its two matrix products.

    None: see `ms_of_parts`.
    """
    products = [one for one in kernels if one.kernel_class == GEMM]
    return ms_of_parts(kernels, ("softmax",)), ms_of_parts(products, ATTENTION_MATMULS)


def sums(kernels: Iterable[TimedKernel], key: str, summed: str = "ms") -> dict[str, float]:
    """Return the sum of a field for each value of another one."""
    values: dict[str, list[float]] = defaultdict(list)
    for one in kernels:
        values[getattr(one, key)].append(getattr(one, summed))
    return {value: math.fsum(own) for value, own in values.items()}


def per_step(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return kernels with `ms` and number of a step, or of the whole trace without its steps."""
    times_ms = kernels["ms"].fillna(kernels["total_ns"] / 1e6)
    counts = (kernels["count"] / kernels["steps"]).fillna(kernels["count"])
    return kernels.assign(ms=times_ms, kernels=counts, instances=kernels["count"])
