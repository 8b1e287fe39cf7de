"""Sentences that answer the question of each section of the page, worded from the cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pandas as pd

from orchestrator.analysis.cpu_bound import BoundBy, bound_by, ran_with_others
from orchestrator.analysis.pairs import HIGH, LOW, TIME, is_clear, measured, pairs, preferring
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.text.cell_names import LENGTH, NAME, fullest_context, names_of, scope_of
from orchestrator.report.text.numbers import gibibytes, number, percent
from orchestrator.report.text.provenance import is_flagged, values_of
from orchestrator.report.text.slices import choose_slice, main_cells
from tasks.spec.messages import typed_error_text
from tasks.spec.status import OUT_OF_MEMORY

_PEAK, _PREDICTED = "peak_allocated_bytes", "predicted_peak_allocated_bytes"


def lead(section: str, results: Results) -> str:
    """Return the sentences of a section; empty if the data has no answer."""
    find = _LEADS.get(section)
    if find is None or results.cells.empty:
        return ""
    try:
        return " ".join(find(results))
    except Exception as error:  # a sentence that fails must not cost the page
        return f"This question cannot be answered: {typed_error_text(error)}."


def about_time(results: Results) -> Iterator[str]:
    """Yield how long steps take, and how many of them depend on the CPU."""
    steps = measured(results, "train_step", TIME)
    if steps.empty:
        steps = measured(results, "attention", TIME)
    steps = _charted(results, steps)
    if len(steps) > 1:
        ordered = steps.sort_values(TIME)
        shortest, longest = ordered.iloc[0], ordered.iloc[-1]
        yield (
            f"The shortest of {len(steps):,} steps takes {number(shortest[TIME])} ms"
            f" ({scope_of(shortest)}), the longest {number(longest[TIME])} ms ({scope_of(longest)})."
        )
    bound = bound_by(steps)
    own = steps[bound == BoundBy.CPU]
    if len(own):
        verb = "is" if len(own) == 1 else "are"
        ends = dict.fromkeys((number(own[TIME].min()), number(own[TIME].max())))
        yield (
            f"{len(own):,} {verb} CPU-bound (hollow points): the GPU waits for the CPU to launch its"
            f" kernels. Here that takes {' to '.join(ends)} ms, on another machine another time."
        )


def _charted(results: Results, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps that a chart shows.

    Others may read the same, but have another batch size for example.
    """
    steps = steps.assign(**{NAME: names_of(steps)})
    _, row_axis = main_cells(results)
    shown = [axis for axis in (row_axis, LENGTH, "precision") if axis in steps]
    return choose_slice(steps, results.axes, shown)[0]


def about_kernels(results: Results) -> Iterator[str]:
    """Yield how much of a step the GPU works, and how much of that are matrix products."""
    steps = _charted(results, measured(results, "train_step", "busy_timed"))
    if len(steps) > 1:
        ordered = steps.sort_values("busy_timed")
        least, most = ordered.iloc[0], ordered.iloc[-1]
        yield (
            f"GPU kernels run for {percent(least['busy_timed'])} of the step in"
            f" {scope_of(least)}, and for {percent(most['busy_timed'])} in {scope_of(most)}."
            " The rest is waiting for the CPU."
        )
    known = results.kernels().dropna(subset="ms")
    if len(known) and "precision" in results.cells:
        known = known.merge(results.cells[["cell", "precision"]], on="cell")
        total = known.groupby("precision", observed=True)["ms"].sum()
        products = known[known["kernel_class"] == "GEMM"].groupby("precision", observed=True)["ms"]
        shares = (products.sum() / total).dropna().sort_values(ascending=False)
        texts = [f"{percent(share)} in {precision}" for precision, share in shares.items()]
        if texts:
            profiled = "time of operators" if _is_on_cpu(results.cells) else "kernel time"
            yield f"Matrix products are {', '.join(texts)} of the profiled {profiled}."


def about_compiling(results: Results) -> Iterator[str]:
    """Yield how many compiled steps are faster than the same eager ones."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    found = pairs(steps, results.axes, "compile", ("eager", "blocks", "model"))
    if found.empty:
        return
    clear = is_clear(found)
    faster = int((clear & (found["ratio"] > 1)).sum())
    slower = int((clear & (found["ratio"] < 1)).sum())
    yield (
        f"{counted(len(found), 'compiled step')}: {faster:,} faster than the same eager one,"
        f" {slower:,} slower, {len(found) - faster - slower:,} without a clear difference."
    )
    cells = results.cells
    if "compile_cost_ms" in cells and cells["compile_cost_ms"].notna().any():
        costs = cells["compile_cost_ms"].dropna().astype(float) / 1e3
        yield f"Compiling takes {number(costs.median())} s once (median of {len(costs):,})."


def about_memory(results: Results) -> Iterator[str]:
    """Yield where memory runs out, and how well its peak was predicted."""
    cells = results.cells
    failed = cells[cells["status"].isin(OUT_OF_MEMORY)]
    if len(failed) and "phase" in failed:
        phases = failed["phase"].replace("", "another stage").value_counts()
        listed = ", ".join(f"{count:,} in {phase}" for phase, count in phases.items())
        yield f"{counted(len(failed), 'cell')} ran out of memory: {listed}."
    if not {_PEAK, _PREDICTED} <= set(cells):
        return
    # Compiling frees memory earlier, which predictions do not know.
    eager = preferring(cells, {"compile": "eager"})
    both = eager[[_PEAK, _PREDICTED]].astype(float).dropna()
    both = both[both[_PEAK] > 0]
    if len(both):
        off = (both[_PREDICTED] / both[_PEAK] - 1).abs()
        yield (
            f"The predicted peak is within {off.quantile(0.95):.1%} of the measured one in 95% of"
            f" {counted(len(both), 'eager cell')}."
        )


def about_attention(results: Results) -> Iterator[str]:
    """Yield which implementation is fastest and which needs least memory at the longest context."""
    cells = measured(results, "attention", TIME, _PEAK, LENGTH)
    if cells.empty or cells["attention"].nunique() < 2:
        return
    longest = fullest_context(cells, "attention")
    own = cells[cells[LENGTH] == longest]
    fastest, least = own.loc[own[TIME].idxmin()], own.loc[own[_PEAK].idxmin()]
    yield (
        f"At context {longest:,}, {fastest['attention']} attention takes the least time"
        f" ({number(fastest[TIME])} ms) and {least['attention']} the least memory"
        f" ({gibibytes(least[_PEAK])})."
    )


def about_failures(results: Results) -> Iterator[str]:
    """Yield how many cells have no result, by status, of a run in which others have one."""
    by_status = counts_by_status(results, 0)
    failed = [text for text, kind in by_status if kind != "ok"]
    count = int((results.cells["status"] != "ok").sum())
    if 0 < count < len(results.cells):
        yield f"{counted(count, 'cell')} ended without a result: {', '.join(failed)}."


def about_trust(results: Results) -> Iterator[str]:
    """Yield how many cells have a wide interval or were disturbed."""
    cells = results.cells
    steps = cells[cells[TIME].notna()] if TIME in cells else cells.iloc[:0]
    if steps.empty:
        return
    yield f"{counted(len(steps), 'step')} {'was' if len(steps) == 1 else 'were'} timed."
    bound = bound_by(steps)
    findings = [
        (bound == BoundBy.GPU, "GPU-bound: another machine with this GPU agrees"),
        (bound == BoundBy.CPU, "CPU-bound: their times hold for this CPU only"),
        (is_flagged(steps, "interval_wide"), "with an interval wider than 5% of the median"),
        (is_flagged(steps, "power_capped_ns"), "measured while the power limit lowered the clock"),
        (is_flagged(steps, "cpu_contended"), "disturbed by other processes on the same cores"),
        (ran_with_others(steps), "CPU-bound and measured while other cells ran"),
    ]
    for found, text in findings:
        if found.any():
            yield f"{found.sum():,} {text}."


_LEADS: Mapping[str, Callable[[Results], Iterator[str]]] = {
    "time": about_time,
    "where": about_kernels,
    "compile": about_compiling,
    "memory": about_memory,
    "attention": about_attention,
    "failures": about_failures,
    "trust": about_trust,
}


def headline(results: Results) -> str:
    """Return what was measured on what, for the heading of the page."""
    cells = results.cells
    if cells.empty or "task" not in cells:
        return f"{results.manifest.get('name', 'run')}: nothing is measured yet"
    tasks = set(cells["task"])
    subject = f"Training {_trained(cells)}" if "train_step" in tasks else "Attention"
    if not tasks & {"train_step", "attention"}:
        subject = ", ".join(sorted(task.replace("_", " ") for task in tasks)).capitalize()
    device = _device(cells)
    has_time = TIME in cells and cells[TIME].notna().any()
    has_memory = _PEAK in cells and cells[_PEAK].notna().any()
    has_limits = cells["status"].isin(OUT_OF_MEMORY).any()
    parts = [("time", has_time), ("memory", has_memory), ("limits", has_limits)]
    shown = ", ".join(name for name, present in parts if present)
    return f"{subject}{device}{': ' if shown else ''}{shown}"


def _trained(cells: pd.DataFrame) -> str:
    """Return the name of the user's model, if nothing else was trained."""
    models: list[object] = list(cells["model"].unique()) if "model" in cells else []
    is_one = len(models) == 1 and isinstance(models[0], str)
    return str(models[0]) if is_one else "Transformers"


def _device(cells: pd.DataFrame) -> str:
    gpus = values_of(cells, "gpu")
    if len(gpus) == 1:
        return f" on one {gpus[0]}"
    if gpus:
        return f" on {len(gpus)} kinds of GPU"
    return " on a CPU" if _is_on_cpu(cells) else ""


def _is_on_cpu(cells: pd.DataFrame) -> bool:
    return "device" in cells and bool((cells["device"] == "cpu").all())


def counts_by_status(results: Results, pending: int) -> list[tuple[str, str]]:
    """Return texts such as `1,265 measured`, each with its kind: ok, bad or quiet.

    pending: number of cells without a result.
    """
    statuses = results.cells["status"]
    ok, skipped = int((statuses == "ok").sum()), int((statuses == "skipped").sum())
    oom = int(statuses.isin(OUT_OF_MEMORY).sum())
    failed = len(statuses) - ok - skipped - oom
    counts = [
        (ok, "measured", "ok"),
        (oom, "out of memory", "bad"),
        (failed, "failed", "bad"),
        (skipped, "impossible", "quiet"),
        (pending, "not measured", "quiet"),
    ]
    return [(f"{count:,} {text}", kind) for count, text, kind in counts if count or kind == "ok"]
