"""The sentences that people write under their tables, from the data: each with its numbers, and
only where there are such.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import linear_regression, median
from typing import get_args

import pandas as pd

from orchestrator.analysis.axes import ordered_values
from orchestrator.analysis.cpu_bound import BoundBy, bound_by, depends_on_cpu
from orchestrator.analysis.results import Results
from tasks.spec.parameters import TIMING_AXES, Precision

_RUN = "run"  # the axis of several runs that are read as one
_LONG = 1024  # attention over fewer tokens is bound by what does not grow with them
_MOST_SENTENCES = 24  # of an answer on a terminal
_PRECISIONS = re.compile(rf"\b(?:{'|'.join(get_args(Precision))})\b")
_FEW = 2  # lengths, below which no exponent is fitted
_TIME = "step_ms_median"
_PEAK = "peak_allocated_bytes"
_NONE = "–"
_MAIN = ("size", "precision", "compile", "pass")  # the axes that everybody looks for
_WAYS = ("precision", "compile", "compile_mode", "attention")  # of computing attention


@dataclass(frozen=True)
class KeyFinding:
    question: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class FindingRule:
    """answer: gives a sentence for each thing that the cells have to say about it, or none."""

    text: str
    answer: Callable[[Results], Iterator[str]]


def answers(results: Results) -> list[KeyFinding]:
    """Of the questions that this run can answer."""
    found = [KeyFinding(question.text, tuple(question.answer(results))) for question in QUESTIONS]
    return [answer for answer in found if answer.sentences]


def first_sentences(answer: KeyFinding, file: str) -> KeyFinding:
    """For a terminal: of each precision as many as of any other, while it has some. file: which has
    all of them.
    """
    more = len(answer.sentences) - _MOST_SENTENCES
    if more <= 0:
        return answer
    before: Counter[frozenset[str]] = Counter()
    turns = []
    for place, sentence in enumerate(answer.sentences):
        precisions = frozenset(_PRECISIONS.findall(sentence))
        turns.append((before[precisions], place))
        before[precisions] += 1
    chosen = sorted(place for _, place in sorted(turns)[:_MOST_SENTENCES])
    return replace(
        answer,
        sentences=(*(answer.sentences[place] for place in chosen), f"… and {more} more: {file}"),
    )


def backward_over_forward(results: Results) -> Iterator[str]:
    cells = _measured(results, "train_step", "forward_ms_median", "backward_ms_median")
    for told, group in _told_apart(cells, ["precision", "compile"]):
        ratios = group["backward_ms_median"] / group["forward_ms_median"]
        ahead = ratios[~depends_on_cpu(group)]
        own = f"; where not CPU-bound {_spread(ahead)}" if 0 < len(ahead) < len(ratios) else ""
        yield f"{told}: the backward pass takes {_spread(ratios)} as long as the forward pass{own}"


def variability_by_warm_up(results: Results) -> Iterator[str]:
    """Of the same cells with each number of steps: those of a large run and of a short test of it
    differ in all else too.
    """
    cells = _alike_but_in(
        _measured(results, "train_step", "step_synced_ms_mean", "step_synced_ms_sd"),
        "warmup_steps",
        results,
    )
    for told, group in _told_apart(cells, ["warmup_steps"]):
        relative = group["step_synced_ms_sd"] / group["step_synced_ms_mean"]
        which = f"median of the same {len(group)} cells" if len(group) > 1 else "one cell"
        yield f"{told}: a step varies by {relative.median():.1%} (std/mean, {which})"


def where_narrow_precision_pays(results: Results) -> Iterator[str]:
    """Faster or slower is where the intervals of the medians leave a gap; where they overlap
    neither is said.
    """
    cells = _measured(results, "train_step", _TIME, "step_ms_ci_low", "step_ms_ci_high")
    for precision in [
        name for name in ("tf32", "bf16", "fp16") if name in set(cells.get("precision", ()))
    ]:
        pairs = _pairs(cells, results, "precision", ("fp32", precision))
        ends = [f"step_ms_ci_{end}{side}" for end in ("low", "high") for side in ("", "_base")]
        needed = ["context_length", *ends, _TIME, f"{_TIME}_base"]
        first = ("size", "compile", "pass")
        axes = [axis for axis in dict.fromkeys((*first, *_axes(cells, results))) if axis in pairs]
        others = [axis for axis in axes if axis not in ("context_length", "precision")]
        telling = [
            axis for axis in others if axis in first or pairs[axis].nunique(dropna=False) > 1
        ]
        for told, group in _told_apart(pairs[[*telling, *needed]], telling):
            ordered = group.sort_values("context_length")
            lengths, longest = ordered["context_length"], ordered.iloc[-1]
            pays = ordered["step_ms_ci_high"] < ordered["step_ms_ci_low_base"]
            slower = ordered["step_ms_ci_low"] >= ordered["step_ms_ci_high_base"]
            if pays.any():
                speed_up = longest[f"{_TIME}_base"] / longest[_TIME]
                where = _from_where(lengths, pays, slower)
                yield f"{told}: {precision} is faster than fp32 {where}; {speed_up:.2f}× at {longest['context_length']}"
            elif slower.all():
                yield f"{told}: {precision} is nowhere faster than fp32 (contexts {_listed(lengths)})"
            else:
                elsewhere = f", and slower at {_listed(lengths[slower])}" if slower.any() else ""
                yield f"{told}: {precision} is not told apart from fp32 at context {_listed(lengths[~slower])}{elsewhere}"


_COMPILE_WAYS = ("compile_mode", "compile_cache")


def gain_of_compiling(results: Results) -> Iterator[str]:
    cells = _measured(results, "train_step", _TIME)
    for how in [name for name in ("blocks", "model") if name in set(cells.get("compile", ()))]:
        pairs = _pairs(cells, results, "compile", ("eager", how), _COMPILE_WAYS)
        for told, group in _told_apart(pairs, ["size", "precision", "pass"]):
            yield f"{told}: compiled ({how}) a step is {_spread(group[f'{_TIME}_base'] / group[_TIME])} as fast as eager"


def growth_of_attention(results: Results) -> Iterator[str]:
    """By least squares of the logarithms: a sentence for each way of computing it, over whatever
    else was varied.

    What is CPU-bound takes as long with half the length, or in part: of time, such lengths are left
    out.
    """
    cells = _measured(results, "attention", _TIME)
    if "context_length" not in cells:
        return
    long = cells[cells["context_length"] >= _LONG]
    others = [axis for axis in _axes(long, results) if axis not in ("context_length", *_WAYS)]
    for told, way in _told_apart(long, _WAYS):
        yield from _growth(f"{told}: time", way[bound_by(way) != BoundBy.CPU], _TIME, others, way)
        if _PEAK in way:
            yield from _growth(f"{told}: peak memory", way[way[_PEAK].notna()], _PEAK, others, way)


def _growth(
    what: str, cells: pd.DataFrame, column: str, others: Sequence[str], among: pd.DataFrame
) -> Iterator[str]:
    """A sentence for each range of lengths that series of these cells have. among: what a series is
    told apart from.
    """
    by_lengths: dict[str, list[tuple[str, float]]] = {}
    for which, series in _told_apart(cells, others, always=(), among=among):
        if series["context_length"].nunique() >= _FEW:
            lengths = f"{series['context_length'].min()} to {series['context_length'].max()}"
            by_lengths.setdefault(lengths, []).append((which, _exponent(series, column)))
    for lengths, exponents in by_lengths.items():
        several = f", in {len(exponents)} series" if len(exponents) > 1 else ""
        yield f"{what} as length^{_between(exponents)}, from {lengths}{several}"


def _between(exponents: Sequence[tuple[str, float]]) -> str:
    """The exponents from the least to the largest, each with the series that it is of."""
    ordered = sorted(exponents, key=itemgetter(1))
    (least, low), (most, high) = ordered[0], ordered[-1]
    if f"{low:.2f}" == f"{high:.2f}":
        return f"{low:.2f}"
    middle = median(exponent for _, exponent in ordered)
    return f"{low:.2f} to {high:.2f} (median {middle:.2f}; least with {least}, most with {most})"


def where_memory_ends(results: Results) -> Iterator[str]:
    cells = results.cells
    if "context_length" not in cells:
        return
    known = (
        cells["status"].isin(["ok", "oom", "oom_inferred", "host_oom"])
        & cells["context_length"].notna()
    )
    decided = cells.loc[known, ["task", "status", *results.axes]]
    if len(decided) and (decided["status"] == "ok").all():
        yield f"Nothing ran out of memory, up to context {decided['context_length'].max()}"
        return
    of_host = decided["status"] == "host_oom"
    if of_host.any():
        shortest = decided.loc[of_host, "context_length"].min()
        yield f"{of_host.sum()} of {len(decided)} cells ran out of the memory of their host, from context {shortest} on"
    decided = decided[~of_host]
    for _, of_task in decided.groupby("task"):
        if (of_task["status"] != "ok").any():
            yield from _where_memory_ends(of_task, results)


def _where_memory_ends(decided: pd.DataFrame, results: Results) -> Iterator[str]:
    """Of the cells of one task, which have the same axes."""
    ran_out = decided["status"] != "ok"
    others = [
        axis
        for axis in _axes(decided, results)
        if axis not in ("context_length", "timing", *TIMING_AXES)
    ]
    keys = [decided[axis].astype("string").fillna(_NONE) for axis in others]
    of_interest = decided[ran_out.groupby(keys).transform("any")] if others else decided
    for told, group in _told_apart(
        of_interest, others, among=decided, always=("memory_limit_gib",)
    ):
        lengths, ended_well = group["context_length"].to_numpy(), group["status"].to_numpy() == "ok"
        first = lengths[~ended_well].min()
        fits = lengths[ended_well & (lengths < first)]
        longest = (
            f", and has enough for {fits.max()}" if len(fits) else ", the shortest that was tried"
        )
        yield f"{told}: runs out of memory at context {first}{longest}"


QUESTIONS: tuple[FindingRule, ...] = (
    FindingRule("How long is the backward pass, against the forward pass?", backward_over_forward),
    FindingRule("How much does a step vary, with and without warm-up?", variability_by_warm_up),
    FindingRule("Where does a narrower precision start to pay?", where_narrow_precision_pays),
    FindingRule("What does compiling gain, by size?", gain_of_compiling),
    FindingRule("How does attention grow with length?", growth_of_attention),
    FindingRule("At which context does memory run out?", where_memory_ends),
)


def _measured(results: Results, task: str, *columns: str) -> pd.DataFrame:
    """The cells of a task that have a number in each of the columns."""
    cells = results.cells
    if not {"task", *columns} <= set(cells):
        return cells.iloc[:0]
    return cells[(cells["task"] == task) & cells[list(columns)].notna().all(axis=1)]


def _axes(cells: pd.DataFrame, results: Results) -> list[str]:
    """Those of the cells' parameters that any of them has."""
    return [axis for axis in results.axes if cells[axis].notna().any()]


def _pairs(
    cells: pd.DataFrame,
    results: Results,
    axis: str,
    values: tuple[str, str],
    without: Sequence[str] = (),
) -> pd.DataFrame:
    """Return the cells with one value of an axis, joined with their counterparts of a base value.

    values: the base value and the other one. Columns of the counterpart end in `_base`. The two
    cells are equal in all axes except `axis` and those in `without`.
    """
    keys = [name for name in _axes(cells, results) if name != axis and name not in without]
    shown = cells[
        [name for name in cells if name in (axis, *keys) or str(name).startswith("step_ms_")]
    ]
    hashable = shown.assign(
        **{
            key: shown[key].astype("string").fillna("")
            for key in keys
            if key not in ("context_length", "size")
        }
    )
    bases, others = (hashable[hashable[axis] == value] for value in values)
    return (
        others.merge(bases, on=[key for key in keys if key in hashable], suffixes=("", "_base"))
        if keys
        else others.iloc[:0]
    )


def _alike_but_in(cells: pd.DataFrame, axis: str, results: Results) -> pd.DataFrame:
    """The cells that differ in nothing but one axis and are there with each of its values, if it
    has several.

    A value that no cell shares with such a counterpart is none of them.
    """
    if axis not in cells or cells[axis].nunique() < 2:
        return cells.iloc[:0]
    others = [name for name in _axes(cells, results) if name != axis]
    keys = [cells[name].astype("string").fillna(_NONE) for name in others] or [
        pd.Series("", cells.index)
    ]
    values_of_each = cells.groupby(keys)[axis].transform("nunique")
    compared = cells.loc[values_of_each > 1, axis].nunique()
    return cells[(values_of_each == compared) & (values_of_each > 1)]


def _groups(
    cells: pd.DataFrame, axes: Sequence[str]
) -> Iterator[tuple[tuple[object, ...], pd.DataFrame]]:
    """By the values of the axes that there are, in the order of tables."""
    if cells.empty or not set(axes) <= set(cells):
        return
    ranks = {
        axis: {str(value): place for place, value in enumerate(ordered_values(axis, cells[axis]))}
        for axis in axes
    }
    named = [cells[axis].astype("string").fillna(_NONE) for axis in axes]
    found = [
        (keys if isinstance(keys, tuple) else (keys,), group)
        for keys, group in cells.groupby(named)
    ]
    yield from sorted(
        found,
        key=lambda one: [
            ranks[axis].get(str(key), -1) for axis, key in zip(axes, one[0], strict=True)
        ],
    )


def _told_apart(
    cells: pd.DataFrame,
    axes: Sequence[str],
    always: Sequence[str] = ("size",),
    among: pd.DataFrame | None = None,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Groups by some axes, each with the values in which it differs from the others, or from all
    that it is `among`.

    Of several runs the name comes first, and says what all cells of it have: only what differs
    within it is said beside it, and what everybody looks for.

    always: axes that are said anyway.
    """
    present, others = [axis for axis in axes if axis in cells], cells if among is None else among
    runs = dict(iter(others.groupby(others[_RUN].astype("string")))) if _RUN in present else {}
    differing = _differing(present, others, always)
    by_run = [_RUN] if _RUN in differing else []
    first = [axis for axis in differing if axis in _MAIN or axis in always]
    telling = {run: _differing(present, own, first) for run, own in runs.items()}
    for keys, group in _groups(cells, present):
        values = dict(zip(present, keys, strict=True))
        shown = [*by_run, *telling[str(values[_RUN])]] if by_run else differing
        yield (
            " ".join(f"{axis}={values[axis]}" for axis in shown if values[axis] != _NONE)
            or "All cells",
            group,
        )


def _differing(axes: Sequence[str], cells: pd.DataFrame, always: Sequence[str]) -> list[str]:
    return [axis for axis in axes if cells[axis].nunique(dropna=False) > 1 or axis in always]


def _spread(ratios: pd.Series[float]) -> str:
    """The median, and from where to where."""
    if len(ratios) == 1:
        return f"{ratios.iloc[0]:.2f}× (one cell)"
    return f"{ratios.median():.2f}× (median of {len(ratios)} cells, {ratios.min():.2f}× to {ratios.max():.2f}×)"


def _from_where(lengths: pd.Series[int], pays: pd.Series[bool], slower: pd.Series[bool]) -> str:
    """From which context on something holds, and what contradicts that."""
    first = lengths[pays].min()
    contrary = {"slower": slower, "not told apart": ~pays & ~slower}
    found = [
        f"{what} at {_listed(lengths[which])}"
        for what, of in contrary.items()
        if (which := of & (lengths > first)).any()
    ]
    unless = f", but {' and '.join(found)}" if found else ""
    since = (
        f"at context {first}, the shortest that was tried"
        if first == lengths.min()
        else f"from context {first} on"
    )
    return since + unless


def _listed(lengths: pd.Series[int]) -> str:
    return ", ".join(map(str, lengths.unique()))


def _exponent(group: pd.DataFrame, column: str) -> float:
    lengths, values = (
        [math.log(value) for value in group[name]] for name in ("context_length", column)
    )
    return linear_regression(lengths, values).slope
