"""Everything about each cell, for the dialog of the page: parameters, attempts, samples and
artifacts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from orchestrator.analysis.cells import rows_of
from orchestrator.analysis.results import Results
from orchestrator.common.files import trim_memory
from orchestrator.report.tables.formatters import end_location
from orchestrator.store.run import Run

if TYPE_CHECKING:
    from orchestrator.store.artifacts import Artifacts

Series = tuple[int, list[float]]  # its place among the names of all series, and its values
_OF_AN_ATTEMPT = ("number", "status", "where", "started", "wall_s", "evidence")
_NAMES = ["instrument", "mode", "phase", "metric", "unit"]
_DIGITS = 6  # that are shown of a number; full precision is in the parts


@dataclass(frozen=True)
class Details:
    """The details of all cells. series: name and unit of each series of samples; cells refer to
    it by index.
    """

    series: list[tuple[str, str]]
    cells: Iterator[dict[str, Any]]


def read_details(
    run: Run, results: Results, read_artifacts: Callable[[str, int], Artifacts]
) -> Details:
    """Return details as JSON values. Samples and artifacts belong to each cell's valid attempt."""
    counting = (
        results.cells[["cell", "attempt"]]
        if "attempt" in results.cells
        else pd.DataFrame({"cell": [], "attempt": []})
    )
    samples = _Samples(
        rows_of(
            run.read("samples", ["cell", "attempt", *_NAMES, "value"], categories=True), counting
        )
    )
    trim_memory()
    return Details(samples.names, _cells(counting, _attempts(run), samples, read_artifacts))


def _cells(
    counting: pd.DataFrame,
    attempts: dict[str, list[dict[str, Any]]],
    samples: _Samples,
    read_artifacts: Callable[[str, int], Artifacts],
) -> Iterator[dict[str, Any]]:
    for cell, number in zip(counting["cell"], counting["attempt"], strict=True):
        made = [_described(row) for row in attempts[cell]]
        artifacts = read_artifacts(cell, number)
        yield {
            "cell": cell,
            "task": attempts[cell][-1]["task"],
            "status": next(attempt["status"] for attempt in made if attempt["number"] == number),
            "parameters": {
                name: str(value)
                for name, value in json.loads(attempts[cell][-1]["params"]).items()
                if value not in (None, {})
            },
            "attempts": [{name: attempt[name] for name in _OF_AN_ATTEMPT} for attempt in made],
            "samples": samples.of(cell),
            "log": "\n".join(artifacts.log),
            "by_hand": artifacts.rerun_command,
        }


def _attempts(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return the attempts of each cell in the order of their numbers."""
    columns = [
        "cell",
        "attempt",
        "task",
        "params",
        "status",
        "stage",
        "phase",
        "started_at",
        "wall_s",
        "evidence",
    ]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in run.read("attempts", columns).sort_values("attempt").to_dict("records"):
        found[row["cell"]].append({str(name): value for name, value in row.items()})
    return found


def _described(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": int(row["attempt"]),
        "status": row["status"],
        "where": end_location(row),
        "started": str(row["started_at"])[:19],
        "wall_s": round(row["wall_s"], 1),
        "evidence": {
            name: _text(name, value)
            for name, value in json.loads(row["evidence"]).items()
            if value != ""
        },
    }


class _Samples:
    """Samples sorted by cell and series, so that those of one cell are a slice.

    names: name and unit of each series, by index.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.names = [
            (" ".join(filter(None, name)), unit) for *name, unit in _distinct(rows[_NAMES])
        ]
        count = len(self.names)
        keys = rows["cell"].cat.codes.to_numpy().astype(np.int64) * count + _places(rows[_NAMES])
        order = np.argsort(keys, kind="stable")
        keys, self._values = keys[order], rows["value"].to_numpy()[order]
        begins = np.flatnonzero(np.diff(keys, prepend=-1))  # of each series of each cell
        self._begins, self._places = (
            np.append(begins, len(keys)),
            keys[begins] % count if count else begins,
        )
        cells = rows["cell"].cat.categories
        ends = np.searchsorted(keys[begins], np.arange(len(cells) + 1) * count)
        self._range = dict(zip(cells, pairwise(ends.tolist()), strict=True))

    def of(self, cell: str) -> list[Series]:
        """Return the series of a cell as index and values, in the order of steps. NaN stands for
        a failed reading.
        """
        first, last = self._range.get(cell, (0, 0))
        begins = self._begins[first : last + 1]
        values = _shortened(self._values[begins[0] : begins[-1]]).tolist()
        parts = pairwise((begins - begins[0]).tolist())
        places = self._places[first:last].tolist()
        return [
            (place, values[begin:end]) for place, (begin, end) in zip(places, parts, strict=True)
        ]


def _shortened(
    values: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Round values to six significant digits, so that their text is short; larger numbers to
    integers.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = _DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** np.clip(digits, 0, 300)
        short = np.round(values * scale) / scale
    return np.where(np.isfinite(short), short, values)


def _places(names: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the index of each row's names among the distinct ones, in the order of their first
    occurrence.
    """
    combined = np.zeros(len(names), dtype=np.int64)
    for name in names:
        combined = (
            combined * (len(names[name].cat.categories) + 1) + names[name].cat.codes.to_numpy()
        )
    return pd.factorize(combined)[0].astype(np.int32)


def _distinct(names: pd.DataFrame) -> list[list[str]]:
    return [[str(text) for text in row] for row in names.drop_duplicates().to_numpy()]


def _text(name: str, value: Any) -> str:
    return (
        f"{value:,}" if isinstance(value, int) and name.endswith("_bytes") else str(value).strip()
    )
