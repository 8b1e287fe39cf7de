"""Derivation of one wide row per cell, from attempts, samples and predictions.

A column that no attempt filled is left out, except for `flops`; a row without a value has null.
The ending of a name gives the unit: `_ms`, `_s`, `_bytes`. Where a column comes from:

- parameters of the cell, and columns of its attempt (`_ATTEMPT_COLUMNS`; `RUN_FIELDS` describes the
  computed ones);
- facts and evidence that tasks/spec/facts.py marks as columns;
- samples and predictions, as tasks/spec/metrics.py declares their columns;
- other columns: functions with `@derived` in the modules imported here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

# These are imported first because this registers their derived fields, in the order of columns.
from orchestrator.analysis import cpu_bound, throughput  # noqa: F401
from orchestrator.analysis.cpu_bound import concurrent_attempts
from orchestrator.analysis.derived_fields import (
    DerivedField,
    add_derived_fields,
    apply_to_sound_cells,
)
from orchestrator.analysis.memory_columns import latest_predictions, undeclared_columns, with_value
from orchestrator.analysis.metric_columns import join_columns, metric_columns
from orchestrator.analysis.timing_columns import (
    ATTEMPT_KEY,
    host_lead,
    repeated_steps,
    with_profiled_kernel_time,
)
from orchestrator.common.files import trim_memory
from orchestrator.store.cell_state import CellState, Marks, StoredAttempt, states_of
from orchestrator.store.layout import RUN_SEPARATOR
from tasks.spec.axes import Values, select
from tasks.spec.cell import dotted_values
from tasks.spec.facts import CELL_EVIDENCE, CELL_FACTS, EVIDENCE, FACTS
from tasks.spec.fields import Dtype, Fact
from tasks.spec.metrics import METRICS, PREDICTED_METRICS, Metric, metric_named
from tasks.spec.parameters import computes_own_attention

# Stage of an attempt -> group of TIME_SPENT. All other stages are those of instruments.
_STAGE_GROUPS = {
    "process": "process",
    "start": "build",
    "build": "build",
    "compile": "warm_up",
    "warm-up": "warm_up",
    "timing synced": "timing",
    "timing pipelined": "timing",
}
TIME_SPENT = {
    "process": "starting and ending the attempt's process",
    "build": "opening the device and building what is measured",
    "warm_up": "compiling and warm-up, with the first steps of adaptive timing",
    "timing": "timed steps",
    "instruments": "all other instruments",
}
_LARGEST_INTEGER = 2.0**63  # of a column of integers
_MAX = sys.float_info.max
# pandas looks a dtype up by its name for half of the time that a conversion of a few cells takes.
_NUMBERS, _TEXTS = pd.Float64Dtype(), pd.StringDtype()
_ATTEMPT_COLUMNS = (
    "status",
    "stage",
    "phase",
    "attempt",
    "attempts",
    "repetitions",
    "started_at",
    "wall_s",
    "concurrent_attempts",
    "commit",
)
RUN_FIELDS: tuple[DerivedField, ...] = (
    DerivedField("run", "name of the run, if several are read as one"),
    DerivedField("attempts", "number of attempts at the cell"),
    DerivedField(
        "repetitions",
        "number of successful attempts that were not replaced: the row shows the last one, and "
        "`sweep compare` uses all",
    ),
    *(
        DerivedField(
            f"repeated_ms_{statistic}", f"{statistic} of the step's median over repetitions", "ms"
        )
        for statistic in ("median", "min", "max")
    ),
    DerivedField(
        "concurrent_attempts",
        "number of other attempts of the run on the same host, on average over the attempt's time",
    ),
    DerivedField(
        "flops", "operations of a step, by the closed form, or else `counted_flops`", "FLOP"
    ),
    *(
        DerivedField(f"time_{group}_s", f"part of `wall_s`: {doc}", "s")
        for group, doc in TIME_SPENT.items()
    ),
)


def derive_cells(
    attempts: pd.DataFrame,
    samples: pd.DataFrame,
    predictions: pd.DataFrame | None = None,
    marks: Marks = MappingProxyType({}),
) -> pd.DataFrame:
    """Return one row per cell.

    The row shows the attempt that counts (see orchestrator/store/cell_state.py) and the latest
    prediction. Without attempts, the frame has three columns and no row. marks: of `Run.marks`.
    """
    if attempts.empty:
        dtypes = {"cell": "string", "status": "string", "attempt": "Int32"}
        return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()})
    # Where several runs are read as one, hosts of different runs may have the same name.
    runs = attempts["cell"].astype(str).str.rpartition(RUN_SEPARATOR)[0]
    facts = attempts["facts"].map(json.loads)
    hosts = facts.map(lambda known: str(known.get("host") or ""))
    placed = attempts.assign(facts=facts, host=(runs + ":" + hosts).where(hosts != "", ""))
    attempts = placed.assign(concurrent_attempts=concurrent_attempts(placed))
    states = _states(attempts, marks)
    shown = _shown_attempts(attempts, states)
    cells = _from_attempts(shown)
    # Samples of a failed attempt would look like results.
    measured = rows_of(samples, shown.loc[shown["status"] == "ok", ATTEMPT_KEY])
    metrics = list(METRICS)
    if (measured["instrument"] == "finding").any():
        metrics += _findings_of_other_tasks(measured)
    parts = [metric_columns(measured, metrics)]
    if (measured["metric"] == "lead").any():  # only GPUs have it
        parts.append(apply_to_sound_cells(host_lead, measured))
    if predictions is not None and not predictions.empty:
        parts.append(apply_to_sound_cells(_predicted_columns, predictions))
    repeated = [cell for cell, state in states.items() if len(state.valid) > 1]
    if repeated:
        valid = valid_attempts(attempts[attempts["cell"].isin(repeated)], marks)[ATTEMPT_KEY]
        of_cells = samples[samples["cell"].isin(repeated)]  # a merge would copy all samples
        parts.append(apply_to_sound_cells(repeated_steps, of_cells.merge(valid, on=ATTEMPT_KEY)))
    columns = join_columns(parts)
    trim_memory()  # the copies of the samples are free now, and the join below is large
    cells = cells.merge(columns, left_on="cell", right_index=True, how="left").copy()
    if "counted_flops" in cells:
        cells["flops"] = cells["flops"].fillna(cells["counted_flops"])
    if {"busy", "profiled_step_ms"} <= set(cells):
        cells = apply_to_sound_cells(with_profiled_kernel_time, cells)
    cells = add_derived_fields(cells)
    # As arrays: pandas would align the index of each of a hundred columns.
    arrays = {str(name): _nullable(column).array for name, column in cells.items()}
    return pd.DataFrame(arrays, index=cells.index, copy=False)


def _from_attempts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the parameters, the end, the facts and the evidence of each cell's shown attempt.

    rows: the shown attempts, whose facts are parsed.
    """
    # A key of a mapping is a further parameter, such as `model_args.layers`.
    values = list(map(json.loads, rows["params"]))
    for one in values:
        if "attention" in one and computes_own_attention(one.get("model")):
            one["attention"] = None  # it means nothing for this model
    params = _unfold([{**one, **dotted_values(one)} for one in values], rows.index)
    recorded = list(rows["facts"])
    of_cells = [select(one, CELL_FACTS) for one in recorded]
    facts = _typed(_unfold(of_cells, rows.index), FACTS)
    evidence = _typed(_unfold(map(json.loads, rows["evidence"]), rows.index), EVIDENCE)
    ending = rows[[*_ATTEMPT_COLUMNS]]
    if ending["concurrent_attempts"].isna().all():
        ending = ending.drop(columns="concurrent_attempts")
    by_phase = [_numbers(one.get("flops")) for one in recorded]
    totals = [float(sum(known.values())) if known else np.nan for known in by_phase]
    flops = pd.Series(totals, index=rows.index, name="flops")
    # A task of the user's own may have a parameter with the name of a fact; the parameter counts.
    columns = facts.filter(CELL_FACTS).join(evidence.filter(CELL_EVIDENCE))
    columns = columns.drop(columns=list(params), errors="ignore")
    time_spent = _time_spent([one.get("stage_s") for one in recorded], rows.index)
    return pd.concat([rows[["cell", "task"]], params, ending, columns, flops, time_spent], axis=1)


def _findings_of_other_tasks(samples: pd.DataFrame) -> list[Metric]:
    """Return a metric for each result of tasks of the user's own, which declare no metrics here."""
    metrics = []
    for name in samples.loc[samples["instrument"] == "finding", "metric"].unique():
        try:
            metric_named("finding", str(name))
        except KeyError:
            metrics.append(Metric("finding", str(name), "", ""))
    return metrics


def _predicted_columns(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the latest prediction of each cell."""
    latest = latest_predictions(predictions)
    declared = metric_columns(with_value(latest), PREDICTED_METRICS)
    return join_columns([declared, undeclared_columns(latest)])


def rows_of(rows: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that belong to `attempts`, which has at most one attempt per cell."""
    # A merge would give the same rows, but copies both frames.
    # As floats: a cell without an attempt then gets NaN, which equals no number.
    number = rows["cell"].map(attempts.set_index("cell")["attempt"].astype("float64"))
    return rows[number.astype("float64") == rows["attempt"]]


def _shown_attempts(attempts: pd.DataFrame, states: Mapping[str, CellState]) -> pd.DataFrame:
    """Return the row of each cell's shown attempt, and how many attempts and repetitions it has."""
    rows = []
    for cell, state in states.items():
        shown = state.shown.number if state.shown else 0
        rows.append((cell, shown, len(state.attempts), len(state.valid)))
    counts = pd.DataFrame(rows, columns=["cell", "attempt", "attempts", "repetitions"])
    return counts.astype({"attempt": attempts["attempt"].dtype}).merge(attempts, on=ATTEMPT_KEY)


def valid_attempts(attempts: pd.DataFrame, marks: Marks) -> pd.DataFrame:
    """Return the successful attempts without those that a later success replaced.

    `--retry` and `--fresh` replace attempts; `--repeat` does not. marks: of `Run.marks`.
    """
    valid = []
    for cell, state in _states(attempts, marks).items():
        valid += [(cell, number) for number in state.valid]
    return attempts.merge(pd.DataFrame(valid, columns=ATTEMPT_KEY), on=ATTEMPT_KEY)


def _states(attempts: pd.DataFrame, marks: Marks) -> dict[str, CellState]:
    replaces = attempts["replaces"].fillna(0).astype(int)
    columns = (attempts["cell"], attempts["attempt"], attempts["status"], replaces)
    return states_of(map(StoredAttempt, *columns), marks)


def _unfold(rows: Iterable[Values], index: pd.Index) -> pd.DataFrame:
    """Return JSON objects, one for each entry of the index, as one column per key.

    Objects and lists within them are JSON text, and so are all values of a dotted key whose values
    have several types: unlike an axis, a key of `model_args` has no declared type.
    """
    # dtype object: integers must not become floats where another row has null.
    frame = pd.DataFrame(list(rows), index=index, dtype=object)
    for name in frame:
        if "." in str(name) and not _fit_one_column(frame[name]):
            frame[name] = frame[name].map(json.dumps, na_action="ignore")
        elif any(isinstance(value, (dict, list)) for value in frame[name]):
            frame[name] = frame[name].map(
                lambda value: json.dumps(value) if isinstance(value, (dict, list)) else value
            )
    return frame


def _fit_one_column(values: pd.Series) -> bool:
    """True if all values are numbers, or all have one other type."""
    present = values.dropna()
    are_numbers = list(map(_is_number, present))
    return all(are_numbers) or (not any(are_numbers) and present.map(type).nunique() <= 1)


def _time_spent(stages_s: Sequence[object], index: pd.Index) -> pd.DataFrame:
    """Return `time_process_s` and so on: the parts of an attempt's `wall_s`.

    stages_s: of each attempt, the duration of its stages; None if unknown.
    """
    if all(one is None for one in stages_s):
        return pd.DataFrame(index=index)
    columns = [f"time_{group}_s" for group in TIME_SPENT]
    rows = []
    for known in map(_numbers, stages_s):
        sums = dict.fromkeys(columns, 0.0) if known else {}
        for stage, seconds in known.items():
            sums[f"time_{_STAGE_GROUPS.get(stage, 'instruments')}_s"] += seconds
        rows.append(sums)
    return pd.DataFrame(rows, index=index, columns=columns, dtype="float64")


def _numbers(value: object) -> dict[str, float]:
    """Return a JSON object of numbers; an empty one for anything else."""
    if isinstance(value, dict) and all(map(_is_number, value.values())):
        return value
    return {}


def _is_number(value: object) -> bool:
    # Integers in JSON may be larger than the largest float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX


def _typed(facts: pd.DataFrame, declared: Sequence[Fact]) -> pd.DataFrame:
    """Return the facts, in which each value that its column cannot hold is replaced by null."""
    for fact in declared:
        if fact.name in facts:
            has_type = facts[fact.name].map(_HAS_TYPE[fact.dtype])
            if not has_type.all():
                facts[fact.name] = facts[fact.name].where(has_type.astype(bool), None)
    return facts


_HAS_TYPE: Mapping[Dtype, Callable[[Any], bool]] = {
    Dtype.INT64: lambda value: _is_number(value) and abs(value) < _LARGEST_INTEGER,
    Dtype.FLOAT: _is_number,
    Dtype.BOOL: lambda value: isinstance(value, bool),
    Dtype.TEXT: lambda value: isinstance(value, str),
    Dtype.JSON: lambda value: isinstance(value, str),
}


def _nullable(column: pd.Series) -> pd.Series:
    # `convert_dtypes` alone would turn measured values into integers if all happen to be whole.
    if column.dtype == np.float64:
        return column.astype(_NUMBERS)
    inferred = pd.api.types.infer_dtype(column, skipna=True)
    if inferred in ("floating", "mixed-integer-float"):
        return column.astype(_NUMBERS)
    # Where it is known to suffice, astype takes half of the time.
    return column.astype(_TEXTS) if inferred == "string" else column.convert_dtypes()
