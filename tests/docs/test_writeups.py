"""Each table and figure of five write-ups has its counterpart in the published runs, or is a hole
that tests/data/writeups.toml lists with its reason.
"""

from __future__ import annotations

import csv
import io
import shlex
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import pandas as pd
import pytest
from click.testing import CliRunner

from orchestrator.analysis.axes import each
from orchestrator.analysis.results import Results, load_results
from orchestrator.cli.main import main
from orchestrator.report.charts.memory_timeline import live_memory
from orchestrator.report.references.counterparts import COUNTERPARTS, Figures
from orchestrator.report.references.matching import matches
from orchestrator.report.references.records import ReferenceNumber, published, writeups
from orchestrator.report.references.tables import without_repetitions
from orchestrator.store.open import open_runs
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from tests.conftest import ROOT
from tests.support.fake_sweep import request_for

pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("write-ups")]

FOLDERS = ("results/published/h200", "results/published/h200-2026-11")
DATA = tomllib.loads((ROOT / "tests" / "data" / "writeups.toml").read_text())
ENTRIES = {one["name"]: one for one in DATA["writeup"]}
CONTENTS = {one["name"]: one for one in writeups() if one["name"] in ENTRIES}
OTHERS = [(name, one) for name, entry in ENTRIES.items() for one in entry["other"]]
SHOWN = [(name, one) for name, one in OTHERS if "report" in one]
ON_PAGES = [one for _, one in OTHERS if "page" in one]
DRAWN = [one for _, one in OTHERS if "timelines" in one]
HOLES = [(name, one) for name, entry in ENTRIES.items() for one in entry.get("hole", ())]
HOLES += [(name, one) for name, one in OTHERS if not {"report", "timelines", "page"} & one.keys()]
TO_MEASURE = [one["measure"] for _, one in HOLES if "measure" in one]
# The number of holes of each kind. It may fall; whoever lets it rise has lost a measurement.
NUMBERS, OTHER_HOLES = 15, 2


@cache
def results() -> Results:
    return load_results(open_runs([str(ROOT / folder) for folder in FOLDERS]))


@cache
def numbers_with_runs() -> list[tuple[ReferenceNumber, frozenset[str]]]:
    """Return each number of the write-ups with the published runs that have its counterpart."""
    asked = without_repetitions(one for one in published() if one.writeup in ENTRIES)
    found: dict[int, set[str]] = defaultdict(set)
    figures = Figures(results())
    for number, row in matches(asked, each(results().cells)):
        if COUNTERPARTS[number.metric].ours(number, row, figures) is not None:
            found[id(number)].add(str(row["run"]))
    # Without an amount, their cell ran out of memory.
    return [(one, frozenset(found[id(one)])) for one in asked if one.amount is not None]


def tables_of(name: str) -> dict[str, str]:
    """Return the titles of a write-up's tables that repeat no other, by their names."""
    tables = CONTENTS[name]["table"]
    return {one["name"]: one["title"] for one in tables if "repeats" not in one}


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")

    def read(run: Run) -> Results:
        assert isinstance(run, RunCollection)
        is_read = set(run.runs) == set(results().cells["run"])
        return results() if is_read else load_results(run)

    monkeypatch.setattr("orchestrator.analysis.results.load_results", read)


def report(*words: str, folders: Sequence[str] = FOLDERS) -> str:
    done = CliRunner().invoke(main, ["report", *folders, *words], prog_name="sweep")
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_table_is_listed_once() -> None:
    assert len(ENTRIES) == len(DATA["writeup"]) == 5
    assert sorted(ENTRIES) == sorted(CONTENTS)
    for name, entry in ENTRIES.items():
        assert list(entry["tables"]) == list(tables_of(name))


def test_the_runs_have_every_number_but_the_holes() -> None:
    missing: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for number, runs in numbers_with_runs():
        if not runs:
            missing[number.writeup, number.table][number.labels.get("part", "")] += 1
    listed = {(name, one["table"]): one["numbers"] for name, one in HOLES if "table" in one}
    assert missing == listed
    assert sum(sum(numbers.values()) for numbers in listed.values()) == NUMBERS


@pytest.mark.parametrize("name", ENTRIES)
def test_no_run_is_missing_or_superfluous(name: str) -> None:
    by_table: dict[str, list[frozenset[str]]] = defaultdict(list)
    for number, runs in numbers_with_runs():
        if number.writeup == name and runs:
            by_table[number.table].append(runs)
    assert by_table.keys() == ENTRIES[name]["tables"].keys()
    for table, answers in by_table.items():
        named = set(ENTRIES[name]["tables"][table].split("|"))
        assert all(runs & named for runs in answers), table
        for run in named:
            assert any(runs & named == {run} for runs in answers), (table, run)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("name", ENTRIES)
def test_the_table_reference_prints_each_table(name: str) -> None:
    devices = {one["name"]: one["device"] for one in CONTENTS[name]["table"]}
    by_command: dict[tuple[str, str], list[str]] = defaultdict(list)
    for table, runs in ENTRIES[name]["tables"].items():
        by_command[devices[table], runs].append(table)
    for (device, runs), tables in by_command.items():
        words = ["--reference", device, "--where", f"run={runs}", "--table", "reference"]
        rows = list(csv.DictReader(io.StringIO(report(*words, "--format", "csv"))))
        for table in tables:
            title = f"{name}: {tables_of(name)[table]}"
            own = [row for row in rows if row["source"].startswith((f"{title} (", f"{title}: "))]
            assert any(row["ours"] for row in own), (device, runs, table)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(("name", "other"), SHOWN, ids=[one["what"] for _, one in SHOWN])
def test_a_command_prints_what_is_no_table_of_numbers(name: str, other: dict[str, Any]) -> None:
    assert other.keys() - {"folder"} == {"section", "what", "report", "prints"}
    words = shlex.split(other["report"])
    assert "--where" in words
    printed = report(*words, folders=[other["folder"]] if "folder" in other else FOLDERS)
    rows = "\n".join(printed.splitlines()[2:])  # below the title
    assert other["prints"]
    assert [text for text in other["prints"] if text not in rows] == []


@pytest.mark.parametrize("one", ON_PAGES, ids=[one["what"] for one in ON_PAGES])
def test_a_page_has_what_is_no_measurement(one: dict[str, Any]) -> None:
    assert one.keys() == {"section", "what", "page", "prints"}
    page = (ROOT / one["page"]).read_text()
    assert one["prints"]
    assert [text for text in one["prints"] if text not in page] == []


@pytest.mark.parametrize("one", DRAWN, ids=[one["what"] for one in DRAWN])
def test_memory_over_time_is_drawn(one: dict[str, Any]) -> None:
    cells = results().cells
    for axis, value in one["timelines"].items():
        cells = cells[cells[axis].isin(value)]
    live = results().live()
    by_pass = cells[cells["cell"].isin(live["cell"])].groupby("pass").size()
    assert by_pass.to_dict() == one["cells"]
    drawn = live_memory(replace(results(), cells=cells))
    assert drawn is not None
    assert len(drawn.panels) == min(sum(one["cells"].values()), 4)


def test_each_hole_has_its_reason_and_what_fills_it() -> None:
    for _, one in HOLES:
        assert one["reason"].endswith(".")
    others = [one for _, one in HOLES if "table" not in one]
    assert len(others) == OTHER_HOLES
    for one in others:
        assert (
            {"section", "what", "reason"} <= one.keys() <= {"section", "what", "reason", "measure"}
        )


@pytest.mark.parametrize("words", TO_MEASURE)
def test_what_fills_a_hole_is_a_command(words: str) -> None:
    run: Any = main.commands["run"]
    with run.make_context("run", shlex.split(words)) as context:
        assert isinstance(context, click.Context)
        chosen = context.params
    cells = request_for(ROOT / chosen["config"], chosen["sets"], chosen["wheres"]).expansion.cells
    assert cells


def test_the_published_cells_of_our_configs_are_counted() -> None:
    files = sorted((ROOT / "results" / "published").glob("*/cells.parquet"))
    columns = ["cell", "status"]
    cells = pd.concat([pd.read_parquet(file, columns=columns) for file in files])
    measured = set(cells.loc[cells["status"] != "skipped", "cell"].str.rpartition(":")[2])
    for name, counted in DATA["studies"].items():
        own = request_for(ROOT / "configs" / f"{name}.yaml", out=Path("nowhere")).expansion.cells
        found = sum(cell.id in measured for cell in own)
        assert f"{found} of {len(own)}" == counted, name
