"""Details of each cell for the dialog of the page: parameters, attempts, samples and artifacts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from orchestrator.analysis.cells import rows_of
from orchestrator.analysis.results import Results, read_attempts
from orchestrator.common.files import trim_memory
from orchestrator.common.text import evidence_text, parameter_texts
from orchestrator.report.tables.formatters import end_location
from orchestrator.store.run import Run

if TYPE_CHECKING:
    from orchestrator.store.artifacts import Artifacts

Series = tuple[int, list[float]]  # index among the names of all series, and values
_ATTEMPT_COLUMNS = ["cell", "attempt", "task", "params", "status", "stage", "phase", "started_at"]
_NAMES = ["instrument", "mode", "phase", "metric", "unit"]
# Significant digits of a number on the page. The Parquet parts have full precision.
_DIGITS = 6


@dataclass(frozen=True)
class Details:
    """Details of all cells.

    series: name and unit of each series of samples; cells refer to it by index.
    """

    series: list[tuple[str, str]]
    cells: Iterator[dict[str, Any]]


def read_details(
    run: Run, results: Results, read_artifacts: Callable[[str, int], Artifacts]
) -> Details:
    """Return details as JSON values. Samples and artifacts belong to each cell's shown attempt."""
    # A run without any attempt has no such columns.
    shown = results.cells.reindex(columns=["cell", "attempt"]).dropna()
    columns = ["cell", "attempt", *_NAMES, "value"]
    samples = _Samples(rows_of(run.read("samples", columns, categories=True), shown))
    trim_memory()  # the samples of other attempts are free now
    attempts = read_attempts(run, [*_ATTEMPT_COLUMNS, "wall_s", "evidence"])
    # One conversion of all rows: a frame for each of 2,500 cells took 8 s more.
    by_cell: dict[str, list[dict[Any, Any]]] = defaultdict(list)
    for row in attempts.sort_values("attempt").to_dict("records"):
        by_cell[row["cell"]].append(row)

    def details() -> Iterator[dict[str, Any]]:
        for cell, number in zip(shown["cell"], shown["attempt"], strict=True):
            artifacts = read_artifacts(cell, number)
            own = _attempt_details(by_cell[cell], number)
            yield own | {
                "cell": cell,
                "samples": samples.of(cell),
                "log": "\n".join(artifacts.log),
                "by_hand": artifacts.rerun_command,
            }

    return Details(samples.names, details())


def _attempt_details(attempts: Sequence[dict[Any, Any]], number: int) -> dict[str, Any]:
    """Return the details that are in the attempts of one cell. `number`: the shown attempt."""
    made = []
    for row in attempts:
        evidence = {}
        for name, value in json.loads(row["evidence"]).items():
            if value != "":
                evidence[name] = evidence_text(name, value)
        made.append(
            {
                "number": int(row["attempt"]),
                "status": row["status"],
                "where": end_location(row),
                "started": str(row["started_at"])[:19],
                "wall_s": round(row["wall_s"], 1),
                "evidence": evidence,
            }
        )
    return {
        "task": attempts[-1]["task"],
        "status": next(row["status"] for row in attempts if row["attempt"] == number),
        "parameters": parameter_texts(attempts[-1]["params"]),
        "attempts": made,
    }


class _Samples:
    """Samples sorted by cell and series, so that those of one cell are a slice.

    names: name and unit of each series, by index.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        series = _series_indices(rows[_NAMES])
        distinct = rows[_NAMES].drop_duplicates().astype(str)
        self.names = [(" ".join(filter(None, name)), unit) for *name, unit in distinct.to_numpy()]
        # One number stands for cell and series, so that one sort puts the values of each together.
        count = max(len(self.names), 1)
        keys = rows["cell"].cat.codes.to_numpy().astype(np.int64) * count + series
        order = np.argsort(keys, kind="stable")
        keys, self._values = keys[order], rows["value"].to_numpy()[order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))  # of each series of each cell
        self._begins = np.append(begins, len(keys))
        self._series = keys[begins] % count
        cells = rows["cell"].cat.categories
        ends = np.searchsorted(keys[begins], np.arange(len(cells) + 1) * count)
        self._range = dict(zip(cells, pairwise(ends.tolist()), strict=True))

    def of(self, cell: str) -> list[Series]:
        """Return the series of a cell, in the order of steps. NaN stands for a failed reading."""
        first, last = self._range.get(cell, (0, 0))
        if first == last:
            return []
        begins = self._begins[first : last + 1]
        values = _shortened(self._values[begins[0] : begins[-1]])
        parts = np.split(values, begins[1:-1] - begins[0])
        series = self._series[first:last].tolist()
        return [(index, part.tolist()) for index, part in zip(series, parts, strict=True)]


def _shortened(
    values: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Round values to six significant digits, so that their text is short."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = _DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(digits, 0, 300)
        short = np.round(values * scale) / scale
    return np.where(np.isfinite(short), short, values)


def _series_indices(names: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the index of each row's series, in the order of their first occurrence."""
    combined = np.zeros(len(names), dtype=np.int64)
    for name in names:
        codes = names[name].cat.codes.to_numpy()
        combined = combined * (len(names[name].cat.categories) + 1) + codes
    return pd.factorize(combined)[0].astype(np.int32)
