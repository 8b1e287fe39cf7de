"""The answers of a run: for each study, its most important number in one sentence.

Rules choose the numbers from the cells, so the same data gives the same sentences. A run without a
study gets no sentence for it. A ratio whose interval includes 1 is worded as "no clear difference".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import MAIN, NOTHING, RUN, Row, has_value, ordered_values
from orchestrator.analysis.cpu_bound import depends_on_cpu
from orchestrator.analysis.pairs import (
    BASE,
    HIGH,
    LOW,
    TIME,
    counterpart_among,
    is_clear,
    is_gpu_bound,
    measured,
    pairs,
    preferring,
)
from orchestrator.analysis.results import Results
from orchestrator.common.text import counted
from orchestrator.common.units import GIB
from orchestrator.report.text.cell_names import LENGTH, PASSES, fullest_context, name_of, scope_of
from orchestrator.report.text.memory_failures import (
    LIMIT,
    NO_TABLE,
    TextTable,
    contexts_by_limit,
    limited_steps,
)
from orchestrator.report.text.numbers import gibibytes, interval, number, percent, ratio
from orchestrator.report.text.slices import evenly
from tasks.spec.messages import typed_error_text
from tasks.spec.status import OUT_OF_MEMORY

_PEAK = "peak_allocated_bytes"
_KERNELS = "step_kernel_time_ms_median"
_MIN_LENGTH = 1024  # below, attention is limited by work that does not grow with the context
_MIN_LENGTHS = 3  # for an exponent
_MOST_MODELS = 5  # of the table of what fits in each memory limit
NARROW = ("bf16", "fp16", "bf16_pure", "tf32")  # in the order in which an answer is about one
# Results that no step was run for, or that is about no step.
_NOT_FAILED = ("ok", *OUT_OF_MEMORY, "skipped")

Rule = Callable[[Results], Iterator["Answer"]]


@dataclass(frozen=True)
class Answer:
    """A number, its interval, and a sentence that starts with a conclusion.

    label: what the number is, for a terminal. scope: the cells that it is about. section: part of
    the page that shows more. has_mark: true if the number is about CPU-bound steps. table: numbers
    for the page that a sentence could not hold.
    """

    label: str
    number: str
    interval: str
    conclusion: str
    detail: str
    scope: str
    section: str
    has_mark: bool = False
    table: TextTable = NO_TABLE

    @property
    def sentence(self) -> str:
        return f"{self.conclusion} {self.detail}".strip()


def answers(results: Results) -> list[Answer]:
    """Return the answers, most important first."""
    if results.cells.empty:
        return []
    found = [answer for rule in RULES for answer in _found(rule, results)]
    if not any(answer.section == "time" for answer in found):
        found = [*_longest_step(results), *found]
    return found


def _found(rule: Rule, results: Results) -> list[Answer]:
    try:
        return list(rule(results))
    except Exception as error:  # one answer that fails must not cost the report
        name = rule.__name__.removeprefix("about_")
        text = f"The answer about {name} cannot be given:"
        return [Answer(name, NOTHING, "", text, f"{typed_error_text(error)}.", "", "")]


def about_precision(results: Results) -> Iterator[Answer]:
    """Yield the largest gain of the narrowest precision, and its smallest one or its loss."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    for narrow in NARROW:
        found = pairs(steps, results.axes, "precision", ("fp32", narrow))
        main = preferring(found, MAIN)
        if len(main):
            yield from _of_precision(main, found, narrow)
            return


def _of_precision(main: pd.DataFrame, found: pd.DataFrame, narrow: str) -> Iterator[Answer]:
    is_free = is_gpu_bound(main)
    candidates = main[is_free] if is_free.any() else main
    clear = candidates[is_clear(candidates)]
    if clear.empty:
        pair = _extreme(candidates, "ratio", largest=True)
        yield _ratio_answer(narrow, pair, "time", f"{narrow} makes no clear difference.")
        return
    best = _extreme(clear, "ratio", largest=True)
    gain = "is faster" if best["ratio"] > 1 else "is slower everywhere"
    conclusion = f"{narrow} {gain}{_on_sizes(main, best)}."
    answer = _ratio_answer(narrow, best, "time", conclusion)
    yield replace(answer, detail=answer.detail + _when_compiled(best, found))
    clear = main[is_clear(main)]
    worst = _extreme(clear, "ratio", largest=False)
    if worst["cell"] != best["cell"] and worst["ratio"] < 1:
        conclusion = f"{narrow} is slower{_on_sizes(main, worst)}."
        answer = _ratio_answer(narrow, worst, "where", conclusion)
        yield replace(answer, detail=answer.detail + _reason(worst) + _unclear(main))


def _on_sizes(main: pd.DataFrame, pair: Row) -> str:
    """Return for which end of the sizes a pair stands, if it is the smallest or the largest."""
    sizes = ordered_values("size", main["size"]) if "size" in main else []
    if len(sizes) < 2 or pair["size"] not in (sizes[0], sizes[-1]):
        return ""
    return " on small models" if pair["size"] == sizes[0] else " on large models"


def _ratio_answer(narrow: str, pair: Row, section: str, conclusion: str) -> Answer:
    detail = (
        f"{_subject(pair)} takes {number(pair[TIME])} ms in {narrow}"
        f" and {number(pair[TIME + BASE])} ms in fp32."
    )
    if not (pair["low"] > 1 or pair["high"] < 1):
        detail += " The interval of the ratio includes 1."
    return Answer(
        f"{narrow} over fp32",
        ratio(pair["ratio"]),
        interval(pair["low"], pair["high"]),
        conclusion,
        detail,
        scope_of(pair),
        section,
        bool(pair["is_cpu_bound"]),
    )


def _when_compiled(pair: Row, found: pd.DataFrame) -> str:
    """Return the same pair with compiled steps, if it was measured."""
    if pair.get("compile") != "eager":
        return ""
    axes = (RUN, "size", "model", LENGTH, "pass", "batch_size", "attention")
    compiled = found[found["compile"] != "eager"].to_dict("records")
    row = counterpart_among(compiled, [axis for axis in axes if axis in found])(pair)
    if row is None:
        return ""
    own = f"{number(row[TIME])} ms in {row['precision']}"
    base = f"{number(row[TIME + BASE])} ms in {row['precision' + BASE]}"
    return f" Compiled: {own} and {base} ({ratio(row['ratio'])})."


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


def _unclear(main: pd.DataFrame) -> str:
    count = int((~is_clear(main)).sum())
    return f" {count} of {len(main)} pairs show no clear difference." if count else ""


def about_compiling(results: Results) -> Iterator[Answer]:
    """Yield the median speed-up of compiled steps, by precision."""
    steps = measured(results, "train_step", TIME, LOW, HIGH)
    steps = steps[steps["pass"] == "train_step"] if _has(steps, "pass", "train_step") else steps
    for scope in ("blocks", "model"):
        found = pairs(steps, results.axes, "compile", ("eager", scope))
        if len(found):
            yield _of_compiling(_main_run(found))
            return


def _of_compiling(found: pd.DataFrame) -> Answer:
    is_free = is_gpu_bound(found)
    of_gpu = found[is_free] if is_free.any() else found
    kind = "GPU-bound pair" if (of_gpu["bound"] == "GPU-bound").any() else "pair"
    by_precision = of_gpu["ratio"].groupby(of_gpu["precision"].astype(str))
    medians, counts = by_precision.median(), by_precision.size()
    best = str(medians.idxmax())
    of_best = of_gpu[of_gpu["precision"] == best]
    others = []
    for precision in ordered_values("precision", of_gpu["precision"]):
        if precision != best:
            count = counted(int(counts[precision]), "pair")
            others.append(f"{precision} {ratio(medians[precision])} ({count})")
    text = f"Median of {counted(len(of_best), kind)} in {best}"
    spread = f"{of_best['ratio'].min():.2f} to {of_best['ratio'].max():.2f}"
    if len(of_best) == 1:
        pair = of_best.iloc[0]
        text = f"{_subject(pair)} takes {number(pair[TIME + BASE])} ms eager"
        text += f" and {number(pair[TIME])} ms compiled"
        spread = interval(pair["low"], pair["high"])
    if others:
        text += f"; {', '.join(others)}"
    bound = found[~is_free]
    if is_free.any() and len(bound):
        text += f"; {counted(len(bound), 'CPU-bound pair')} {ratio(bound['ratio'].median())}"
    conclusion = "Compiling makes a step faster."
    if others:
        gain = "makes a step faster," if medians.min() > 1 else "gains"
        conclusion = f"Compiling {gain} most in {best}."
    if not is_clear(of_gpu).any():
        conclusion = "Compiling makes no clear difference."
        text += ". Each interval of a ratio includes 1"
    elif medians[best] < 1:
        conclusion = "Compiling makes a step slower."
    return Answer(
        "compiled over eager",
        ratio(medians[best]),
        spread,
        conclusion,
        f"{text}.",
        f"{best}, {counted(len(of_best), kind)}",
        "compile",
        not is_free.any(),
    )


def about_memory(results: Results) -> Iterator[Answer]:
    """Yield how many cells run out of memory, by limit, or the largest peak if none does."""
    cells = results.cells
    decided = cells[cells["status"].isin(["ok", *OUT_OF_MEMORY])]
    limited, usual = limited_steps(results), preferring(decided, MAIN)
    out = decided[_ran_out(decided)]
    if _ran_out(limited).any():
        yield _of_limits(limited, usual, results.axes)
    elif len(out):
        yield Answer(
            "out of memory",
            f"{len(out):,}",
            f"of {counted(len(decided), 'cell')}",
            f"{counted(len(out), 'cell')} ran out of memory.",
            _shortest(out) + _largest_peak(decided),
            _shortest(out).rstrip("."),
            "memory",
        )
    elif (row := _extreme(usual, _PEAK, largest=True)) is not None:
        yield Answer(
            "largest peak",
            number(row[_PEAK] / GIB),
            "GiB",
            "No cell ran out of memory.",
            _largest_peak(usual).strip(),
            scope_of(row),
            "memory",
        )


def _ran_out(cells: pd.DataFrame) -> pd.Series[bool]:
    return cells["status"].isin(OUT_OF_MEMORY)


def _of_limits(limited: pd.DataFrame, unlimited: pd.DataFrame, axes: Sequence[str]) -> Answer:
    by_limit = _ran_out(limited).groupby(limited[LIMIT].astype(float))
    # The limit that separates the cells best.
    chosen: Any = (by_limit.mean() - 0.5).abs().idxmin()
    detail = ""
    without = unlimited[unlimited[LIMIT].isna()]
    if len(without) and not _ran_out(without).any():
        detail = f"Without a limit none fails.{_largest_peak(without)}"
    table = contexts_by_limit(limited, axes)
    table = replace(table, rows=evenly(table.rows, _MOST_MODELS))
    return Answer(
        "out of memory",
        f"{by_limit.sum()[chosen]}/{by_limit.size()[chosen]}",
        f"of the steps fail in {chosen:g} GiB",
        "The memory limit decides what fits.",
        detail,
        f"limit {chosen:g} GiB",
        "memory",
        table=table,
    )


def _largest_peak(cells: pd.DataFrame) -> str:
    row = _extreme(cells, _PEAK, largest=True)
    if row is None:
        return ""
    text = f" The largest peak is {gibibytes(row[_PEAK])}: {scope_of(row)}"
    if has_value(row, "predicted_peak_allocated_bytes"):
        text += f"; predicted {gibibytes(row['predicted_peak_allocated_bytes'])}"
    return f"{text}."


def _shortest(failed: pd.DataFrame) -> str:
    row = _extreme(failed, LENGTH, largest=False)
    if row is None:
        return ""
    return f"The shortest context that fails is {row[LENGTH]:,} ({scope_of(row)})."


def about_attention(results: Results) -> Iterator[Answer]:
    """Yield how much faster the best attention is than the naive one.

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


def _of_attention(joined: pd.DataFrame) -> Answer:
    best = _best_attention(joined, fullest_context(joined, "attention"))
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
    longest = _best_attention(joined, joined[LENGTH].max())
    if longest[LENGTH] > best[LENGTH]:
        detail += f" At {longest[LENGTH]:,}, where fewer were measured, {longest['attention']} is"
        detail += f" {ratio(longest['ratio'])} as fast as naive."
    return Answer(
        f"{name} over naive",
        ratio(best["ratio"]),
        interval(best["low"], best["high"]),
        conclusion,
        detail,
        f"context {best[LENGTH]:,}, {best['precision']}",
        "attention",
        bool(best["is_cpu_bound"]),
    )


def _best_attention(joined: pd.DataFrame, length: int) -> Row:
    """Return the pair with the largest ratio at a context, of those with a clear one if any has."""
    own = joined[joined[LENGTH] == length]
    clear = own[is_clear(own)]
    return _extreme(clear if len(clear) else own, "ratio", largest=True)


def _growth(cells: pd.DataFrame) -> Iterator[Answer]:
    """Yield the exponent with which the time of naive attention grows."""
    # The time of a CPU-bound cell depends little on the context.
    long = preferring(cells[(cells[LENGTH] >= _MIN_LENGTH) & ~depends_on_cpu(cells)], MAIN)
    keys = [axis for axis in (RUN, "d_head", "precision", "batch_size", "pass") if axis in long]
    exponents = []
    for _, series in long.groupby(keys, dropna=False, observed=True):
        if series[LENGTH].nunique() >= _MIN_LENGTHS:
            logs = np.log(series[[LENGTH, TIME]].astype(float))
            exponents.append(np.polyfit(logs[LENGTH], logs[TIME], 1)[0])
    if exponents:
        low, middle, high = np.quantile(exponents, [0, 0.5, 1])
        lengths = f"{long[LENGTH].min():,} to {long[LENGTH].max():,}"
        yield Answer(
            "attention time",
            f"n^{middle:.2f}",
            f"{low:.2f} to {high:.2f}",
            "Attention time grows as a power of the context.",
            f"Median of the exponents of {len(exponents)} series, from context {lengths}.",
            f"context {lengths}",
            "attention",
        )


def about_backward(results: Results) -> Iterator[Answer]:
    """Yield how long the backward pass takes, compared with the forward pass, by precision."""
    cells = measured(results, "train_step", "forward_ms_median", "backward_ms_median")
    cells = preferring(cells, MAIN)
    free = cells[~depends_on_cpu(cells)] if len(cells) else cells
    shown = free if len(free) else cells
    if shown.empty or "precision" not in shown:
        return
    ratios = shown["backward_ms_median"] / shown["forward_ms_median"]
    by_precision = ratios.groupby(shown["precision"].astype(str)).median()
    precisions = ordered_values("precision", shown["precision"])
    texts = [f"{ratio(by_precision[name])} in {name}" for name in precisions]
    kind = "GPU-bound cell" if len(free) and _has(shown, "device", "cuda") else "cell"
    yield Answer(
        "backward / forward",
        ratio(ratios.median()),
        f"{ratios.min():.2f} to {ratios.max():.2f}" if len(ratios) > 1 else "",
        f"The backward pass takes {'longer' if ratios.median() > 1 else 'no longer'}"
        " than the forward pass.",
        f"Median of {counted(len(shown), kind)}: {', '.join(texts)}.",
        counted(len(shown), kind),
        "where",
        kind == "cell" and _has(shown, "device", "cuda"),
    )


def about_failures(results: Results) -> Iterator[Answer]:
    """Yield how many cells failed for another reason than memory, with the most common one."""
    cells = results.cells
    failed = cells[~cells["status"].isin(_NOT_FAILED)]
    if len(failed):
        statuses = failed["status"].value_counts()
        listed = ", ".join(f"{count} {status}" for status, count in statuses.items())
        by_status = f"By status: {listed}."
        if list(statuses.index) == ["failed"]:  # the label says it
            listed = by_status = ""
        yield Answer(
            "failed",
            f"{len(failed):,}",
            f"of {counted(len(cells), 'cell')}",
            f"{counted(len(failed), 'cell')} failed.",
            f"{by_status}{_common_reason(failed)}".strip(),
            listed,
            "failures",
        )


def _common_reason(failed: pd.DataFrame) -> str:
    for column in ("message", "reason"):
        texts = failed[column].dropna() if column in failed else pd.Series(dtype=object)
        lines = texts.astype(str).str.strip().str.split("\n").str[0]
        counts = lines[lines != ""].value_counts()
        if len(counts):
            return f" Most often ({counts.iloc[0]:,}): {counts.index[0]}"
    return ""


def _longest_step(results: Results) -> Iterator[Answer]:
    """Yield the time of the longest step, of a run that compares nothing."""
    for task in ("train_step", "attention"):
        cells = preferring(measured(results, task, TIME, LOW, HIGH), MAIN)
        if len(cells):
            row = _extreme(cells, TIME, largest=True)
            low, high = number(row[LOW]), number(row[HIGH])
            several = len(cells) > 1
            yield Answer(
                "longest step" if several else "step",
                number(row[TIME]),
                f"[{low}, {high}] ms",
                f"{_subject(row)} takes {number(row[TIME])} ms.",
                f"It is the longest of {len(cells):,}." if several else "",
                scope_of(row),
                "time",
                bool(depends_on_cpu(cells.loc[[row.name]]).item()) and row["device"] != "cpu",
            )
            return


def _extreme(cells: pd.DataFrame, column: str, largest: bool) -> Row:
    """Return the row with the largest or the smallest value of a column, or None without values."""
    if column not in cells or cells[column].isna().all():
        return None
    values = cells[column].astype(float)
    return cells.iloc[values.argmax() if largest else values.argmin()]


def _has(cells: pd.DataFrame, axis: str, value: str) -> bool:
    return axis in cells and bool((cells[axis] == value).any())


def _main_run(found: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of the run that has most of them: other runs repeat some of them."""
    sizes = found.get(RUN, pd.Series(dtype=object)).value_counts()
    return preferring(found, {RUN: sizes.index[0]}) if len(sizes) else found


def _subject(row: Row) -> str:
    pass_name = PASSES.get(str(row.get("pass")), "step")
    context = f" at context {row[LENGTH]:,}" if has_value(row, LENGTH) else ""
    return f"A {pass_name} of {name_of(row)}{context}"


RULES: Sequence[Rule] = (
    about_precision,
    about_compiling,
    about_memory,
    about_attention,
    about_backward,
    about_failures,
)
