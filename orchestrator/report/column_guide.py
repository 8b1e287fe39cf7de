"""How docs/columns.md begins: how the tables of a run hang together, and which columns answer what is asked first."""

from __future__ import annotations

from collections.abc import Iterator

_HEAD = """# Columns

What stands in the tables of a run, and where to look first.

- [How the tables hang together](#how-the-tables-hang-together), [what null means](#what-null-means)
- [What is asked first](#what-is-asked-first)
- [cells](#cells), its [parameters](#parameters)
- [attempts](#attempts), [samples](#samples), [kernels](#kernels), [allocations](#allocations), [live](#live),
  [predictions](#predictions)

## How the tables hang together

`cells.parquet` is one row a cell, a point of the grid, made of the other tables: begin there. These are folders of Parquet
parts, as they were measured: `attempts` (one row a try at a cell), `samples` (one row a number), `kernels`, `allocations` and
`live` (of cells that asked for those instruments), and `predictions` (made before anything was measured).

- `cell` and `attempt` are the key of all but `predictions`, which has `cell` alone.
- `attempt` in `cells` is the one that counts: the latest that is `ok`, else the latest that is not `lost`, else the latest.
  Join on both, and what earlier or failed attempts measured is left out. `repetitions` says how many successes there are.
- Where several runs lie side by side (a publication, `sweep.load(one, other)`), `cell` in `cells` is `RUN:id` and `run` is
  the name of the run; the parts in the folder of each run have the `id` alone.
- `sweep.load(folder)` reads all tables under the same ids, also while the run is at work. Of a publication as files:

```python
import pandas as pd

folder = "results/published/h200"
cells = pd.read_parquet(f"{folder}/cells.parquet")
of_run = cells[cells["run"] == "full"].assign(cell=lambda rows: rows["cell"].str.rpartition(":")[2])
samples = pd.read_parquet(f"{folder}/full/samples")
joined = samples.merge(of_run[["cell", "attempt", "size", "precision"]], on=["cell", "attempt"])
```

## What null means

What is not known: the cell did not come so far, its instruments did not measure it, the device does not have it, or nobody can
tell. It is never zero and never false: `waits_for_host = false` is known, null is not. A column is missing where nothing in the
run fills it. What a cell measured before it failed is in `samples` alone: in `cells` its measured columns are null. A null
`value` of `samples` and `predictions` has the reason in `note`, or, of a verdict, its word. Texts of the raw tables that say
nothing are empty, not null.

## What is asked first
"""

# Each question with the columns that answer it, which stand in backquotes.
QUESTIONS: tuple[tuple[str, str], ...] = (
    (
        "Is there a number at all?",
        "`status` is ok; else `stage`, `phase`, `message` or `reason` say why not",
    ),
    (
        "How long does a step take?",
        "`step_ms_median`, in `step_ms_ci_low` to `step_ms_ci_high` with the confidence `step_ms_coverage`, of `step_ms_n` steps "
        "of one attempt; `{phase}_ms_median` of a phase, which is waited for: phases do not add up to a step that runs on",
    ),
    (
        "Is it CPU-bound (†)?",
        "Yes where `waits_for_host`: phases in which the GPU waits for the CPU that launches its kernels make up more than a "
        "tenth of the step, and another CPU makes another number. "
        "Where it is false, the step is GPU-bound. It is null where no steps ran on: on a CPU, or without timing",
    ),
    (
        "Which GPU, software, program?",
        "`gpu`, `gpu_uuid`, `host`, `cpu`; `torch`, `cuda`, `driver`, `python`; `commit`, and `program_source`, which is the "
        "same where the same code measured",
    ),
    (
        "Was it computed as asked?",
        "`parameter_dtype`, `autocast_dtype`, `float32_matmul_precision`, `attention_seen`, `compile_graph_breaks`, "
        "`compile_recompiles`: all read back",
    ),
    (
        "How much memory does it take?",
        "`peak_allocated_bytes` by tensors, `peak_reserved_bytes` as the GPU must have it, beside the CUDA context; "
        "`first_peak_allocated_bytes` of the first step; `peak_rss_bytes` on a CPU",
    ),
    (
        "Did memory run out, and where?",
        "`status` is oom (oom_inferred: not measured, see `witness`; host_oom: of the host), in `stage` and `phase`, for "
        "`asked_bytes` with `free_bytes` free; `predicted_verdict` is what was foreseen",
    ),
    (
        "Was the clock held down?",
        "For how long, from before the compiling step to after the timing: `power_capped_ns`, `thermal_capped_ns`; just after "
        "the timing: `throttle_reasons_after`, and `sm_clock_after` beside `sm_clock_max_after`",
    ),
    (
        "Was it alone on its host?",
        "`neighbours`: how many other attempts of the run were there, in the mean; "
        "`waited_for_core` and `disturbed`: what anything else took of its cores. Of other virtual machines nothing is "
        "known but what `host_pace_before` and `host_pace_after` show, and how far the steps differ: `wide`",
    ),
)


def guide() -> Iterator[str]:
    """As Markdown."""
    yield _HEAD
    yield from ("| question | columns of `cells` |", "|---|---|")
    yield from (f"| {question} | {answer} |" for question, answer in QUESTIONS)
