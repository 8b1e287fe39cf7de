"""All that is known of each cell, for the page that a link opens: its parameters, its attempts, samples and artifacts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from orchestrator.report.frames import Results
from orchestrator.report.values import where_it_ended

if TYPE_CHECKING:
    from orchestrator.artifacts import Artifacts
    from orchestrator.store import Run

Series = dict[str, Any]
_OF_AN_ATTEMPT = ("number", "status", "where", "started", "wall_s", "evidence")
_DIGITS = 6  # significant ones: full precision is in the parts


def read_details(run: Run, results: Results, read_artifacts: Callable[[str, int], Artifacts]) -> Iterator[dict[str, Any]]:
    """One a cell, as JSON takes it. Samples and artifacts are of the attempt that counts."""
    counting = dict(zip(results.cells["cell"], results.cells.get("attempt", ()), strict=True))
    attempts, samples = _attempts(run), _samples(run, counting)
    for cell, number in counting.items():
        last = attempts[cell][-1]
        artifacts = read_artifacts(cell, number)
        yield {
            "cell": cell,
            "task": last["task"],
            "status": next(attempt["status"] for attempt in attempts[cell] if attempt["number"] == number),
            "parameters": {name: str(value) for name, value in last["params"].items() if value not in (None, {})},
            "attempts": [{name: attempt[name] for name in _OF_AN_ATTEMPT} for attempt in attempts[cell]],
            "samples": samples.get(cell, []),
            "log": "\n".join(artifacts.log),
            "by_hand": artifacts.by_hand,
        }


def _attempts(run: Run) -> dict[str, list[dict[str, Any]]]:
    """By cell, in the order of their numbers."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in run.read("attempts").sort_values("attempt").to_dict("records"):
        found[row["cell"]].append(
            {
                "number": int(row["attempt"]),
                "task": row["task"],
                "params": json.loads(row["params"]),
                "status": row["status"],
                "where": where_it_ended(row),
                "started": str(row["started_at"])[:19],
                "wall_s": round(row["wall_s"], 1),
                "evidence": {name: _text(name, value) for name, value in json.loads(row["evidence"]).items() if value != ""},
            }
        )
    return found


def _samples(run: Run, counting: dict[str, int]) -> dict[str, list[Series]]:
    """By cell, the values of each series in the order of their steps; null where nothing could be read."""
    columns = ["cell", "attempt", "instrument", "mode", "phase", "metric", "unit", "value"]
    by_cell: dict[str, dict[tuple[str, ...], list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for cell, attempt, *names, value in run.rows("samples", columns):
        if counting.get(cell) == attempt:
            by_cell[cell][tuple(names)].append(_rounded(value))
    return {
        cell: [{"name": " ".join(filter(None, name)), "unit": unit, "values": values} for (*name, unit), values in series.items()]
        for cell, series in by_cell.items()
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def _text(name: str, value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and name.endswith("_bytes") else str(value).strip()
