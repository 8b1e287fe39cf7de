"""Golden output of commands on whole runs: every table, `status`, `plan` and `compare`.

Enters: three small runs in `tests/data/runs/`, measured on a CPU at commit 87786d5, and the runs in
`results/published/`. `interrupted` was stopped by SIGINT; `again` has repetitions by `--fresh`, a
`--retry` that succeeded and one whose cell crashed; `ray` ran two cells at a time, of which those of
one model crashed. They have no artifacts and no `cells.parquet`. Their output is pinned in full. Of
the published runs, whose tables are large, the digest of each table is pinned.

The output may not depend on the machine, the time or the folder: the commands run in a folder that
holds nothing but the runs, and the version of this program is replaced. Floats in JSON are compared
with nine significant digits. After an intended change, write the golden files again with

    GOLDEN_UPDATE=1 python -m pytest -m "" tests/test_golden_runs.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store.layout import REPORT
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.test_golden import check_golden, run_sweep_command, sha256

STORED = ROOT / "tests" / "data" / "runs"
PUBLISHED = ROOT / "results" / "published"
PUBLISHED_RUNS = sorted(file.parent.name for file in PUBLISHED.glob("h200/*/run.json"))
# A selection of all cells: with one, `sweep report` writes no files and prints every row.
ALL_CELLS = ("--where", f"status={'|'.join(Status)}")
SELECTIONS = ("", "--fresh", "--retry ok", "--retry crashed", "--repeat 3", "--only ok")
PAIRS = (("full", "tenth"), ("kernels", "kernels-bf16"))  # those with cells in common

# 2,300 published cells take 20 CPU seconds, on a busy machine minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _fixed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the program a version that does not change with its source."""
    monkeypatch.setattr("orchestrator.planning.request.program_source", lambda: "0123456789ab")
    monkeypatch.setattr("orchestrator.planning.request.git_commit", lambda: None)


@pytest.fixture
def stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the stored runs with their config and model into the current folder."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def published_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the published runs into `published` in the current folder."""
    shutil.copytree(PUBLISHED, tmp_path / "published", ignore=shutil.ignore_patterns(REPORT))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("run", ["interrupted", "again", "ray"])
@pytest.mark.usefixtures("stored_runs")
def test_status_and_plan_of_stored_runs(run: str) -> None:
    """Status and plans: cells that are done and left, and those that commands measure again."""
    actual = {f"status {run}": run_sweep_command("status", run).splitlines()}
    for options in SELECTIONS:
        command = ["plan", "stored.yaml", "--out", run, *options.split()]
        actual[" ".join(command)] = run_sweep_command(*command).splitlines()
    check_golden(f"runs/{run}-plan.json", actual)


@pytest.mark.parametrize("run", ["interrupted", "again", "ray"])
@pytest.mark.usefixtures("stored_runs")
def test_tables_of_stored_runs(run: str) -> None:
    """Every table as CSV and JSON, and all columns of the cells."""
    csv = print_tables(run, "csv")
    actual = {
        "csv": [table.splitlines() for table in split_csv(csv)],
        "json": list(split_json(print_tables(run, "json"))),
        "cells": next(split_json(run_sweep_command("report", run, *ALL_CELLS, "--format", "json"))),
    }
    check_golden(f"runs/{run}-tables.json", actual)


@pytest.mark.usefixtures("stored_runs")
def test_comparison_of_stored_runs() -> None:
    """A run with repetitions and replaced attempts, compared with one on Ray."""
    text = run_sweep_command("compare", "again", "ray").splitlines()
    rows = next(split_json(run_sweep_command("compare", "again", "ray", "--format", "json")))
    csv = run_sweep_command("compare", "again", "ray", "--format", "csv").splitlines()
    check_golden("runs/comparison.json", {"text": text, "csv": csv, "json": rows})


@pytest.mark.usefixtures("published_runs")
def test_status_and_plan_of_published_runs() -> None:
    """Status of each published run, and the cells that a command would measure again."""
    actual = {}
    for run in PUBLISHED_RUNS:
        folder = f"published/h200/{run}"
        plan = ("plan", f"{folder}/config.yaml", "--out", folder, "--gpu", "H200", "--retry", "ok")
        actual[f"status {run}"] = run_sweep_command("status", folder).splitlines()
        actual[f"plan {run}"] = digest(run_sweep_command(*plan, "--all"))
    check_golden("runs/published-plan.json", actual)


@pytest.mark.usefixtures("published_runs")
@pytest.mark.parametrize("form", ["csv", "json"])
def test_tables_of_published_runs(form: str) -> None:
    """A digest of each table of all runs as one."""
    printed = print_tables("published/h200", form)
    split = split_csv if form == "csv" else split_json
    check_golden(f"runs/published-{form}.json", list(map(digest, split(printed))))


@pytest.mark.usefixtures("published_runs")
def test_cells_of_published_runs() -> None:
    """A digest of all columns of the cells of each run."""
    printed = run_sweep_command("report", "published/h200", *ALL_CELLS, "--format", "json")
    cells: dict[str, list[object]] = {}
    (rows,) = split_json(printed)
    for row in rows:
        cells.setdefault(row["run"], []).append(row)
    digests = {run: digest(rows) for run, rows in cells.items()}
    check_golden("runs/published-cells.json", digests)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.usefixtures("published_runs")
def test_comparison_of_published_runs(a: str, b: str) -> None:
    """The text in full, and a digest of all rows."""
    command = ("compare", f"published/h200/{a}", f"published/h200/{b}")
    actual = {
        "text": run_sweep_command(*command).splitlines(),
        "csv": digest(run_sweep_command(*command, "--format", "csv")),
        "json": digest(next(split_json(run_sweep_command(*command, "--format", "json")))),
    }
    check_golden(f"runs/published-{a}-{b}.json", actual)


def print_tables(run: str, form: str) -> str:
    """Return every table that the program knows, with all rows and columns."""
    listed = run_sweep_command("report", "--table", "list", run)
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    options = [word for name in names for word in ("--table", name)]
    printed = run_sweep_command("report", run, *ALL_CELLS, *options, "--format", form)
    assert "this table cannot be made" not in printed
    return printed


def split_csv(printed: str) -> list[str]:
    """Return each table; an empty line ends a table."""
    return printed.removesuffix("\n\n").split("\n\n")


def split_json(printed: str) -> Iterator[Any]:
    """Yield each JSON value of a text, with nine significant digits of its floats."""
    decoder = json.JSONDecoder(parse_float=lambda text: float(f"{float(text):.9g}"))
    while printed := printed.lstrip():
        value, end = decoder.raw_decode(printed)
        printed = printed[end:]
        yield value


def digest(value: object) -> str:
    """Return the first letters and a digest of a text or a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:50]!r} {len(text)} {sha256(text)[:32]}"
