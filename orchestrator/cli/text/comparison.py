"""Output of `sweep compare`: what differs, a verdict for each cell, and the result of the gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from orchestrator.analysis.axes import has_value
from orchestrator.analysis.checks import MEMORY, STATUS, Check, Comparison
from orchestrator.analysis.comparison import cell_labels
from orchestrator.analysis.cpu_bound import BoundBy
from orchestrator.analysis.results import Results, load_results
from orchestrator.analysis.time_checks import KERNELS, OPERATIONS, STEP
from orchestrator.analysis.verdicts import Verdict
from orchestrator.common.errors import RunError
from orchestrator.common.text import cell_count, cells_and_verb, counted, shell_command
from orchestrator.planning.invocation import command_with
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.kernel_tables import difference_between
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.registry import TABLES
from orchestrator.report.tables.table import (
    MISSING,
    NOTES,
    Entry,
    RenderedTable,
    milliseconds,
    quantity,
)
from orchestrator.store.run import Run, find_cell
from tasks.spec.facts import FACTS

KERNEL_DIFF = "kernel-diff"
_LISTED = 8
# Of names in a line that says what differs.
_MEANINGS = {fact.name: f" ({fact.doc})" for fact in FACTS if fact.name.endswith("_source")}
_NOT_GOOD = (Verdict.SLOWER, Verdict.WORSE, Verdict.UNDECIDED)
_REASONS = 3  # why cells are undecided, in lines of their own; cells of one side that are named
_VERDICT = "verdict"
_JUDGED = {STEP: "step time", KERNELS: "kernel time", OPERATIONS: "step time in operations"}


def describe_comparison(
    comparison: Comparison, screen: Screen, runs: Sequence[Run] = ()
) -> Iterator[str]:
    """Yield the lines of a comparison. The tables fit the screen.

    runs: A and B, whose commands are shown with the options that decide what is undecided.
    """
    yield from describe_differences(comparison)
    if runs and not comparison.differences:
        yield "A and B are the same program, so each difference is a false alarm"
    for table in filter(None, (comparison_table(comparison), changes_table(comparison))):
        yield f"\n{dense_table_text(table, screen, '--format csv')}\n"
    yield from describe_outcome(comparison, runs)


def describe_differences(comparison: Comparison) -> list[str]:
    """Return a line for each setting in which A and B differ."""
    found = comparison.differences.items()
    return [f"{name}{_MEANINGS.get(name, '')}: {a} → {b}" for name, (a, b) in found]


def describe_outcome(comparison: Comparison, runs: Sequence[Run] = ()) -> Iterator[str]:
    """Yield the result, what it rests on, and the commands that decide what is undecided."""
    yield _headline(comparison)
    memory = [check for check in comparison.exact if check.gate == MEMORY]
    if memory and not comparison.times:
        yield f"memory: {_counts(memory)}"
    for gate, judged in _JUDGED.items():
        checks = [check for check in comparison.times if check.gate == gate]
        if checks:
            ratios = [one.ratio for one in checks if one.ratio]
            yield f"by {judged}: {_counts(checks)}{f'; {_range(ratios)}' if ratios else ''}"
    yield from _exact(comparison)
    yield from _without_memory(comparison)
    yield from _information(comparison.times)
    yield from _power(comparison)
    for side, labels in zip("AB", comparison.only, strict=True):
        if labels:
            shown = ", ".join(labels[:_REASONS])
            more = f" and {len(labels) - _REASONS} more" if len(labels) > _REASONS else ""
            yield f"not compared: {cell_count(len(labels))} only in {side}: {shown}{more}"
    for check in comparison.checks:
        if check.accepted and check.verdict in _NOT_GOOD:
            yield f"accepted: {check.gate} of {check.label}, because {check.accepted}"
    yield from _undecided(comparison, runs)


def _headline(comparison: Comparison) -> str:
    count = len(comparison.cells)
    failed = len({check.cell for check in comparison.failures})
    open_ = count - comparison.decided_cells
    if comparison.outcome == "FAIL":
        suffix = f"; {open_} undecided" if open_ else ""
        word = "FALSE ALARM" if comparison.is_same else "FAIL"
        return f"{word}: {failed} of {cells_and_verb(count, 'is worse', 'are worse')} in B{suffix}"
    if comparison.outcome == "PASS":
        suffix = f"; {cell_count(open_)} UNDECIDED, within at_least" if open_ else ""
        if missing := len(comparison.only[0]):
            suffix += f"; {cells_and_verb(missing, 'of A is', 'of A are')} missing in B"
        return f"PASS: {comparison.decided_cells} of {cell_count(count)}{suffix}"
    most = 1 - comparison.policy.at_least
    return (
        f"UNDECIDED: {open_} of {cells_and_verb(count, 'was', 'were')} not decided,"
        f" more than {most:.0%}"
    )


def _counts(checks: Sequence[Check]) -> str:
    counts = Counter(check.verdict for check in checks)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def _range(ratios: Sequence[float]) -> str:
    return f"B / A {min(ratios):.3f} to {max(ratios):.3f}"


def _exact(comparison: Comparison) -> Iterator[str]:
    by_gate: dict[str, list[Check]] = {}
    for check in comparison.exact:
        by_gate.setdefault(check.gate, []).append(check)
    parts = []
    for gate, checks in by_gate.items():
        good = sum(check.verdict in (Verdict.SAME, Verdict.BETTER) for check in checks)
        if gate == MEMORY:
            limit = f"{comparison.policy.memory:.0%}"
            text = f"peak memory at most {limit} more in {good} of {cell_count(len(checks))}"
            changes = [one.ratio - 1 for one in checks if one.ratio and one.b is not None]
            largest = f" (largest change {max(changes, key=abs):+.1%})" if changes else ""
            parts.append(f"{text}{largest}")
        else:
            parts.append(f"{gate} not worse in {good} of {len(checks)}")
    if parts:
        yield f"exact: {'; '.join(parts)}"


def _without_memory(comparison: Comparison) -> Iterator[str]:
    """Yield how many cells have no result to judge, and how many have one without a peak."""
    statuses = [check for check in comparison.exact if check.gate == STATUS]
    same = [check for check in statuses if check.verdict is Verdict.SAME]
    for reason, count in Counter(one.reason for one in same if one.reason).items():
        yield f"status of {cell_count(count)}: {reason}"
    measured = {one.cell for one in same if not one.reason}
    without = len(measured - {check.cell for check in comparison.exact if check.gate == MEMORY})
    if without:
        yield (
            f"peak memory of {cell_count(without)} is not judged: it was not measured, or is that of a"
            " whole process on a CPU"
        )


def _information(checks: Sequence[Check]) -> Iterator[str]:
    others = [check for check in checks if check.gate != STEP and check.step_ratio]
    for bound in (BoundBy.GPU, BoundBy.CPU):
        ratios = [one.step_ratio for one in others if one.bound_by is bound and one.step_ratio]
        if ratios:
            cells = counted(len(ratios), f"{bound} cell")
            yield f"for information, step time of {cells}, which is not judged: {_range(ratios)}"


def _power(comparison: Comparison) -> Iterator[str]:
    found = [check.detectable for check in comparison.times if check.detectable]
    if found:
        middle = sorted(found)[len(found) // 2]
        alarm = f"{comparison.policy.false_alarm:.2%}".replace(".00", "")
        detectable = f"{middle:.1%}" if middle < 1 else "more than 100%"
        yield (
            f"probability of a false alarm in the whole comparison: at most {alarm}; a slow-down of"
            f" {detectable} in the median cell would be found with 90%"
        )


def _undecided(comparison: Comparison, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the number of cells for each reason, and the commands that decide them."""
    reasons = Counter(check.reason for check in comparison.undecided).most_common()
    for reason, count in reasons[:_REASONS]:
        yield f"undecided: {cell_count(count)}: {reason}"
    if count := sum(count for _, count in reasons[_REASONS:]):
        yield f"undecided: {cell_count(count)}, for other reasons in the notes"
    options = [check.remedy for check in comparison.undecided if check.remedy]
    if not options or not runs:
        return
    if comparison.command:
        yield "to decide, run again what measured them: it ends with the command that decides"
        yield f"  {shell_command(comparison.command)}"
        return
    if any(run.is_published for run in runs):
        yield f"to decide, measure both on one machine, with {' '.join(_joined(options))}"
        return
    yield "to decide, measure both and compare again:"
    for run in runs:
        yield f"  {command_with(run, _joined(options))}"


def _joined(options: Sequence[str]) -> list[str]:
    """Return the words of all options, and the largest number of repetitions."""
    words: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition(" ")
        if name != "--repeat" or int(value) > int(words.get(name, "0")):
            words[name] = value
    return [word for pair in words.items() for word in pair]


def comparison_table(comparison: Comparison) -> RenderedTable | None:
    """Return a table with a row for each time that is compared; None without times."""
    rows = [(check.settings, _measures(check)) for check in comparison.times]
    return text_table("Comparison", rows, _VERDICT) if rows else None


def _measures(check: Check) -> dict[str, Entry]:
    """Return the entries of a row; on a narrow screen, the last ones are left out."""
    interval = rounds = MISSING
    if check.interval and check.interval[1] < float("inf"):
        interval = Entry(f"{check.interval[0]:.4f} to {check.interval[1]:.4f}")
    if check.log_ratios:
        rounds = quantity(len(check.log_ratios), ".0f")
    shown = milliseconds if check.unit == "ms" else partial(quantity, form=",.0f")
    return {
        _VERDICT: Entry(str(check.verdict)),
        "B / A": quantity(check.ratio, ".4f"),
        NOTES: Entry(check.reason),
        "by": Entry(check.gate) if check.threshold is not None else MISSING,
        "interval": interval,
        "A": shown(check.a),
        "B": shown(check.b),
        "rounds": rounds,
        "step, B / A": quantity(check.step_ratio, ".4f"),
    }


def changes_table(comparison: Comparison) -> RenderedTable | None:
    """Return a table of exact quantities that changed; None if none did."""
    rows = []
    for check in comparison.exact:
        if check.verdict is Verdict.SAME:
            continue
        measures = {
            _VERDICT: Entry(str(check.verdict)),
            "B / A": quantity(check.ratio if check.unit == "bytes" else None, ".4f"),
            NOTES: Entry(check.reason),
            "what": Entry(check.gate),
            "A": to_gib(check.a, ".4g") if check.unit == "bytes" else MISSING,
            "B": to_gib(check.b, ".4g") if check.unit == "bytes" else MISSING,
        }
        rows.append((check.settings, measures))
    return text_table("Changes", rows, _VERDICT) if rows else None


def compare_kernels(a: Run, b: Run, cells: tuple[str, str] = ("", "")) -> RenderedTable:
    """Return the kernels that differ most between two cells.

    cells: how the id of each cell begins; empty for the only one of its run that has kernels.
    Raise RunError if a run has several, or if milliseconds of a step are known of one cell only.
    """
    table = next(one for one in TABLES if one.name == KERNEL_DIFF)
    sides: list[pd.DataFrame] = []
    names: list[str] = []
    for side, run, prefix in zip("AB", (a, b), cells, strict=True):
        results = load_results(run.require())
        cell, kernels = _kernels(results, run, prefix)
        sides.append(kernels)
        names.append(f"{side}: {_described(results, cell)}, cell {cell} of {run}")
    known = [bool(kernels["steps"].notna().all()) for kernels in sides]
    if known[0] != known[1]:
        unknown = (a, b)[known.index(False)]
        problem = f"{unknown}: the number of steps in its trace is not known"
        raise RunError(problem, "Import it again with --steps N")
    grid = difference_between(sides, ["A", "B"])
    return RenderedTable(table, grid, ". ".join(names))


def _described(results: Results, cell: str) -> str:
    row = results.cells.set_index("cell").loc[cell].to_dict()
    files = [str(row[name]) for name in ("file", "rank") if has_value(row, name) and row[name]]
    return " ".join([cell_labels(results)[cell], *files])


def _kernels(results: Results, run: Run, prefix: str) -> tuple[str, pd.DataFrame]:
    kernels = results.kernels()
    present = sorted(set(kernels["cell"].astype(str)))
    if not present:
        raise RunError(f"{run}: has no cell with kernels", "Measure with --instrument kernels")
    if not prefix and len(present) > 1:
        listed = ", ".join(present[:_LISTED])
        raise RunError(f"{run}: has {len(present)} cells with kernels", f"Name RUN:CELL: {listed}")
    cell = find_cell(prefix, present, run, "cell with kernels")
    return cell, kernels[kernels["cell"] == cell]
