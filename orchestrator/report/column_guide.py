"""The beginning of docs/columns.md: how the tables of a run relate, and where to look first."""

from __future__ import annotations

from collections.abc import Iterator

_HEAD = """# Columns

The tables of a run, and where to look first. This page is generated:
`python -m orchestrator.report.column_docs > docs/columns.md`.

- [How the tables relate](#how-the-tables-relate), [what null means](#what-null-means)
- [Where to look first](#where-to-look-first)
- [cells](#cells) and their [parameters](#parameters)
- [attempts](#attempts), [samples](#samples), [kernels](#kernels), [allocations](#allocations),
  [live](#live), [predictions](#predictions)

## How the tables relate

Begin with `cells.parquet`: one row per cell, a point of the grid, derived from the other tables. The
other tables are folders of Parquet parts, as measured: `attempts` (one row per try at a cell),
`samples` (one row per number), `kernels`, `allocations` and `live` (for cells with those
instruments), and `predictions` (made before anything was measured).

- `cell` and `attempt` are the key of each table except `predictions`, whose key is `cell`.
- `attempt` in `cells` is the attempt that counts: the latest with status `ok`, or else the latest
  that is not `lost`, or else the latest. Join on both columns to leave out earlier and failed
  attempts. `repetitions` is the number of successful attempts.
- If several runs are read as one (a publication, `sweep.load(one, other)`), `cell` in `cells` is
  `RUN:id` and `run` is the name of the run. The parts in the folder of each run have the `id` alone.
- `sweep.load(folder)` reads all tables with the same ids, also while the run is still measuring. With
  the files of a publication:

```python
import pandas as pd

folder = "results/published/h200"
cells = pd.read_parquet(f"{folder}/cells.parquet")
of_run = cells[cells["run"] == "full"].assign(cell=lambda rows: rows["cell"].str.rpartition(":")[2])
samples = pd.read_parquet(f"{folder}/full/samples")
joined = samples.merge(of_run[["cell", "attempt", "size", "precision"]], on=["cell", "attempt"])
```

## What null means

The value is unknown: the cell failed before it, no instrument measured it, or the device does not
have it. Null is never zero and never false: `cpu_bound = false` is known, null is not. A column is
missing if nothing in the run fills it. What a cell measured before it failed is only in `samples`; in
`cells` its measured columns are null. A null `value` in `samples` and `predictions` has the reason in
`note`. Texts in the other tables are empty instead of null.

## Where to look first
"""

# Each question with the columns of `cells` that answer it, in backquotes.
QUESTIONS: tuple[tuple[str, str], ...] = (
    (
        "Does the cell have a result?",
        "`status` is ok. Otherwise `stage`, `phase`, `message` or `reason` show why not",
    ),
    (
        "How long does a step take?",
        "`step_ms_median`, with the interval `step_ms_ci_low` to `step_ms_ci_high` and its "
        "confidence `step_ms_coverage`, from the `step_ms_n` steps of one attempt; "
        "`{phase}_ms_median` for a phase. The timing waits after each phase, so phases may add up "
        "to more than a step",
    ),
    (
        "Is it CPU-bound (†)?",
        "`cpu_bound`: in more than a tenth of the step the GPU waits for the CPU that launches its "
        "kernels, so another CPU gives another time. Null if no pipelined steps were timed, as on a "
        "CPU",
    ),
    (
        "Which GPU, software and program?",
        "`gpu`, `gpu_uuid`, `host`, `cpu`; `torch`, `cuda`, `driver`, `python`; `commit`, and "
        "`program_source`, which is equal for equal measuring code",
    ),
    (
        "Was it computed as requested?",
        "`parameter_dtype`, `autocast_dtype`, `float32_matmul_precision`, `attention_seen`, "
        "`compile_graph_breaks`, `compile_recompiles`: all are read back",
    ),
    (
        "How much memory does it take?",
        "`peak_allocated_bytes` for tensors; `peak_reserved_bytes` is what the GPU must have, in "
        "addition to the CUDA context; `first_peak_allocated_bytes` for the first step; "
        "`peak_rss_bytes` on a CPU",
    ),
    (
        "Did memory run out, and where?",
        "`status` is oom, or oom_inferred (not measured, see `witness`), or host_oom (memory of the "
        "host); in `stage` and `phase`, when `asked_bytes` were requested and `free_bytes` were "
        "free. `predicted_verdict` is the prediction",
    ),
    (
        "Were the clocks lowered?",
        "`power_capped_ns` and `thermal_capped_ns`: for how long, from before the compiling step "
        "until after the timing. Just after the timing: `throttle_reasons_after`, and "
        "`sm_clock_after` compared with `sm_clock_max_after`",
    ),
    (
        "Did other work disturb it?",
        "`concurrent_attempts` of the same run on its host; `waited_for_core` and `cpu_contended` "
        "for other processes on its cores. Other virtual machines on the same hardware show only in "
        "`host_pace_before` and `host_pace_after`, and in steps that vary: `interval_wide`",
    ),
)


def guide() -> Iterator[str]:
    """Yield the lines of the guide, in Markdown."""
    yield _HEAD
    yield from ("| question | columns of `cells` |", "|---|---|")
    for question, answer in QUESTIONS:
        yield f"| {question} | {answer} |"
