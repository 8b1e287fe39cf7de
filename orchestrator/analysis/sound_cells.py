"""Derive columns so that one abnormal cell costs only its own values, and no other cell's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pandas as pd

Derived = TypeVar("Derived")


def apply_to_sound_cells(compute: Callable[[pd.DataFrame], Derived], rows: pd.DataFrame) -> Derived:
    """Return compute(rows), leaving out each cell for which the computation fails by itself.

    rows: have the column `cell`. Raise the error of `compute` if no single cell causes it.
    """
    try:
        with np.errstate(all="ignore"):
            return compute(rows)
    except Exception:
        unsound = []
        for cell, own in rows.groupby("cell", observed=True, sort=False):
            try:
                compute(own)
            except Exception:
                unsound.append(cell)
        if not unsound:
            raise
    return compute(rows[~rows["cell"].isin(unsound)])


def quotients(numerator: pd.Series[float], denominator: pd.Series[float]) -> pd.Series[float]:
    """Return the quotients, null where the divisor is not above 0 or the result is not finite."""
    above = pd.to_numeric(numerator, errors="coerce").astype("float64")
    below = pd.to_numeric(denominator, errors="coerce").astype("float64")
    quotient = above / below.where(below > 0)
    return quotient.where(quotient.abs() < float("inf"))
