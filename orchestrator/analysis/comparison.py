"""Comparison of two runs, or of two cells: what is slower, and what could not be decided.

Step times of GPU-bound cells are compared on one machine only, kernel times on any. CPU-bound step
times are shown, and judged only if the policy asks for it, in operations of the CPU. Memory, status,
graph breaks and recompilations hardly vary, and are compared without statistics.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import pandas as pd

from orchestrator.analysis.axes import Row, axis_text, axis_texts, each, key_axes
from orchestrator.analysis.cell_timing import CellTiming, RunTimings, load_timings
from orchestrator.analysis.checks import (
    Comparison,
    exact_checks,
    lost_check,
    require_matching,
    settings_label,
)
from orchestrator.analysis.gate_policy import Policy
from orchestrator.analysis.results import Results
from orchestrator.analysis.time_checks import CellPair, time_checks
from orchestrator.common.errors import RunError
from orchestrator.common.provenance import PROGRAM_SOURCE
from orchestrator.common.text import cell_count, shell_path
from orchestrator.store.layout import CACHE
from orchestrator.store.run import INCOMPLETE, Run, find_cell

_TASK = "task"
_TRACES = "traces are compared with --table kernel-diff"
_FINGERPRINT = ("gpu", "cpu", "torch", "cuda", "driver", "python", "commit", PROGRAM_SOURCE)
_MODEL = "model_source"  # a digest of the code of a model of your own


@dataclass(frozen=True)
class Extent:
    """The part of two runs that is compared.

    rounds: number of the first ones; None: all. cells: ids of cells; None: all.
    """

    rounds: int | None = None
    cells: Collection[str] | None = None


def compare_runs(
    a: Run,
    b: Run,
    policy: Policy | None = None,
    cells: tuple[str, str] | None = None,
    extent: Extent | None = None,
) -> Comparison:
    """Compare every cell that both runs have, or two cells.

    cells: how the id of each cell begins, the first in `a` and the second in `b`.
    extent: what is compared of them; None: all.
    Raise RunError if there is nothing to compare.
    """
    policy, extent = policy or Policy(), extent or Extent()
    first, second = load_timings(a.require()), load_timings(b.require())
    rows = [_rows(one.results, extent) for one in (first, second)]
    for run, measured in zip((a, b), rows, strict=True):
        _require_measured(run, measured)
    parameters: dict[str, tuple[str, str]] = {}
    alone: list[list[str]] = [[], []]
    if cells:
        kind = "measured cell"
        known = [[cell for cell, row in one.items() if _is_measured(row)] for one in rows]
        named = (find_cell(cells[0], known[0], a, kind), find_cell(cells[1], known[1], b, kind))
        ids = [named]
        parameters = _differing_parameters(first.results, second.results, named)
        settings = cell_settings(first.results, parameters)
    else:
        settings = cell_settings(first.results)
        ids = [(cell, cell) for cell in settings if cell in rows[0] and cell in rows[1]]
        common = {cell for cell, _ in ids}
        alone = [[str(cell) for cell in one if cell not in common] for one in rows]
    pairs, machine_facts, shares_cache = [], _machine_facts(a, b), _shares_cache(a, b)
    for one, other in ids:
        values = _values(rows[0][one], first.results.axes)
        pairs.append(
            CellPair(
                settings[one],
                (rows[0][one], rows[1][other]),
                (_timing(first, one, extent), _timing(second, other, extent)),
                policy.of_cell(values),
                policy.acceptance(values),
                machine_facts,
                shares_cache,
            )
        )
    if not any(_is_measured(row) for pair in pairs for row in pair.rows):
        if pairs:
            problem = f"{a} and {b}: have {cell_count(len(pairs))} in common, and none was measured"
            raise RunError(problem, "`sweep status` says why")
        problem = f"{a} and {b}: have no measured cell in common"
        raise RunError(problem, f"Name cells as RUN:CELL; {_TRACES}")
    require_matching(policy, [_values(row, first.results.axes) for row in rows[0].values()])
    checks = [*time_checks(pairs, policy)]
    for pair in pairs:
        found = exact_checks(pair.cell, pair.settings, pair.rows, pair.policy)
        checks += [replace(one, accepted=pair.accepted) for one in found]
    if policy.status.missing == "fail":
        lost = {cell: rows[0][cell] for cell in alone[0] if _is_measured(rows[0][cell])}
        for cell, row in lost.items():
            accepted = policy.acceptance(_values(row, first.results.axes))
            check = lost_check(cell, settings[cell], "fail", "is not in B")
            checks.append(replace(check, accepted=accepted))
    differences = parameters | _differing_fingerprints(first, second, ids)
    only = _labels(first.results, alone[0]), _labels(second.results, alone[1])
    return Comparison(tuple(checks), policy, differences, only)


def _labels(results: Results, cells: Sequence[str]) -> tuple[str, ...]:
    labels = cell_labels(results) if cells else {}
    return tuple(labels[cell] for cell in cells)


def _rows(results: Results, extent: Extent) -> dict[str, Row]:
    rows = {str(row["cell"]): row for row in each(results.cells)}
    return {cell: row for cell, row in rows.items() if extent.cells is None or cell in extent.cells}


def _require_measured(run: Run, rows: Mapping[str, Row]) -> None:
    """Raise RunError if all rows of a run are incomplete, or if it has none."""
    if all(row["status"] == INCOMPLETE for row in rows.values()):
        remedy = f"`sweep show {shell_path(run)}` lists its cells; {_TRACES}"
        raise RunError(f"{run}: has no measured cell", remedy)


def _machine_facts(a: Run, b: Run) -> tuple[str, ...]:
    """Return the names of the facts that two runs of one machine have in common."""
    if a.is_published and b.is_published and a.folder.parent != b.folder.parent:
        return ("gpu_uuid",)  # each publication numbers its hosts
    return "host", "gpu_uuid"


def _shares_cache(a: Run, b: Run) -> bool:
    """Return True if both runs took compiled code from one folder, as one run and `sweep ab` do."""
    folders = a.folder.resolve(), b.folder.resolve()
    is_contest = folders[0].parent == folders[1].parent and (folders[0].parent / CACHE).is_dir()
    return folders[0] == folders[1] or is_contest


def _timing(run: RunTimings, cell: str, extent: Extent) -> CellTiming:
    return run.timings.get(cell, CellTiming()).first(extent.rounds)


def _is_measured(row: Row) -> bool:
    return bool(row["status"] == "ok")


def _values(row: Row, axes: Sequence[str]) -> dict[str, object]:
    return {_TASK: row[_TASK], **{axis: row[axis] for axis in axes}}


def cell_labels(results: Results) -> dict[str, str]:
    """Return a text for each cell, in the order of the tables."""
    return {cell: settings_label(settings) for cell, settings in cell_settings(results).items()}


def cell_settings(
    results: Results, differing: Mapping[str, tuple[str, str]] = MappingProxyType({})
) -> dict[str, dict[str, str]]:
    """Return the task and the axes of each cell, in the order of the tables.

    `differing` shows both values.
    """
    axes = key_axes(results)
    replaced = {name: " → ".join(values) for name, values in differing.items()}
    settings = {}
    for row in each(results.cells, axes):
        texts = dict(zip(axes, axis_texts(row, axes), strict=True)) | replaced
        settings[str(row["cell"])] = {_TASK: str(row[_TASK])} | texts
    return settings


def _differing_parameters(
    a: Results, b: Results, cells: tuple[str, str]
) -> dict[str, tuple[str, str]]:
    """Return both values of the task, and of each parameter, in which two cells differ."""
    first = a.cells.set_index("cell").loc[cells[0]].to_dict()
    second = b.cells.set_index("cell").loc[cells[1]].to_dict()
    differing = {}
    for name in dict.fromkeys([_TASK, *a.axes, *b.axes]):
        values = axis_text(first.get(name)), axis_text(second.get(name))
        if values[0] != values[1]:
            differing[name] = values
    return differing


def _differing_fingerprints(
    a: RunTimings, b: RunTimings, pairs: list[tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Return both values of each fact about hardware and software in which the cells differ."""
    cells_a, cells_b = zip(*pairs, strict=True)
    first = a.results.cells[a.results.cells["cell"].isin(cells_a)]
    second = b.results.cells[b.results.cells["cell"].isin(cells_b)]
    differing = {}
    for name in _FINGERPRINT:
        values = _distinct_values(first, name), _distinct_values(second, name)
        if values[0] != values[1]:
            differing[name] = values
    models = _model_sources(a, cells_a), _model_sources(b, cells_b)
    if models[0] != models[1]:
        differing[_MODEL] = models
    # Equal digests of the measuring code are the same program, though the commits differ: a commit
    # may change nothing but documentation. Older programs wrote no digest, only the commit.
    if PROGRAM_SOURCE not in differing and _has_digests(first) and _has_digests(second):
        differing.pop("commit", None)
    return differing


def _model_sources(run: RunTimings, cells: Sequence[str]) -> str:
    """Return the digests of the models that the shown attempts of these cells ran."""
    attempts = run.results.attempts()
    facts = attempts.loc[attempts["cell"].isin(cells), "facts"].map(json.loads)
    return ", ".join(sorted({str(one[_MODEL]) for one in facts if one.get(_MODEL)})) or "none"


def _has_digests(cells: pd.DataFrame) -> bool:
    return PROGRAM_SOURCE in cells and bool(cells[PROGRAM_SOURCE].notna().all())


def _distinct_values(cells: pd.DataFrame, column: str) -> str:
    if column not in cells:
        return "unknown"
    return ", ".join(sorted(set(cells[column].dropna().map(str)))) or "unknown"
