"""From attempts and samples to one wide row a cell. Each group of columns is a function; adding one is adding an entry.

Times are in ms, sizes in bytes, as the names say. A column that nothing measured is not there; a cell that did not
come so far has null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.concurrency import hosts_of, neighbours
from orchestrator.analysis.cpu_bound import with_host
from orchestrator.analysis.memory_columns import (
    peaks,
    predicted_columns,
    saved_operations,
    snapshots,
    with_square_bytes,
)
from orchestrator.analysis.pivot import (
    ATTEMPT_KEY,
    pivot_samples,
    with_text_columns,
)
from orchestrator.analysis.profile_columns import (
    kernels,
    telemetry,
    with_kernel_time,
    with_profile_cost,
)
from orchestrator.analysis.throughput import with_rates, with_utilisation
from orchestrator.analysis.timing_columns import (
    drain,
    first_steps,
    host_lead,
    kernel_time,
    pipelined_durations,
    synced_durations,
    with_whole_step,
)
from orchestrator.common.files import trim_memory
from orchestrator.store.layout import RUN_SEPARATOR
from tasks.spec.facts import CELL_EVIDENCE, CELL_FACTS

# What the stages of an attempt are counted as; all others are of instruments.
_STAGES = {
    "process": "process",
    "start": "build",
    "build": "build",
    "compile": "warm_up",
    "warm-up": "warm_up",
    "timing synced": "timing",
    "timing pipelined": "timing",
}
TOOK = (*dict.fromkeys(_STAGES.values()), "instruments")


def derive_cells(
    attempts: pd.DataFrame, samples: pd.DataFrame, predictions: pd.DataFrame | None = None
) -> pd.DataFrame:
    """One row a cell, of the attempt that counts: the latest success, else the latest that says something.

    What was predicted_columns of a cell stands in its row however it ended.
    """
    if attempts.empty:
        return pd.DataFrame(
            {
                name: pd.Series(dtype=of)
                for name, of in (("cell", "string"), ("status", "string"), ("attempt", "Int32"))
            }
        )
    attempts = attempts.assign(neighbours=_neighbours(attempts))
    chosen = _chosen(attempts)
    rows = chosen.merge(_count_attempts(attempts), on="cell")
    params = _unfold(rows["params"])
    evidence, facts = _unfold(rows["evidence"]), _unfold(rows["facts"])
    wide = pd.concat(
        [
            rows[["cell", "task"]],
            params,
            rows[
                [
                    "status",
                    "stage",
                    "phase",
                    "attempt",
                    "attempts",
                    "repetitions",
                    "started_at",
                    "wall_s",
                    "neighbours",
                ]
            ],
            rows[["commit"]],
            _columns(facts, CELL_FACTS, taken=params),
            _columns(evidence, CELL_EVIDENCE, taken=params),
            facts.get("flops", pd.Series(dtype=object)).map(_total).rename("flops"),
            _took(facts),
        ],
        axis=1,
    )
    # What a cell measured before it failed stays in the samples: here it would pass for a result.
    measured = rows_of(samples, chosen.loc[chosen["status"] == "ok", ATTEMPT_KEY])
    for columns in (*(group(measured) for group in GROUPS), predicted_columns(predictions)):
        if len(columns):
            wide = wide.merge(columns, left_on="cell", right_index=True, how="left")
        trim_memory()
    wide = wide.copy()  # in one piece again, to which columns can be added
    whole = with_host(with_whole_step(wide))
    return with_square_bytes(
        with_profile_cost(with_kernel_time(with_utilisation(with_rates(whole))))
    ).apply(_nullable)


def rows_of(rows: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """The rows that are of one of `attempts`, at most one a cell. As `merge` would choose them, without its copies."""
    number = rows["cell"].map(attempts.set_index("cell")["attempt"])
    return rows[number.astype("float64") == rows["attempt"]]


def findings(samples: pd.DataFrame) -> pd.DataFrame:
    """What a task found once, such as `sum`, under its own name."""
    found = with_text_columns(samples[samples["instrument"] == "finding"])
    return pivot_samples(found.assign(column=found["metric"]))


GROUPS: tuple[Callable[[pd.DataFrame], pd.DataFrame], ...] = (
    synced_durations,
    pipelined_durations,
    kernel_time,
    first_steps,
    drain,
    host_lead,
    peaks,
    saved_operations,
    telemetry,
    findings,
    kernels,
    snapshots,
)


def _nullable(column: pd.Series[Any]) -> pd.Series[Any]:
    """Dtypes that know null. What is measured stays a floating-point number also where all values happen to be whole."""
    floating = pd.api.types.infer_dtype(column, skipna=True) in ("floating", "mixed-integer-float")
    return column.astype("Float64") if floating else column.convert_dtypes()


def _chosen(attempts: pd.DataFrame) -> pd.DataFrame:
    worth = attempts["status"].map({"ok": 2, "lost": 0}).fillna(1)
    ordered = attempts.assign(_worth=worth).sort_values(["cell", "_worth", "attempt"])
    return ordered.groupby("cell", sort=False).tail(1).drop(columns="_worth").reset_index(drop=True)


def _count_attempts(attempts: pd.DataFrame) -> pd.DataFrame:
    """Count the attempts of each cell, and its successes that were not replaced."""
    counting = that_count(attempts).groupby("cell")
    counts = pd.DataFrame(
        {"attempts": attempts.groupby("cell").size(), "repetitions": counting.size()}
    )
    return counts.fillna(0).astype(int).reset_index(names="cell")


def that_count(attempts: pd.DataFrame) -> pd.DataFrame:
    """The successes of each cell that no other was measured in place of."""
    well = attempts[attempts["status"] == "ok"]
    replaced_until = well["cell"].map(well.groupby("cell")["replaces"].max())
    return well[well["attempt"] > replaced_until.astype("float64").fillna(0)]


def _neighbours(attempts: pd.DataFrame) -> pd.Series[float]:
    # Of runs that are read together each has hosts of its own: two machines may have one name.
    runs = [str(cell).rpartition(RUN_SEPARATOR)[0] for cell in attempts["cell"]]
    hosts = [
        host and f"{run}:{host}"
        for run, host in zip(runs, hosts_of(attempts["facts"]), strict=True)
    ]
    return neighbours(attempts[["started_at", "wall_s"]].assign(host=hosts))


_NESTED = (dict, list)


def _unfold(column: pd.Series[Any]) -> pd.DataFrame:
    """A column of JSON objects as columns; what is itself an object stays JSON text."""
    rows = [json.loads(text) for text in column]
    frame = pd.DataFrame(
        rows, index=column.index, dtype=object
    )  # numbers keep their kind beside a null
    for name in {name for row in rows for name, value in row.items() if isinstance(value, _NESTED)}:
        frame[name] = frame[name].map(
            lambda value: json.dumps(value) if isinstance(value, _NESTED) else value
        )
    return frame


def _took(facts: pd.DataFrame) -> pd.DataFrame:
    """`took_process_s`, …: what the seconds of an attempt, `wall_s`, are made of."""
    if "stage_s" not in facts:
        return pd.DataFrame(index=facts.index)
    rows = [_spent(json.loads(text)) if isinstance(text, str) else {} for text in facts["stage_s"]]
    return pd.DataFrame(
        rows, index=facts.index, columns=[f"took_{what}_s" for what in TOOK], dtype="float64"
    )


def _spent(stage_s: Mapping[str, float]) -> Mapping[str, float]:
    spent = dict.fromkeys((f"took_{what}_s" for what in TOOK), 0.0)
    for stage, seconds in stage_s.items():
        spent[f"took_{_STAGES.get(stage, 'instruments')}_s"] += seconds
    return spent


def _columns(frame: pd.DataFrame, names: tuple[str, ...], taken: pd.DataFrame) -> pd.DataFrame:
    return frame[[name for name in names if name in frame.columns and name not in taken.columns]]


def _total(flops: Any) -> float:
    return float(sum(json.loads(flops).values())) if isinstance(flops, str) else np.nan
