"""Results of a run: its cells as one frame, the names of their axes, and its larger tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pandas as pd

from orchestrator.analysis.cells import derive_cells
from orchestrator.common.errors import ConfigError, RunError
from orchestrator.common.files import trim_memory
from orchestrator.common.hashing import sha256
from orchestrator.common.provenance import SOURCE_ROOT
from orchestrator.common.suggestions import suggestion
from orchestrator.common.text import value_text
from orchestrator.common.user_cache import read_cached, write_cached
from orchestrator.store.cell_state import Marks, read_states
from orchestrator.store.manifest import Manifest
from orchestrator.store.run import INCOMPLETE, Run
from orchestrator.store.tables import cells_content, read_cells
from tasks.spec.cell import dotted_values
from tasks.spec.source_digest import digest_of, python_files
from tasks.spec.status import Status
from tasks.spec.tables import UNKNOWN_CLASS
from tasks.traces.kernel_classes import classify

_OTHER_FILTERS = ("task", "run", "status")  # columns besides the axes that --where accepts
_DERIVED_FROM = ("attempts", "samples", "predictions")
_CACHE, _MOST_CACHED = "cells", 20  # a folder, and its files of about 1 MB for a thousand cells
# The packages whose code derives cells: all that orchestrator/analysis imports, and what these import.
CODE = (
    "model",
    "tasks/spec",
    "tasks/traces",
    "orchestrator/analysis",
    "orchestrator/common",
    "orchestrator/hardware",
    "orchestrator/store",
)


@dataclass(frozen=True, eq=False)
class Results:
    """Results of a run.

    cells: one row per cell, see `derive_cells`.
    axes: names of the parameters, in the order in which the tasks of the run declare them.
    read_table: returns a stored table of the whole run, such as `kernels`.
    cells_without_samples: number of successful cells whose samples are missing.
    marks: those of `--fresh` and `--retry` by cell (see `cell_state`).
    """

    cells: pd.DataFrame
    axes: tuple[str, ...]
    manifest: Manifest
    # A function, because there may be millions of rows, which few tables of a report need.
    read_table: Callable[[str], pd.DataFrame] = lambda table: pd.DataFrame()
    cells_without_samples: int = 0
    marks: Marks = field(default_factory=dict)

    @property
    def incomplete(self) -> list[str]:
        """The ids of the cells that have no result because some of their rows are missing."""
        return list(self.cells.loc[self.cells["status"] == INCOMPLETE, "cell"])

    def attempts(self) -> pd.DataFrame:
        """Return the attempt that `cells` shows of each cell."""
        return self._shown_rows("attempts")

    def kernels(self) -> pd.DataFrame:
        """Return the kernels of the attempt that `cells` shows of each cell.

        `ms` is the total of one step, null if the number of steps in the trace is unknown.
        """
        rows = self._shown_rows("kernels")
        return rows.assign(ms=rows["total_ns"] / rows["steps"] / 1e6)

    def allocations(self) -> pd.DataFrame:
        """Return the allocations in use at the peak of each attempt in `cells`."""
        return self._shown_rows("allocations")

    def live(self) -> pd.DataFrame:
        """Return the GPU memory in use over time, of each attempt in `cells`."""
        return self._shown_rows("live")

    def ranks(self) -> pd.DataFrame:
        """Return one row per rank of each attempt in `cells` with several."""
        return self._shown_rows("ranks")

    def _shown_rows(self, table: str) -> pd.DataFrame:
        return self.read_table(table).merge(self.cells[["cell", "attempt"]])


def load_results(
    run: Run,
    every_version: bool = False,
    read_samples: Callable[[], pd.DataFrame] | None = None,
) -> Results:
    """Read the results of a run, from cells.parquet or the user's cache, or derive and cache them.

    every_version: also read cells that were measured by an older version of their task, although
        the run has newer ones.
    read_samples: see `derive_results`.
    """
    key = cells_key(run, every_version)
    found = run.read_cells(key)
    if found is None and (content := read_cached(_CACHE, key)) is not None:
        found = read_cells(content, key)
    if found is not None:
        return _of_cells(run, *found)
    results = derive_results(run, every_version, read_samples)
    # A sweep may have written in between: then these are not the results of the key.
    if cells_key(run, every_version) == key:
        content = cells_content(results.cells, key, cells_facts(results))
        write_cached(_CACHE, key, content, _MOST_CACHED)
    return results


def load_with_samples(run: Run, every_version: bool = False) -> tuple[Results, pd.DataFrame]:
    """Read the results of a run (see `load_results`), and all its samples, texts as categories."""
    read_samples = cache(partial(run.read, "samples", categories=True))
    return load_results(run, every_version, read_samples), read_samples()


def cells_key(run: Run, every_version: bool) -> str:
    """Return the key of a run's cells in cells.parquet: a digest of stored tables and of code.

    every_version: see `load_results`. Raise RunError if a part of the attempts or samples is damaged.
    """
    has_older_versions = False
    if every_version:  # both readings are the same without older versions
        versions = set(run.rows("attempts", ["task", "task_version"]))
        has_older_versions = len(versions) > len({task for task, _ in versions})
    identity = [
        run.table_versions(_DERIVED_FROM),
        # Incomplete attempts may lack rows of other tables than these three.
        sorted((*key, missing) for key, missing in run.incomplete_attempts().items()),
        run.read_manifest().get("defaults", {}),
        run.marks(),
        has_older_versions,
        pd.__version__,
        code_digest(),
    ]
    return sha256(json.dumps(identity))


def code_digest() -> str:
    """Return a digest of the code that derives cells: 90 files, 3 ms."""
    files = [SOURCE_ROOT / "orchestrator/hardware/gpus.toml"]
    for package in CODE:
        files += python_files(SOURCE_ROOT / package)
    return digest_of((file.name, file) for file in files)


def cells_facts(results: Results) -> dict[str, object]:
    """Return what is stored in cells.parquet with the cells."""
    return {"axes": results.axes, "cells_without_samples": results.cells_without_samples}


def stored_results(run: Run, key: str) -> Results | None:
    """Return the results from cells.parquet, or None if it is missing or has another key."""
    found = run.read_cells(key)
    return None if found is None else _of_cells(run, *found)


def _of_cells(run: Run, cells: pd.DataFrame, facts: Mapping[str, Any]) -> Results:
    # Damaged predictions raise RunError here too, as they do where the cells are derived.
    list(run.rows("predictions", ["cell"]))
    return Results(
        cells,
        tuple(facts["axes"]),
        run.read_manifest(),
        cache(partial(_read_table, run)),
        facts["cells_without_samples"],
        run.marks(),
    )


def derive_results(
    run: Run, every_version: bool, read_samples: Callable[[], pd.DataFrame] | None = None
) -> Results:
    """Return the results from the stored tables.

    read_samples: returns the table of samples; None: it is read here and not needed afterwards.
    """
    # Samples are read after the attempts: a sweep may be writing, and what is read later has at
    # least the attempts that were read before.
    attempts, manifest = read_attempts(run), run.read_manifest()
    samples = read_samples() if read_samples else run.read("samples", categories=True)
    # A row that is older than a parameter gets the parameter's default, from which its cell id was
    # computed as well.
    defaults: Mapping[str, Mapping[str, object]] = manifest.get("defaults", {})
    params, axes = [], {}
    for task, text in zip(attempts["task"], attempts["params"], strict=True):
        values = {**defaults.get(task, {}), **json.loads(text)}
        params.append(json.dumps(values))
        axes.update(dotted_values(values))
    attempts["params"] = params
    versions = attempts.groupby("task")["task_version"]
    if not every_version and versions.nunique().gt(1).any():
        attempts = _of_latest_version(attempts)
    succeeded = set(attempts.loc[attempts["status"] == Status.OK, "cell"])
    marks = run.marks()
    cells = derive_cells(attempts, samples, run.read("predictions"), marks)
    without_samples = len(succeeded.difference(samples["cell"].cat.categories))
    # The samples are the largest table: what is free of their memory goes back to the system.
    del samples
    trim_memory()
    read_table = cache(partial(_read_table, run))
    return Results(cells, tuple(axes), manifest, read_table, without_samples, marks)


def read_attempts(run: Run, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return the attempts. Those that lack rows of another table have the status `incomplete`.

    columns: names of columns to read, `status` among them; empty: all columns.
    """
    attempts, incomplete = run.read("attempts", list(columns) or None), run.incomplete_attempts()
    if not incomplete:
        return attempts
    keys = list(zip(attempts["cell"], attempts["attempt"], strict=True))
    is_incomplete = [key in incomplete for key in keys]
    attempts.loc[is_incomplete, "status"] = INCOMPLETE
    if "evidence" in attempts:
        reasons = [json.dumps({"reason": incomplete[key]}) for key in keys if key in incomplete]
        attempts.loc[is_incomplete, "evidence"] = reasons
    return attempts


def incomplete_cells(run: Run) -> set[str]:
    """Return the ids of the cells that have no result because some of their rows are missing."""
    return {cell for cell, state in read_states(run).items() if state.status == INCOMPLETE}


def _of_latest_version(attempts: pd.DataFrame) -> pd.DataFrame:
    """Return the attempts by the newest version of the task that measured the same parameters."""
    sorted_params = attempts["params"].map(json.loads).map(partial(json.dumps, sort_keys=True))
    versions = attempts.assign(_params=sorted_params).groupby(["task", "_params"])["task_version"]
    return attempts[attempts["task_version"] == versions.transform("max")]


def _read_table(run: Run, table: str) -> pd.DataFrame:
    rows = run.read(table)
    if table != "kernels":
        return rows
    # Kernels are classified again, because the program that measured them may have known fewer names.
    stored = zip(rows["name"], rows["operator"], rows["kernel_class"], strict=True)
    classes = []
    for name, operator, kernel_class in stored:
        found = classify(name, operator)
        classes.append(kernel_class if found == UNKNOWN_CLASS else found)
    return rows.assign(kernel_class=classes)


def choose_cells(results: Results, prefixes: Sequence[str]) -> Results:
    """Return the results of the cells whose ids begin with one of the prefixes.

    Raise RunError if no id begins with a prefix.
    """
    cells = results.cells
    for prefix in prefixes:
        if not cells["cell"].str.startswith(prefix).any():
            problem = f"there is no cell {prefix} in this run"
            raise RunError(problem, suggestion(prefix, cells["cell"]))
    return replace(results, cells=cells[cells["cell"].str.startswith(tuple(prefixes))])


def choose_where(results: Results, conditions: Mapping[str, Sequence[object]]) -> Results:
    """Return the results of the cells that have one of the given values of each parameter.

    `task`, `run` and `status` can be named too. Raise ConfigError for an unknown name, RunError if
    no cell is left.
    """
    cells = results.cells
    known = [name for name in (*results.axes, *_OTHER_FILTERS) if name in cells]
    for name, wanted in conditions.items():
        if name not in known:
            problem = f"--where {name}: these cells have no such parameter"
            raise ConfigError(problem, suggestion(name, known))
        if not _has_one_of(results.cells[name], wanted).any():
            texts = list(map(value_text, wanted))
            present = sorted(set(results.cells[name].dropna()))
            if not present:
                raise RunError(f"no cell has a value for {name}", f"Leave {name} out of --where")
            problem = f"no cell has {name}={'|'.join(texts)}"
            raise RunError(problem, suggestion(texts[0], map(value_text, present)))
        cells = cells[_has_one_of(cells[name], wanted)]
    if cells.empty:
        raise RunError("no cell meets all conditions of --where", "Leave one of them out")
    return replace(results, cells=cells)


def _has_one_of(column: pd.Series[Any], wanted: Sequence[object]) -> pd.Series[bool]:
    """Return for each cell if it has one of the values. None among them matches an empty entry."""
    found = [None in wanted if pd.isna(value) else value in wanted for value in column]
    return pd.Series(found, column.index, dtype=bool)
