"""From attempts and samples to one wide row a cell. Each group of columns is a function; adding one is adding an entry.

Times are in ms, sizes in bytes, as the names say. A column that nothing measured is not there; a cell that did not
come so far has null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.concurrency import hosts_of, neighbours
from orchestrator.analysis.cpu_bound import with_host
from orchestrator.analysis.statistics import STATISTICS, summarise
from orchestrator.hardware.gpu_catalog import peak_tflops
from orchestrator.store.parquet_parts import give_back_memory
from orchestrator.store.run_collection import MARK

_KEY = ["cell", "attempt"]
_OPERATION = "saved_operation_bytes"
_SAVED = (
    "saved_bytes",
    "saved_square_bytes",
    "saved_squares",
    "saved_block_bytes",
    "residual_stream_bytes",
)
_SQUARES = (
    "square_bytes",
    "formula_saved_squares",
    "formula_forward_squares",
    "formula_backward_squares",
)
_EVIDENCE = (
    "message",
    "reason",
    "signal",
    "exit_code",
    "witness",
    "asked_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "free_bytes",
    "snapshot",
)
_FACTS = (
    "program_source", "invocation", "host", "gpu", "gpu_uuid", "torch", "cuda", "driver", "python", "cpu", "tokens", "parameters",
    "parameter_dtype", "autocast_dtype", "float32_matmul_precision", "matmul_allow_tf32", "compile_cache_seen", "compile_graphs",
    "compile_graph_breaks", "compile_break_reasons", "compile_recompiles", "compile_recompile_reasons",
    "compile_cache_hits", "compile_cache_misses", "compile_skipped_cuda_graphs", "attention_asked", "attention_seen",
    "attention_kernels", "dtype_parameters", "dtype_fc1", "dtype_relu", "dtype_norm", "dtype_logits", "dtype_loss",
    "dtype_gradients", "softmax_flops", "attention_matmul_flops", "timing_warmup_steps", "timing_stopped_by", "timing_pipelined",
    "timing_half_width",
)  # fmt: skip

_WIDE = 0.05  # of the median: what is compared with it shows no smaller difference
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

    What was predicted of a cell stands in its row however it ended.
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
            rows[["most_neighbours", "commit"]],
            _columns(facts, _FACTS, taken=params),
            _columns(evidence, _EVIDENCE, taken=params),
            facts.get("flops", pd.Series(dtype=object)).map(_total).rename("flops"),
            _took(facts),
        ],
        axis=1,
    )
    # What a cell measured before it failed stays in the samples: here it would pass for a result.
    measured = rows_of(samples, chosen.loc[chosen["status"] == "ok", _KEY])
    for columns in (*(group(measured) for group in GROUPS), predicted(predictions)):
        if len(columns):
            wide = wide.merge(columns, left_on="cell", right_index=True, how="left")
        give_back_memory()
    wide = wide.copy()  # in one piece again, to which columns can be added
    whole = with_host(_with_whole_step(wide), [str(axis) for axis in params])
    return _with_square_bytes(
        _with_profile_cost(_with_kernel_time(_with_utilisation(_with_rates(whole))))
    ).apply(_nullable)


def rows_of(rows: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """The rows that are of one of `attempts`, at most one a cell. As `merge` would choose them, without its copies."""
    number = rows["cell"].map(attempts.set_index("cell")["attempt"])
    return rows[number.astype("float64") == rows["attempt"]]


def synced_durations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of each phase, waited for at its end: `forward_ms_mean`, …; `step_synced_ms_mean`, … of the step so measured."""
    return _duration_columns(samples, "synced", {"step": "step_synced"})


def pipelined_durations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of steps that run on without waiting: `forward_pipelined_ms_mean`, …, `step_pipelined_ms_mean`, …"""
    phases = samples.loc[samples["mode"] == "pipelined", "phase"].unique()
    return _duration_columns(
        samples, "pipelined", {phase: f"{phase}_pipelined" for phase in phases}
    )


def additions(samples: pd.DataFrame) -> pd.DataFrame:
    """`step_additions_median`, … with its interval: the synced step, told in additions; `forward_additions_…` by phase."""
    told = _of(samples, "timing", "synced", "additions")
    return _summaries(told, lambda phase: f"{phase}_additions_", ("median", "ci_low", "ci_high"))


def kernel_time(samples: pd.DataFrame) -> pd.DataFrame:
    """`step_kernel_time_ms_median`, … with its interval: of all kernels of a step; `forward_kernel_time_ms_…` by phase."""
    timed = _of(samples, "kernel_time", "", "kernel_time")
    return _summaries(
        timed[timed["value"].notna()],
        lambda phase: f"{phase}_kernel_time_ms_",
        ("median", "ci_low", "ci_high", "coverage"),
    )


def step_kernel_times(samples: pd.DataFrame) -> pd.DataFrame:
    """What the kernels of the steps took that the instrument `kernel_time` watched, of every attempt."""
    watched = _whole_steps(samples, "kernel_time", "kernel_time")
    return watched[watched["value"].notna()]


def step_additions(samples: pd.DataFrame) -> pd.DataFrame:
    """The synced steps, told in additions, of every attempt."""
    steps = _whole_steps(samples, "additions")
    return steps[steps["mode"] == "synced"]


def step_attempts(samples: pd.DataFrame) -> pd.DataFrame:
    """The durations of whole steps in ms, of every attempt: pipelined where the device queues work, else synced."""
    steps = _whole_steps(samples, "duration")
    pipelined, synced = (steps[steps["mode"] == mode] for mode in ("pipelined", "synced"))
    keys = pd.MultiIndex.from_frame(synced[_KEY])
    return pd.concat([pipelined, synced[~keys.isin(pd.MultiIndex.from_frame(pipelined[_KEY]))]])


def _whole_steps(samples: pd.DataFrame, metric: str, instrument: str = "timing") -> pd.DataFrame:
    return samples[
        (samples["instrument"] == instrument)
        & (samples["metric"] == metric)
        & (samples["phase"] == "step")
    ]


def first_steps(samples: pd.DataFrame) -> pd.DataFrame:
    """What the step that compiled took, by phase: `compile_forward_ms`, …, `compile_step_ms`.

    `compile_total_ms` adds the steps that record CUDA graphs, where there are such; `compile_steps` says how many in all.
    """
    compiling = _of(samples, "timing", "compile", "duration")
    first = _as_texts(compiling[compiling["step"] == 0])
    by_phase = first.assign(column="compile_" + first["phase"] + "_ms").pipe(_pivot)
    whole = compiling[compiling["phase"] == "step"]
    if by_phase.empty:
        return by_phase
    totals = whole.groupby("cell", observed=True)["value"].agg(
        compile_total_ms="sum", compile_steps="size"
    )
    return by_phase.join(_with_text_index(totals))


def drain(samples: pd.DataFrame) -> pd.DataFrame:
    """`drain_ms`: how far the device was behind the host at the end. Near zero: the host is the bottleneck."""
    return _of(samples, "timing", "pipelined", "drain").assign(column="drain_ms").pipe(_pivot)


def host_lead(samples: pd.DataFrame) -> pd.DataFrame:
    """`forward_lead_ms`, …, `step_lead_ms`: how far the host was ahead of the device at the end of a phase, in the median;
    `host_lead_ms`: the largest of them.

    Where the largest is near zero, the device waited for the host all along. The drain alone does not tell: a step that ends in
    many small kernels lets the device catch up. Where adaptive timing went without pipelined steps, it is of the one that ran on
    before.
    """
    pipelined, checked = (_of(samples, "timing", mode, "lead") for mode in ("pipelined", "check"))
    alone = checked[~checked["cell"].isin(pipelined["cell"])]
    last = alone[alone["step"] == alone.groupby("cell", observed=True)["step"].transform("max")]
    lead = _as_texts(pd.concat([pipelined, last]))
    by_phase = _pivot(lead.assign(column=lead["phase"] + "_lead_ms"), "median")
    return by_phase.assign(host_lead_ms=by_phase.max(axis=1)) if len(by_phase) else by_phase


def peaks(samples: pd.DataFrame) -> pd.DataFrame:
    """`peak_allocated_bytes`, … over the steady step; `forward_peak_…` by phase; `first_…` for the first step.

    `forward_held_allocated_bytes` is what is held at the end of a phase, `built_held_…` after the build; `saved_bytes`,
    `saved_squares` of what is kept for the backward pass, `saved_block_bytes` by one block, `residual_stream_bytes` of what
    that hands on.
    """
    chosen = (samples["instrument"] == "memory") & (samples["metric"] != _OPERATION)
    memory = _as_texts(samples.loc[chosen, ["cell", "mode", "phase", "metric", "value"]])
    prefix = memory["mode"].map({"first": "first_", "steady": "", "built": "built_"})
    whole = memory[~(memory["metric"].str.startswith("held") & (memory["phase"] != ""))]
    whole = whole.assign(column=prefix[whole.index] + whole["metric"])
    parts = memory[memory["phase"] != ""]
    by_phase = parts.assign(column=prefix[parts.index] + parts["phase"] + "_" + parts["metric"])
    return _pivot(pd.concat([whole, by_phase]), "max")


def saved_operations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of the operations of a block that save most for the backward pass, by rank: `saved_1_operation`, `saved_1_bytes`, …"""
    operations = _as_texts(samples[samples["metric"] == _OPERATION])
    if operations.empty:
        return pd.DataFrame()
    stem = "saved_" + operations["step"].astype(int).astype(str)
    named = _with_text_index(
        operations.assign(column=stem + "_operation").pivot(
            index="cell", columns="column", values="note"
        )
    )
    return named.join(_pivot(operations.assign(column=stem + "_bytes")))


def predicted(predictions: pd.DataFrame | None) -> pd.DataFrame:
    """The columns of `peaks` after `predicted_`, `predicted_how` and `predicted_verdict`, and by role `predicted_of_…_bytes`;
    by formula `closed_form_bytes` and its terms, `square_bytes` and `formula_…_squares`.

    The latest prediction of a cell counts. Where there could be none, `predicted_reason` says why.
    """
    if predictions is None or predictions.empty:
        return pd.DataFrame()
    latest = predictions[
        predictions["predicted_at"] == predictions.groupby("cell")["predicted_at"].transform("max")
    ]
    sizes = latest[latest["metric"].str.startswith(("peak", "held"))]
    saved = latest[latest["metric"].isin(_SAVED)]
    made, not_made = sizes[sizes["value"].notna()], sizes[sizes["value"].isna()]
    roles, verdicts = (
        latest[latest["metric"] == "at_peak_bytes"],
        latest[latest["metric"] == "verdict"],
    )
    columns = [
        peaks(pd.concat([made, saved], ignore_index=True).assign(instrument="memory")).add_prefix(
            "predicted_"
        ),
        saved_operations(latest).add_prefix("predicted_"),
        _pivot(
            roles.assign(column="predicted_of_" + roles["note"].map(_column_of_role) + "_bytes"),
            "sum",
        ),
        _closed_forms(latest),
        _pivot(latest[latest["metric"].isin(_SQUARES)].rename(columns={"metric": "column"})),
        made.groupby("cell")["note"].first().rename("predicted_how"),
        not_made.groupby("cell")["note"].first().rename("predicted_reason"),
        verdicts.groupby("cell")["note"].first().rename("predicted_verdict"),
    ]
    return pd.concat([column for column in columns if len(column)], axis=1)


def _closed_forms(predictions: pd.DataFrame) -> pd.DataFrame:
    """`closed_form_bytes` of the peak, and by term `closed_form_of_…_bytes`; `at_least_bytes` where activations are unknown."""
    terms = predictions[predictions["metric"] == "closed_form_bytes"]
    if terms.empty:
        return pd.DataFrame()
    by_term = _pivot(
        terms.assign(column="closed_form_of_" + terms["note"].map(_column_of_role) + "_bytes"),
        "sum",
    )
    sums, whole = terms.groupby("cell")["value"].sum(), terms[terms["note"] == "temporary"]["cell"]
    is_whole = sums.index.isin(whole)
    found = by_term.assign(
        closed_form_bytes=sums.where(is_whole), at_least_bytes=sums.mask(is_whole)
    )
    return found.dropna(axis=1, how="all")


def _column_of_role(role: str) -> str:
    """Activations of all parts of the model together, but for those that grow with the square of the length."""
    group, _, part = role.partition(": ")
    return (part if part == "attention squares" else group).replace(" ", "_")


def findings(samples: pd.DataFrame) -> pd.DataFrame:
    """What a task found once, such as `sum`, under its own name."""
    found = _as_texts(samples[samples["instrument"] == "finding"])
    return _pivot(found.assign(column=found["metric"]))


def telemetry(samples: pd.DataFrame) -> pd.DataFrame:
    """The GPU's state after the timing, and the energy spent until then, warm-up included: `sm_clock_after`, `power_after`,
    `energy_j`.

    `waited_for_core`: of the timing, what the thread that waited longest for a core of the host did.
    """
    read = _as_texts(
        samples.loc[
            samples["instrument"] == "telemetry", ["cell", "mode", "metric", "unit", "value"]
        ]
    )
    if read.empty:
        return pd.DataFrame()
    states = read[~read["metric"].isin(["energy", "power_capped", "thermal_capped"])]
    during = states["mode"] == "timing"
    state = _pivot(
        states.assign(
            column=states["metric"].where(during, states["metric"] + "_" + states["mode"])
        )
    )
    counters = read[read["metric"].isin(["energy", "power_capped", "thermal_capped"])]
    if counters.empty:
        return state
    signed = counters.assign(
        column=counters["metric"] + "_" + counters["unit"].str.lower(),
        value=counters["value"] * counters["mode"].map({"before": -1, "after": 1}),
    )
    known = _with_text_index(
        signed["value"]
        .notna()
        .groupby([signed["cell"], signed["column"]], observed=True)
        .all()
        .unstack()
    )
    return state.join(_pivot(signed, "sum").where(known.fillna(False).astype(bool)), how="outer")


def kernels(samples: pd.DataFrame) -> pd.DataFrame:
    """What the kernels come to over all: `forward_kernel_time_ms`, … of a step; `busy`, `forward_busy`, … shares of time;
    `idle_ms`, `idle_for_host_ms`; `attributed_to_phase`, … shares of kernel time; `profiled_step_ms`.
    """
    watched = _as_texts(samples[samples["instrument"] == "kernels"])
    prefix = watched["phase"].where(watched["phase"] == "", watched["phase"] + "_")
    suffix = watched["unit"].map({"ms": "_ms"}).fillna("")
    return _pivot(watched.assign(column=prefix + watched["metric"] + suffix))


def snapshots(samples: pd.DataFrame) -> pd.DataFrame:
    """What the step on the allocator's record comes to: `snapshot_peak_allocated_bytes`, …, `snapshot_replayed_peak_bytes`;
    `snapshot_unlabelled_share` of the peak; `snapshot_events`, `snapshot_wrapped`; `snapshot_processing_ms`.
    """
    taken = _as_texts(samples[samples["instrument"] == "memory_snapshot"])
    table = _pivot(
        taken.assign(
            column="snapshot_" + taken["metric"] + taken["unit"].map({"ms": "_ms"}).fillna("")
        )
    )
    if "snapshot_unlabelled_bytes" in table:
        table["snapshot_unlabelled_share"] = (
            table["snapshot_unlabelled_bytes"] / table["snapshot_peak_allocated_bytes"]
        )
    return table


GROUPS: tuple[Callable[[pd.DataFrame], pd.DataFrame], ...] = (
    synced_durations,
    pipelined_durations,
    additions,
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
    """And how many of them are successes that count, with the most neighbours that one of those had."""
    counting = that_count(attempts).groupby("cell")
    counts = pd.DataFrame(
        {"attempts": attempts.groupby("cell").size(), "repetitions": counting.size()}
    )
    return (
        counts.fillna(0)
        .astype(int)
        .assign(most_neighbours=counting["neighbours"].max())
        .reset_index(names="cell")
    )


def that_count(attempts: pd.DataFrame) -> pd.DataFrame:
    """The successes of each cell that no other was measured in place of."""
    well = attempts[attempts["status"] == "ok"]
    replaced_until = well["cell"].map(well.groupby("cell")["replaces"].max())
    return well[well["attempt"] > replaced_until.astype("float64").fillna(0)]


def _neighbours(attempts: pd.DataFrame) -> pd.Series[float]:
    # Of runs that are read together each has hosts of its own: two machines may have one name.
    runs = [str(cell).rpartition(MARK)[0] for cell in attempts["cell"]]
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


def _of(samples: pd.DataFrame, instrument: str, mode: str, metric: str) -> pd.DataFrame:
    chosen = (
        (samples["instrument"] == instrument)
        & (samples["mode"] == mode)
        & (samples["metric"] == metric)
    )
    return samples.loc[chosen, ["cell", "phase", "step", "value"]]


def _as_texts(rows: pd.DataFrame) -> pd.DataFrame:
    """With the texts that categories stand for, but for those of cells: to be joined or renamed."""
    categorical = [
        name
        for name in rows
        if isinstance(rows[name].dtype, pd.CategoricalDtype) and name != "cell"
    ]
    return rows.astype({name: rows[name].dtype.categories.dtype for name in categorical})  # type: ignore[union-attr]


def _duration_columns(samples: pd.DataFrame, mode: str, names: Mapping[str, str]) -> pd.DataFrame:
    return _summaries(
        _of(samples, "timing", mode, "duration"), lambda phase: f"{names.get(phase, phase)}_ms_"
    )


def _summaries(
    values: pd.DataFrame, prefix: Callable[[str], str], statistics: Sequence[str] = STATISTICS
) -> pd.DataFrame:
    """By cell, of each phase, after the prefix for that."""
    if values.empty:
        return pd.DataFrame()
    summary = summarise(values, ["cell", "phase"])[list(statistics)]
    by_phase = {
        phase: summary.xs(phase, level="phase") for phase in sorted(summary.index.unique("phase"))
    }
    frames = [
        _with_text_index(frame).add_prefix(prefix(str(phase))) for phase, frame in by_phase.items()
    ]
    return pd.concat(frames, axis=1).dropna(axis=1, how="all")


def _pivot(rows: pd.DataFrame, how: Any = "first") -> pd.DataFrame:
    if rows.empty:
        return pd.DataFrame()
    table: pd.DataFrame = rows[["cell", "column", "value"]].pivot_table(
        index="cell", columns="column", values="value", aggfunc=how, dropna=False, observed=True
    )
    table.columns.name = None
    return _with_text_index(table)


def _with_text_index(table: Any) -> pd.DataFrame:
    """By the texts of its index, which may be categories."""
    by_text: pd.DataFrame = table.set_axis(table.index.astype(str))
    return by_text


def _with_whole_step(wide: pd.DataFrame) -> pd.DataFrame:
    """`step_ms_mean`, …: the step as training runs it, pipelined where the device queues work, else synced. `wide`: whether the
    interval of its median is.

    Waiting at each phase costs a step up to a tenth: the host cannot prepare the optimizer behind the backward pass.
    """
    for statistic in STATISTICS:
        synced, pipelined = (
            wide.get(f"step_{mode}_ms_{statistic}") for mode in ("synced", "pipelined")
        )
        if synced is not None:
            wide[f"step_ms_{statistic}"] = synced if pipelined is None else pipelined.fillna(synced)
    if "step_ms_median" in wide:
        width = (wide["step_ms_ci_high"] - wide["step_ms_ci_low"]) / wide["step_ms_median"]
        wide["wide"] = (
            (width > _WIDE).astype("boolean").where(wide["step_ms_coverage"] > 0)
        )  # a single step has no interval
    if {"compile_total_ms", "step_ms_median"} <= set(wide):
        wide["compile_cost_ms"] = (
            wide["compile_total_ms"] - wide["compile_steps"] * wide["step_ms_median"]
        )
    return wide


def _with_rates(wide: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second and achieved TFLOP/s, over the median of the whole step."""
    for rate, amount, scale in (
        ("tokens_per_s", "tokens", 1e3),
        ("achieved_tflops", "flops", 1e-9),
    ):
        if {"step_ms_median", amount} <= set(wide):
            wide[rate] = wide[amount] / wide["step_ms_median"] * scale
    return wide


def _with_utilisation(wide: pd.DataFrame) -> pd.DataFrame:
    """How much of the possible was reached: model FLOPs over the peak of the precision, and over a measured ceiling.

    `mfu` is null for a GPU without a known peak, `of_ceiling` in a run that measured no matrix product in that precision
    on that GPU. FLOPs are those of the model's closed form: what is computed again does not count.
    """
    if not {"achieved_tflops", "precision"} <= set(wide):
        return wide
    gpus = wide["gpu"] if "gpu" in wide else pd.Series(None, index=wide.index, dtype=object)
    peaks = [
        peak_tflops(gpu, precision) for gpu, precision in zip(gpus, wide["precision"], strict=True)
    ]
    wide["peak_tflops"] = pd.array(peaks, dtype="Float64")
    wide["mfu"] = wide["achieved_tflops"] / wide["peak_tflops"]
    family = wide["precision"].replace({"bf16_pure": "bf16"})
    runs = wide["cell"].str.rpartition(MARK)[0]  # of cells that are read together
    place = pd.Series(
        list(zip(runs, gpus.fillna(""), wide["device"], family, strict=True)), index=wide.index
    )
    products = wide[(wide["task"] == "matmul") & wide["achieved_tflops"].notna()]
    ceilings = products["achieved_tflops"].groupby(place[products.index]).max()
    wide["ceiling_tflops"] = place.map(ceilings)
    wide["of_ceiling"] = wide["achieved_tflops"] / wide["ceiling_tflops"]
    return wide


def _with_kernel_time(wide: pd.DataFrame) -> pd.DataFrame:
    """`step_kernel_time_ms_median`, `forward_…`: without an interval of the one step that the instrument `kernels` profiled,
    where `kernel_time` timed none. `busy_timed`: how busy the device is with that in a timed step."""
    own = [
        str(column)
        for column in wide
        if str(column).endswith("_kernel_time_ms") and column != "outside_kernel_time_ms"
    ]
    if own and {"busy", "profiled_step_ms"} <= set(wide):
        of_a_step = (
            wide["busy"].notna() & wide["profiled_step_ms"].notna()
        )  # of how many a trace from elsewhere is nobody knows
        profiled = (
            wide[own]
            .assign(step_kernel_time_ms=wide[own].sum(axis=1, min_count=1))
            .where(of_a_step)
        )
        for column in profiled:
            timed = wide.get(f"{column}_median")
            wide[f"{column}_median"] = (
                profiled[column] if timed is None else timed.fillna(profiled[column])
            )
    if {"step_kernel_time_ms_median", "step_ms_median"} <= set(wide):
        wide["busy_timed"] = wide["step_kernel_time_ms_median"] / wide["step_ms_median"]
    return wide


def _with_profile_cost(wide: pd.DataFrame) -> pd.DataFrame:
    """`profile_cost`: how many times as long a profiled step took as a timed one; `processing_share`, of the whole attempt."""
    if {"profiled_step_ms", "step_ms_median"} <= set(wide):
        wide["profile_cost"] = wide["profiled_step_ms"] / wide["step_ms_median"]
    if "processing_ms" in wide:
        wide["processing_share"] = wide["processing_ms"] / (wide["wall_s"] * 1e3)
    return wide


def _with_square_bytes(wide: pd.DataFrame) -> pd.DataFrame:
    """Of attention alone, what it takes beyond what was built, at most: `forward_squares_bytes`, `backward_squares_bytes`,
    and `saved_squares_bytes` of what waits for the backward pass; each also after `predicted_` and `formula_`.
    """
    if "square_bytes" not in wide:
        return wide
    for what in ("saved", "forward", "backward"):
        if f"formula_{what}_squares" in wide:
            wide[f"formula_{what}_squares_bytes"] = (
                wide[f"formula_{what}_squares"] * wide["square_bytes"]
            )
        for prefix in ("", "predicted_"):
            peak, built, saved = (
                wide.get(f"{prefix}{column}")
                for column in (
                    f"{what}_peak_allocated_bytes",
                    "built_held_allocated_bytes",
                    "saved_square_bytes",
                )
            )
            found = (
                saved
                if what == "saved"
                else peak - built
                if peak is not None and built is not None
                else None
            )
            if found is not None:
                wide[f"{prefix}{what}_squares_bytes"] = found.where(wide["square_bytes"].notna())
    return wide
