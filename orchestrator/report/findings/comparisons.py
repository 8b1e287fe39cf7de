"""Findings that compare pairs of cells: precision, compiling, attention, options, any other axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import (
    MAIN,
    RUN,
    Row,
    axis_text,
    has_value,
    ordered_values,
    varying_axes,
)
from orchestrator.analysis.cpu_bound import depends_on_cpu
from orchestrator.analysis.options import OPTIMIZER_ARGS, WITHOUT, option_pairs
from orchestrator.analysis.pairs import (
    BASE,
    HIGH,
    LOW,
    MIN_COVERAGE,
    TIME,
    combinations,
    is_clear,
    is_gpu_bound,
    measured,
    pairs,
    preferring,
)
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.report.findings import finding
from orchestrator.report.findings.finding import Finding
from orchestrator.report.tables.formatters import is_cpu_bound
from orchestrator.report.text.cell_names import COMPILED, LENGTH, PASSES, fullest_context, scope_of
from orchestrator.report.text.numbers import gibibytes, number, percent, ratio
from tasks.spec.parameters import TIMING_AXES

_PEAK = "peak_allocated_bytes"
_KERNELS = "step_kernel_time_ms_median"
_MIN_LENGTH = 1024  # below, attention is limited by work that does not grow with the context
_MIN_LENGTHS = 3  # for an exponent
_LEAST_SHARE = 0.005  # of a peak that an option saves or costs
# Axes that have findings of their own, or in which larger cells are expected to take longer.
_EXPLAINED = {
    "precision", "compile", "attention", "pass", "memory_limit_gib", LENGTH, RUN, "device", "seed",
    "size", "model", "year", "gpu_kind", *TIMING_AXES, *WITHOUT,
}  # fmt: skip


def about_precision(results: Results) -> Iterator[Finding]:
    """Yield for each other precision its largest gain, and its largest loss if it has one."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    if "precision" not in steps:
        return
    base, *others = [*ordered_values("precision", steps["precision"]), ""]
    for precision in others:
        found = pairs(steps, results.axes, "precision", (base, precision))
        main = finding.main_run(preferring(found, MAIN))
        if len(main):
            yield from _of_precision(main, found)


def _of_precision(main: pd.DataFrame, found: pd.DataFrame) -> Iterator[Finding]:
    is_free = is_gpu_bound(main)
    best = finding.best_of(main[is_free] if is_free.any() else main)
    label = f"{best['precision']} over {best['precision' + BASE]}"
    noun = PASSES.get(best.get("pass"), "step")
    conclusion = finding.tally(main, str(best["precision"]), noun)
    takes = f"{finding.subject_of(best)} takes {_times(best)}."
    yield finding.of_pair(best, label, conclusion, takes + _when_compiled(best, found))
    worst = finding.extreme(main[is_clear(main)], "ratio", largest=False)
    if worst is not None and worst["ratio"] < 1 < best["ratio"]:
        conclusion = f"{worst['precision']} is slower for {scope_of(worst)}."
        takes = f"{finding.subject_of(worst)} takes {_times(worst)}."
        loss = finding.of_pair(worst, label, conclusion, takes + _reason(worst))
        yield replace(loss, section="where")


def _times(pair: Row) -> str:
    ends = ("", BASE)
    return " and ".join(
        f"{number(pair[TIME + end])} ms in {pair['precision' + end]}" for end in ends
    )


def _when_compiled(pair: Row, found: pd.DataFrame) -> str:
    """Return the same pair with compiled steps, if it was measured."""
    if pair.get("compile") != "eager":
        return ""
    axes = (RUN, "size", "model", LENGTH, "pass", "batch_size", "attention")
    alike = combinations(found, [axis for axis in axes if axis in found])
    compiled = found[(found["compile"] != "eager") & (alike == alike[pair.name])]
    if compiled.empty:
        return ""
    row = compiled.iloc[0]
    return f" Compiled: {_times(row)} ({ratio(row['ratio'])})."


def _reason(pair: Row) -> str:
    """Return how long the GPU works in a step, and what its kernels alone gain."""
    if not has_value(pair, _KERNELS):
        return ""
    text = f" GPU kernels run for {percent(pair[_KERNELS] / pair[TIME])} of the step"
    if pair["bound"] == "CPU-bound":
        text += " and the CPU limits it: a faster GPU would not help"
    if not has_value(pair, _KERNELS + BASE):
        return f"{text}."
    gain = ratio(pair[_KERNELS + BASE] / pair[_KERNELS])
    return f"{text}. The kernels alone are {gain} as fast."


def about_compiling(results: Results) -> Iterator[Finding]:
    """Yield for each way of compiling its median speed-up."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    steps = preferring(steps, {"pass": "train_step"})
    for scope, name in COMPILED.items():
        found = finding.main_run(pairs(steps, results.axes, "compile", ("eager", scope)))
        if len(found):
            yield _of_compiling(found, name, results)


def _of_compiling(found: pd.DataFrame, name: str, results: Results) -> Finding:
    is_free = is_gpu_bound(found)
    shown, bound = (found[is_free], found[~is_free]) if is_free.any() else (found, found.iloc[:0])
    is_known = is_free.any() and (shown["bound"] == "GPU-bound").any()
    kind = "GPU-bound pair" if is_known else "pair"
    texts = [f"Median of {counted(len(shown), kind)}"]
    if len(shown) == 1:
        pair = shown.iloc[0]
        times = f"{number(pair[TIME + BASE])} ms eager and {number(pair[TIME])} ms compiled"
        texts = [f"{finding.subject_of(pair)} in {pair['precision']} takes {times}"]
    texts += finding.by_precision(shown["ratio"], shown, results.axes, "{name} {ratio}")
    if len(bound):
        texts.append(f"{counted(len(bound), 'CPU-bound pair')} {ratio(bound['ratio'].median())}")
    cells = results.cells[results.cells["cell"].isin(found["cell"])]
    costs = cells.filter(items=["compile_cost_ms"]).astype(float).to_numpy() / 1e3
    costs = costs[np.isfinite(costs)]
    cost = f" Compiling takes {number(float(np.median(costs)))} s once." if len(costs) else ""
    subject = "Compiling" if name == "compiled" else "Compiling the whole model"
    conclusion = finding.tally(found, subject, "step")
    detail = f"{'; '.join(texts)}.{cost}"
    return finding.of_pairs(shown, f"{name} over eager", conclusion, detail, kind)


def about_attention(results: Results) -> Iterator[Finding]:
    """Yield how much faster the best attention is than the naive one, and how naive time grows.

    They are compared at the longest of the contexts with most implementations.
    """
    cells = measured(results, "attention", TIME, LOW, HIGH, LENGTH)
    if cells.empty or "attention" not in cells:
        return
    others = sorted(set(cells["attention"].dropna()) - {"naive"})
    joined = pairs(cells, results.axes, "attention", ("naive", *others))
    if len(joined):
        yield _of_attention(joined)
    yield from _growth(cells)


def _of_attention(joined: pd.DataFrame) -> Finding:
    best = finding.best_of(joined[joined[LENGTH] == fullest_context(joined, "attention")])
    name = str(best["attention"])
    conclusion = f"{name} attention makes no clear difference."
    if is_clear(best):
        pace = "fastest" if best["ratio"] > 1 else "slower than the naive one, as is every other"
        conclusion = f"{name} attention is {pace}."
    pass_name = PASSES.get(str(best.get("pass")), "step")
    detail = f"At context {best[LENGTH]:,}, a {pass_name} in {best['precision']} takes"
    detail += f" {number(best[TIME])} ms, with naive attention {number(best[TIME + BASE])} ms."
    if has_value(best, _PEAK) and has_value(best, _PEAK + BASE):
        saved = best[_PEAK + BASE] - best[_PEAK]
        more = "less" if saved >= 0 else "more"
        detail += f" It needs {gibibytes(abs(saved))} {more} memory"
        detail += f" ({gibibytes(best[_PEAK])} and {gibibytes(best[_PEAK + BASE])})."
    longest = finding.best_of(joined[joined[LENGTH] == joined[LENGTH].max()])
    if longest[LENGTH] > best[LENGTH]:
        detail += f" At {longest[LENGTH]:,}, where fewer were measured, {longest['attention']} is"
        detail += f" {ratio(longest['ratio'])} as fast as naive."
    found_pair = finding.of_pair(best, f"{name} over naive", conclusion, detail)
    return replace(found_pair, scope=f"context {best[LENGTH]:,}, {best['precision']}")


def _growth(cells: pd.DataFrame) -> Iterator[Finding]:
    """Yield the exponent with which the time of naive attention grows."""
    # The time of a CPU-bound cell depends little on the context.
    long = preferring(cells[(cells[LENGTH] >= _MIN_LENGTH) & ~depends_on_cpu(cells)], MAIN)
    keys = [axis for axis in (RUN, "d_head", "precision", "batch_size", "pass") if axis in long]
    exponents, used = [], []
    for _, series in long.groupby(keys, dropna=False, observed=True):
        if series[LENGTH].nunique() >= _MIN_LENGTHS:
            logs = np.log(series[[LENGTH, TIME]].astype(float))
            exponents.append(np.polyfit(logs[LENGTH], logs[TIME], 1)[0])
            used.append(series)
    if exponents:
        low, middle, high = np.quantile(exponents, [0, 0.5, 1])
        lengths = f"{long[LENGTH].min():,} to {long[LENGTH].max():,}"
        yield Finding(
            "attention time",
            f"n^{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"Attention time grows with the context to the power of {middle:.2f}.",
            f"Median of the exponents of {len(exponents)} series, from context {lengths}.",
            f"context {lengths}",
            basis=finding.basis_of_cells(pd.concat(used)),
        )


def about_options(results: Results) -> Iterator[Finding]:
    """Yield what each option of a training step saves in memory, at the pair that saves most."""
    steps = measured(results, "train_step", TIME)
    found: dict[str, list[tuple[Row, Row]]] = defaultdict(list)
    for option, row, baseline in option_pairs(replace(results, cells=steps)):
        found[option].append((row, baseline))
    for option, members in found.items():
        known = [pair for pair in members if all(map(finding.peak_of, pair))]
        if known:
            yield _of_option(option, max(known, key=_saving), len(known))


def _saving(pair: tuple[Row, Row]) -> float:
    """Return the share of its peak that a cell saves, by that of its counterpart."""
    own, base = (peak[0] for peak in map(finding.peak_of, pair) if peak)
    return 1 - own / base


def _of_option(option: str, pair: tuple[Row, Row], count: int) -> Finding:
    row, baseline = pair
    own, base = (peak[0] for peak in map(finding.peak_of, pair) if peak)
    share = _saving(pair)
    name = option.replace("_", " ")
    longer = row[TIME] / baseline[TIME]
    saves, saved = ("saves", "saved") if share > -_LEAST_SHARE else ("costs", "more")
    amount, part = gibibytes(abs(base - own)), f"{percent(abs(share))} of the peak"
    if abs(share) < _LEAST_SHARE:
        amount = part = "no memory"
    more = "longer" if longer >= 1 else "shorter"
    return Finding(
        f"{name}: {axis_text(row[option])}",
        amount,
        f"{saved}; step {ratio(longer)} as long",
        f"{name.capitalize()} {axis_text(row[option])} {saves} {part}.",
        f"{finding.subject_of(row)} peaks at {gibibytes(own)} instead of {gibibytes(base)}, and takes"
        f" {number(row[TIME])} ms instead of {number(baseline[TIME])} ms, {percent(abs(longer - 1))}"
        f" {more}. The largest saving of {counted(count, 'pair')}.",
        scope_of(row),
        max(share, 0.0),
        [(row["cell"], baseline["cell"])],
        bool(is_cpu_bound(row)),
    )


def about_other_axes(results: Results) -> Iterator[Finding]:
    """Yield how much longer a step takes with the last value of any other axis than with the first."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    for axis in varying_axes(results):
        if axis in _EXPLAINED or axis.startswith(OPTIMIZER_ARGS) or axis not in steps:
            continue
        values = ordered_values(axis, steps[axis])
        if len(values) < 2:
            continue
        # The last value is the baseline, so that a ratio says how much longer it takes.
        found = pairs(steps, results.axes, axis, (values[-1], values[0]))
        if len(found):
            yield _of_axis(found, axis, values)


def _of_axis(found: pd.DataFrame, axis: str, values: Sequence[object]) -> Finding:
    name = axis.rpartition(".")[2]
    first, last = f"{name}={axis_text(values[0])}", f"{name}={axis_text(values[-1])}"
    middle = ratio(found["ratio"].median())
    conclusion = f"A step takes {middle} as long with {last} as with {first}."
    why_unclear = ""
    if not is_clear(found).any():
        conclusion = f"{last} and {first} show no clear difference."
        why_unclear = "the intervals of the two medians overlap"
        if (found["coverage"] < MIN_COVERAGE).any():
            why_unclear = "fewer than 6 steps give no interval at 95%"
    detail = finding.sentence_of([finding.median_of(len(found), "pair"), why_unclear])
    found_pairs = finding.of_pairs(found, f"{last} over {first}", conclusion, detail)
    return replace(found_pairs, gain=0.0)  # another value is another task


def about_warm_up(results: Results) -> Iterator[Finding]:
    """Yield how much steps vary after each number of warm-up steps, over the same cells."""
    spread = "step_synced_ms_sd"
    cells = measured(results, "train_step", spread, "step_synced_ms_mean")
    if "warmup_steps" not in cells or cells["warmup_steps"].nunique() < 2:
        return
    axes = [axis for axis in results.axes if axis not in ("timing", "measured_steps")]
    same = finding.main_run(finding.matched_on(cells, "warmup_steps", axes))
    if same.empty:
        return
    shares = (same[spread] / same["step_synced_ms_mean"]).groupby(same["warmup_steps"]).median()
    by_count = dict(zip(map(int, shares.index), map(float, shares), strict=True))
    first, *_, last = by_count
    enough = next(count for count, share in by_count.items() if share <= 2 * by_count[last])
    shown = {count: f"{number(100 * share, 2)}%" for count, share in by_count.items()}
    texts = [f"{share} after {count}" for count, share in shown.items()]
    count = len(same) // len(by_count)
    conclusion = f"{counted(enough, 'warm-up step')} {'is' if enough == 1 else 'are'} enough."
    if enough == last:
        conclusion = f"Steps still become steadier with {enough} warm-up steps."
    yield Finding(
        "steps of warm-up",
        f"{enough}",
        f"{shown[first]} to {shown[enough]}",
        conclusion,
        f"Standard deviation over mean of a step, median of {counted(count, 'cell')}:"
        f" {', '.join(texts)}.",
        counted(count, "cell"),
        basis=finding.basis_of_cells(same),
    )
