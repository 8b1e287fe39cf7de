"""Key findings of a run: sentences with their numbers, from the cells.

Each rule asks one question and yields a sentence for each group of cells that can answer it, or
none. The label of a sentence names only the axes in which its group differs from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import linear_regression, median
from typing import Any, get_args

import numpy as np
import pandas as pd

from orchestrator.analysis.axes import NOTHING, RUN, sort_cells
from orchestrator.analysis.cpu_bound import BoundBy, bound_by, depends_on_cpu
from orchestrator.analysis.results import Results
from tasks.spec.messages import typed_error_text
from tasks.spec.parameters import TIMING_AXES, Precision

# Attention over fewer tokens is limited by work that does not grow with them.
_MIN_LENGTH = 1024
_MIN_LENGTHS = 2  # for an exponent
_MAX_SENTENCES = 24  # of a finding on a terminal
_PRECISIONS = rf"\b(?:{'|'.join(get_args(Precision))})\b"
_LENGTH = "context_length"
_TIME = "step_ms_median"
_LOW, _HIGH = "step_ms_ci_low", "step_ms_ci_high"
_PEAK = "peak_allocated_bytes"
_MAIN = ("size", "precision", "compile", "pass")  # the axes that readers look for first
_COMPILE_AXES = ("compile_mode", "compile_cache")
_ATTENTION_AXES = ("precision", "compile", "compile_mode", "attention")


@dataclass(frozen=True)
class KeyFinding:
    """A question, and the sentences that answer it."""

    question: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class FindingRule:
    """A question, and the function that yields its sentences."""

    question: str
    find: Callable[[Results], Iterator[str]]


def key_findings(results: Results) -> list[KeyFinding]:
    """Return the findings of the questions that this run can answer."""
    findings = []
    for rule in RULES:
        try:
            sentences = tuple(rule.find(results))
        except Exception as error:  # one answer that fails must not cost the report
            sentences = (f"this question cannot be answered: {typed_error_text(error)}",)
        if sentences:
            findings.append(KeyFinding(rule.question, sentences))
    return findings


def shorten(finding: KeyFinding, file: str) -> KeyFinding:
    """Return the finding for a terminal, with a reference to the file that has all sentences."""
    surplus = len(finding.sentences) - _MAX_SENTENCES
    if surplus <= 0:
        return finding
    # The sentences are in the order of the precisions, so the first ones would all be of one. Each
    # precision gets the same number, as long as it has some.
    sentences = pd.Series(finding.sentences)
    precisions = sentences.str.findall(_PRECISIONS).map(frozenset)
    turns = sentences.groupby(precisions, sort=False).cumcount()
    chosen = turns.sort_values(kind="stable").index[:_MAX_SENTENCES]
    shown = sentences[chosen.sort_values()]
    return replace(finding, sentences=(*shown, f"… and {surplus} more: {file}"))


def backward_over_forward(results: Results) -> Iterator[str]:
    """Yield how long the backward pass takes, by precision and compilation."""
    cells = _measured(results, "train_step", "forward_ms_median", "backward_ms_median")
    for label, group in _labelled_groups(cells, ["precision", "compile"]):
        ratios = group["backward_ms_median"] / group["forward_ms_median"]
        sentence = f"the backward pass takes {_spread(ratios, ' as long as the forward pass')}"
        gpu_bound = ratios[~depends_on_cpu(group)]
        if 0 < len(gpu_bound) < len(ratios):
            sentence += f"; without CPU-bound cells {_spread(gpu_bound)}"
        yield f"{label}: {sentence}"


def variability_by_warm_up(results: Results) -> Iterator[str]:
    """Yield how much step times vary, by number of warm-up steps."""
    cells = _measured(results, "train_step", "step_synced_ms_mean", "step_synced_ms_sd")
    # Only cells that exist with each number of steps: the cells of a large run and of a short test
    # of it differ in everything else too.
    cells = _cells_with_each_value(cells, "warmup_steps", results)
    for label, group in _labelled_groups(cells, ["warmup_steps"]):
        relative = (group["step_synced_ms_sd"] / group["step_synced_ms_mean"]).median()
        basis = "one cell"
        if len(group) > 1:
            basis = f"median of the same {len(group)} cells"
        yield f"{label}: step times vary by {relative:.1%} (standard deviation / mean, {basis})"


def where_narrow_precision_is_faster(results: Results) -> Iterator[str]:
    """Yield the context lengths from which a precision is faster than fp32."""
    cells = _measured(results, "train_step", _TIME, _LOW, _HIGH)
    for precision in ("tf32", "bf16", "fp16"):
        pairs = _pairs(cells, results, "precision", ("fp32", precision))
        axes = dict.fromkeys((*_MAIN, *_axes(pairs, results, without=("precision", _LENGTH))))
        del axes["precision"]
        for label, group in _labelled_groups(pairs, list(axes)):
            yield f"{label}: {_compare_with_fp32(group.sort_values(_LENGTH), precision)}"


def _compare_with_fp32(pairs: pd.DataFrame, precision: str) -> str:
    lengths = pairs[_LENGTH]
    # Faster or slower only if the intervals of the medians leave a gap.
    faster = pairs[_HIGH] < pairs[f"{_LOW}_base"]
    slower = pairs[_LOW] >= pairs[f"{_HIGH}_base"]
    unclear = ~faster & ~slower
    if slower.all():
        contexts = _listed(lengths)
        return f"{precision} is not faster than fp32 at any measured context ({contexts})"
    if not faster.any():
        contexts = _listed(lengths[unclear])
        sentence = f"{precision} does not differ clearly from fp32 at context {contexts}"
        if slower.any():
            sentence += f"; it is slower at {_listed(lengths[slower])}"
        return sentence
    first, longest = lengths[faster].min(), pairs.iloc[-1]
    sentence = f"{precision} is faster than fp32 from context {first} on"
    if first == lengths.min():
        sentence += " (the shortest measured)"
    exceptions = []
    for what, condition in (("slower", slower), ("not clearly different", unclear)):
        contrary = lengths[condition & (lengths > first)]
        if len(contrary):
            exceptions.append(f"{what} at {_listed(contrary)}")
    if exceptions:
        sentence += f", but {' and '.join(exceptions)}"
    speed_up = longest[f"{_TIME}_base"] / longest[_TIME]
    return f"{sentence}; {speed_up:.2f}× at context {longest[_LENGTH]}"


def gain_of_compiling(results: Results) -> Iterator[str]:
    """Yield how fast compiled steps are, compared with eager ones."""
    cells = _measured(results, "train_step", _TIME)
    for scope in ("blocks", "model"):
        pairs = _pairs(cells, results, "compile", ("eager", scope), _COMPILE_AXES)
        for label, group in _labelled_groups(pairs, ["size", "precision", "pass"]):
            gain = _spread(group[f"{_TIME}_base"] / group[_TIME], " as fast as an eager one")
            yield f"{label}: a compiled step ({scope}) is {gain}"


def growth_of_attention(results: Results) -> Iterator[str]:
    """Yield the exponents with which time and memory grow, for each way to compute attention."""
    cells = _measured(results, "attention", _TIME)
    if _LENGTH not in cells:
        return
    long = cells[cells[_LENGTH] >= _MIN_LENGTH]
    others = _axes(long, results, without=(_LENGTH, *_ATTENTION_AXES))
    for label, group in _labelled_groups(long, _ATTENTION_AXES):
        # The time of a CPU-bound cell depends little on the length; its memory does.
        is_cpu_bound = bound_by(group) == BoundBy.CPU
        yield from _growth(f"{label}: time", _TIME, group.assign(left_out=is_cpu_bound), others)
        if _PEAK in group:
            is_unknown = ~(group[_PEAK] > 0).fillna(False).astype(bool)
            with_peak = group.assign(left_out=is_unknown)
            yield from _growth(f"{label}: peak memory", _PEAK, with_peak, others)


def _growth(subject: str, column: str, cells: pd.DataFrame, others: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each range of lengths over which series of cells exist.

    A series differs from another in `others`.
    """
    by_range: dict[str, list[tuple[str, float]]] = {}
    shown = cells[~cells["left_out"]]
    for label, series in _labelled_groups(shown, others, always=(), among=cells):
        if series[_LENGTH].nunique() >= _MIN_LENGTHS:
            # Least squares of the logarithms: the slope is the exponent.
            logs = np.log(series[[_LENGTH, column]].astype(float))
            exponent = linear_regression(logs[_LENGTH], logs[column]).slope
            lengths = f"{series[_LENGTH].min()} to {series[_LENGTH].max()}"
            by_range.setdefault(lengths, []).append((label, exponent))
    for lengths, exponents in by_range.items():
        sentence = f"{subject} grows as length^{_between(exponents)}, from {lengths} tokens"
        if len(exponents) > 1:
            sentence += f", in {len(exponents)} series"
        yield sentence


def _between(exponents: Sequence[tuple[str, float]]) -> str:
    """Return the range of labelled exponents, with the labels of the lowest and the highest."""
    ordered = sorted(exponents, key=itemgetter(1))
    (lowest, low), (highest, high) = ordered[0], ordered[-1]
    if f"{low:.2f}" == f"{high:.2f}":
        return f"{low:.2f}"
    middle = median(map(itemgetter(1), ordered))
    extremes = f"lowest with {lowest}, highest with {highest}"
    return f"{low:.2f} to {high:.2f} (median {middle:.2f}; {extremes})"


def where_memory_ends(results: Results) -> Iterator[str]:
    """Yield the context lengths at which cells run out of memory."""
    cells = results.cells
    if _LENGTH not in cells:
        return
    is_decided = cells["status"].isin(["ok", "oom", "oom_inferred", "host_oom"])
    columns = ["task", "status", *results.axes]
    decided = cells.loc[is_decided & cells[_LENGTH].notna(), columns]
    if len(decided) and (decided["status"] == "ok").all():
        yield f"No cell ran out of memory, up to context {decided[_LENGTH].max()}"
        return
    on_host = decided["status"] == "host_oom"
    if on_host.any():
        count, shortest = f"{on_host.sum()} of {len(decided)}", decided.loc[on_host, _LENGTH].min()
        yield f"{count} cells ran out of CPU memory, from context {shortest} on"
    # Cells of one task have the same axes.
    for _, of_task in decided[~on_host].groupby("task"):
        if (of_task["status"] != "ok").any():
            yield from _where_gpu_memory_ends(of_task, results)


def _where_gpu_memory_ends(cells: pd.DataFrame, results: Results) -> Iterator[str]:
    others = _axes(cells, results, without=(_LENGTH, "timing", *TIMING_AXES))
    ran_out = (cells["status"] != "ok").groupby(_keys(cells, others)).transform("any")
    limit = ("memory_limit_gib",)
    for label, group in _labelled_groups(cells[ran_out], others, always=limit, among=cells):
        succeeded = group["status"] == "ok"
        first = group.loc[~succeeded, _LENGTH].min()
        fitting = group.loc[succeeded & (group[_LENGTH] < first), _LENGTH]
        longest = ", the shortest measured"
        if len(fitting):
            longest = f"; context {fitting.max()} fits"
        yield f"{label}: runs out of memory at context {first}{longest}"


RULES: tuple[FindingRule, ...] = (
    FindingRule(
        "How long does the backward pass take, compared with the forward pass?",
        backward_over_forward,
    ),
    FindingRule("How much do step times vary, with and without warm-up?", variability_by_warm_up),
    FindingRule(
        "From which context length is a narrower precision faster?",
        where_narrow_precision_is_faster,
    ),
    FindingRule("How much faster is a compiled step?", gain_of_compiling),
    FindingRule("How does attention grow with the context length?", growth_of_attention),
    FindingRule("At which context length does memory run out?", where_memory_ends),
)


def _measured(results: Results, task: str, *columns: str) -> pd.DataFrame:
    """Return the cells of a task that have a number in each of the columns, above 0 in the first."""
    cells = results.cells
    if not {"task", *columns} <= set(cells):
        return cells.iloc[:0]
    values = cells[list(columns)].apply(pd.to_numeric, errors="coerce").astype("float64")
    # The first of them is a divisor or has a logarithm.
    is_measured = (np.isfinite(values) & (values >= 0)).all(axis=1) & (values[columns[0]] > 0)
    measured: pd.DataFrame = cells[(cells["task"] == task) & is_measured]
    return measured


def _axes(cells: pd.DataFrame, results: Results, without: Sequence[str] = ()) -> list[str]:
    """Return the axes in which any of the cells has a value."""
    filled = cells.filter(results.axes).dropna(axis="columns", how="all")
    return list(filled.columns.drop(list(without), errors="ignore"))


def _texts(cells: pd.DataFrame, axes: Sequence[str]) -> pd.DataFrame:
    # Null does not equal null, so cells without a value would be in no group.
    return cells[list(axes)].astype("string").fillna(NOTHING)


def _keys(cells: pd.DataFrame, axes: Sequence[str]) -> list[pd.Series[str]]:
    """Return what to group the cells by; without axes they are one group."""
    texts = _texts(cells, axes)
    return [texts[axis] for axis in axes] or [pd.Series("", cells.index)]


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
    keys = _axes(cells, results, without=(axis, *without))
    if not keys or axis not in cells:
        return cells.iloc[:0]
    named = _texts(cells, keys)
    if _LENGTH in keys:
        named[_LENGTH] = cells[_LENGTH]  # stays a number, by which the pairs are sorted
    shown = cells[[axis]].join(named).join(cells.filter(regex="^step_ms_"))
    base, other = shown[shown[axis] == values[0]], shown[shown[axis] == values[1]]
    return other.merge(base, on=keys, suffixes=("", "_base"))


def _cells_with_each_value(cells: pd.DataFrame, axis: str, results: Results) -> pd.DataFrame:
    """Return the cells that exist with each value of an axis and are equal in all other axes.

    A value that only cells without a counterpart have does not count.
    """
    if axis not in cells or cells[axis].nunique() < 2:
        return cells.iloc[:0]
    others = _axes(cells, results, without=(axis,))
    values_of_each = cells.groupby(_keys(cells, others))[axis].transform("nunique")
    compared = cells.loc[values_of_each > 1, axis].nunique()
    return cells[(values_of_each == compared) & (values_of_each > 1)]


def _labelled_groups(
    cells: pd.DataFrame,
    axes: Sequence[str],
    always: Sequence[str] = ("size",),
    among: pd.DataFrame | None = None,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the groups of cells with equal axes, in the order of tables, each with its label.

    The label names the axes in which the cells differ, or all of `among` if that is given, and
    those in `always`. In a collection it names the run first, and then the axes that differ within
    it.
    """
    if cells.empty:
        return
    present = [axis for axis in axes if axis in cells]
    everything = cells if among is None else among
    differing = _differing(present, everything, always)
    of_runs: dict[Any, list[str]] = {}
    if RUN in differing:
        main = [axis for axis in differing if axis in _MAIN or axis in always]
        for run, own in everything.groupby(_keys(everything, [RUN])[0]):
            of_runs[run] = [RUN, *_differing(present, own, main)]
    ordered = sort_cells(cells, present)
    # With one axis, pandas still gives a tuple of one text; without an axis, of one empty text.
    for texts, group in ordered.groupby(_keys(ordered, present), sort=False):
        values = dict(zip(present, texts, strict=False))
        shown = of_runs[values[RUN]] if of_runs else differing
        label = " ".join(f"{axis}={values[axis]}" for axis in shown if values[axis] != NOTHING)
        yield label or "All cells", group


def _differing(axes: Sequence[str], cells: pd.DataFrame, always: Sequence[str]) -> list[str]:
    return [axis for axis in axes if axis in always or cells[axis].nunique(dropna=False) > 1]


def _spread(ratios: pd.Series[float], unit: str = "") -> str:
    """Return the median ratio, what it is a multiple of, and its range."""
    basis = "one cell"
    if len(ratios) > 1:
        basis = f"median of {len(ratios)} cells, {ratios.min():.2f}× to {ratios.max():.2f}×"
    return f"{ratios.median():.2f}×{unit} ({basis})"


def _listed(lengths: pd.Series[int]) -> str:
    return ", ".join(map(str, lengths.unique()))
