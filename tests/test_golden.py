"""Golden tests: what must stay the same while modules move and names change.

They pin the Arrow schemas, the ids of all cells in `configs/`, the reading of a stored run, the CSV
tables of a published run, and the help texts. The expected values are in `tests/data/golden/`.
After an intended change, write them again with

    GOLDEN_UPDATE=1 python -m pytest tests/test_golden.py -k help

where `-k` names the tests whose values may change. If a table of the report is renamed, rename it
in `report_csv.json` by hand. A different schema or cell id is never an intended change: stored
results would become unreadable, or would no longer belong to their cells. `old_run/` and
`example_cells.json` are never written again.

`old_run/` holds three cells measured on a CPU at commit d8a442a, without logs, traces and
`cells.parquet`, and with host name and paths replaced. The third cell ran out of memory. On a CPU
the memory_snapshot instrument only stores why it does nothing, so the tables of allocations and
predictions are tested with a published run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

# All imports from the program. When a module moves, only these lines change.
from orchestrator import load
from orchestrator.cli.main import main as sweep_command
from orchestrator.config.grid import expand
from orchestrator.config.schema import load_config
from orchestrator.config.selection import Selection
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import RERUN_FILE
from tasks.spec.cell import Cell
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "data" / "golden"
PUBLISHED = ROOT / "results" / "published" / "h200"
TRAINED, FORWARD, OUT_OF_MEMORY = "22d4636d6609", "284d5e59ff16", "295df891bb12"

Edit = Callable[[dict[str, Any]], None]  # changes a parsed JSON file in place


def check_golden(name: str, actual: Any) -> None:
    """Compare a value with its golden file, or write the file if GOLDEN_UPDATE is set."""
    file = GOLDEN / name
    is_text = file.suffix != ".json"
    if os.environ.get("GOLDEN_UPDATE"):
        text = actual if is_text else json.dumps(actual, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")
    stored = file.read_text(encoding="utf-8")
    assert actual == (stored if is_text else json.loads(stored))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def run_sweep_command(*arguments: str) -> str:
    """Run a command in this process and return what it prints to stdout."""
    runner = CliRunner(env={"COLUMNS": "80"})  # click wraps help texts at the terminal's width
    result = runner.invoke(sweep_command, arguments, prog_name="sweep")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A writable copy of the stored run, at the path where it was measured relative to `.`."""
    copy = tmp_path / "results" / "old_run"
    shutil.copytree(GOLDEN / "old_run", copy)
    monkeypatch.chdir(tmp_path)
    return copy.relative_to(tmp_path)


@pytest.fixture
def published_run(tmp_path: Path) -> Path:
    """A copy of the published run `full`: `sweep report` writes into the folder of a run."""
    shutil.copy(PUBLISHED / "publication.json", tmp_path)
    shutil.copytree(PUBLISHED / "full", tmp_path / "full", ignore=shutil.ignore_patterns("report"))
    return tmp_path / "full"


# ---------------------------------------------------------------------------- schemas


def test_arrow_schemas_match_the_golden_file() -> None:
    """Column names, their order, types and nullability of the stored tables."""
    actual = {}
    for table, schema in SCHEMAS.items():
        actual[table] = [[field.name, str(field.type), field.nullable] for field in schema]
    check_golden("schemas.json", actual)


# ---------------------------------------------------------------------------- cell ids


@pytest.fixture(scope="module")
def cells_by_config() -> Mapping[str, tuple[Cell, ...]]:
    """The cells of every config in `configs/`, by the config's name."""
    cells = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config, source = load_config(path)
        cells[path.stem] = expand(config, source, Selection({}, {})).cells
    return cells


def test_ids_of_all_cells_match_the_golden_digests(
    cells_by_config: Mapping[str, tuple[Cell, ...]],
) -> None:
    """The number of cells of each config, and a digest of their sorted ids."""
    actual = {}
    for config, cells in cells_by_config.items():
        ids = sorted(cell.id for cell in cells)
        actual[config] = {"cells": len(ids), "sha256": sha256("\n".join(ids))}
    check_golden("cell_ids.json", actual)


def test_example_cells_match_the_golden_file(
    cells_by_config: Mapping[str, tuple[Cell, ...]],
) -> None:
    """40 cells with their task, version and parameters, which show what changed in an id."""
    stored = json.loads((GOLDEN / "example_cells.json").read_text(encoding="utf-8"))
    actual = {}
    for cells in cells_by_config.values():
        for cell in cells:
            if cell.id in stored:
                actual[cell.id] = describe_cell(cell)
    assert actual == stored


def describe_cell(cell: Cell) -> str:
    """Return everything that enters a cell's id as one line."""
    values = [f"{name}={value}" for name, value in sorted(cell.params.non_default.items())]
    return " ".join([f"{cell.task}:{cell.version}", *values])


# ---------------------------------------------------------------------------- a stored run


def test_old_run_loads(old_run: Path) -> None:
    """Statuses, measured values and tables of a stored run."""
    run = load(old_run)
    cells = run.cells.set_index("cell")

    assert cells["status"].to_dict() == {TRAINED: "ok", FORWARD: "ok", OUT_OF_MEMORY: "oom"}
    assert cells["pass"].to_dict() == {
        TRAINED: "train_step",
        FORWARD: "forward",
        OUT_OF_MEMORY: "train_step",
    }

    trained = cells.loc[TRAINED]
    assert trained["parameters"] == 156_992
    assert trained["step_ms_median"] == pytest.approx(7.392141)
    assert trained["backward_ms_median"] == pytest.approx(2.426781)
    assert trained["peak_rss_bytes"] == 281_325_568
    assert trained["saved_bytes"] == 280_644
    assert trained["forward_kernel_time_ms"] == pytest.approx(1.987988)

    failed = cells.loc[OUT_OF_MEMORY]
    assert (failed["stage"], failed["phase"]) == ("warm-up", "forward")
    assert failed["asked_bytes"] == 536_870_912

    assert len(run.samples) == 71
    assert len(run.kernels) == 581


def test_old_manifest_loads(old_run: Path) -> None:
    """The manifest of a stored run has every key and value of its `run.json`."""
    manifest = load(old_run).manifest
    stored = json.loads((GOLDEN / "old_run" / "run.json").read_text(encoding="utf-8"))
    assert {key: manifest.get(key) for key in stored} == stored


def test_commands_read_old_run(old_run: Path) -> None:
    """`status`, `report` and `show` understand a stored run."""
    status = run_sweep_command("status", str(old_run))
    lines = [line.split() for line in status.splitlines()]
    assert ["2", "ok"] in lines
    assert ["1", "oom"] in lines
    assert OUT_OF_MEMORY in status
    assert (
        "nothing is left to measure of 3 cells" in status
    )  # nothing is left to measure: all three ids are recognised

    timings = run_sweep_command("report", str(old_run), "--table", "timings", "--format", "csv")
    check_golden("old_run_timings.csv", timings)

    cell = run_sweep_command("show", str(old_run), TRAINED)
    assert "by hand:" not in cell  # an attempt of that time has no rerun.sh
    script = old_run / "artifacts" / TRAINED / "1" / RERUN_FILE
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("python -m tasks attempt.json\n")
    assert "by hand: python -m tasks attempt.json" in run_sweep_command(
        "show", str(old_run), TRAINED
    )


def add_to_manifest(manifest: dict[str, Any]) -> None:
    manifest["future"] = {"unknown": 1}


def add_to_invocation(manifest: dict[str, Any]) -> None:
    manifest["invocations"][0]["future"] = {"unknown": 1}


def add_to_request(manifest: dict[str, Any]) -> None:
    manifest["invocations"][0]["asks_for"]["future"] = {"unknown": 1}


def add_to_choice(manifest: dict[str, Any]) -> None:
    manifest["invocations"][0]["asks_for"]["choice"]["future"] = 1


def add_to_selection(manifest: dict[str, Any]) -> None:
    manifest["selection"]["future"] = 1


@pytest.mark.parametrize(
    "add",
    [
        add_to_manifest,
        add_to_invocation,
        add_to_request,
        add_to_choice,
        add_to_selection,
    ],
)
def test_unknown_manifest_keys_are_ignored(add: Edit, old_run: Path) -> None:
    """A key that another version wrote into `run.json` does not change what is read.

    A stored config is read as strictly as one that is written by hand: a key of it that this
    version does not know may add cells or change how they are measured.
    """
    before = run_sweep_command("status", str(old_run))
    edit_json(old_run / "run.json", add)
    assert run_sweep_command("status", str(old_run)) == before
    assert len(load(old_run).cells) == 3


def add_to_attempt(attempt: dict[str, Any]) -> None:
    attempt["future"] = 1


def add_to_settings(attempt: dict[str, Any]) -> None:
    attempt["settings"]["future"] = 1


@pytest.mark.parametrize("add", [add_to_attempt, add_to_settings])
def test_unknown_attempt_keys_are_ignored(add: Edit, old_run: Path) -> None:
    """A key that another version wrote into `attempt.json` does not change what is read."""
    before = run_sweep_command("show", str(old_run), TRAINED)
    edit_json(old_run / "artifacts" / TRAINED / "1" / "attempt.json", add)
    assert run_sweep_command("show", str(old_run), TRAINED) == before


def edit_json(file: Path, edit: Edit) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def test_published_memory_loads() -> None:
    """Stored allocations, live bytes and predictions of a published run (NVIDIA H200)."""
    run = load(PUBLISHED / "memory")
    assert run.cells["status"].value_counts().to_dict() == {"ok": 96, "skipped": 2}
    assert len(run.allocations) == 3_119
    assert run.allocations["total_bytes"].sum() == 1_758_276_278_272
    assert len(run.predictions) == 3_641
    assert len(run.samples) == 2_978


# ---------------------------------------------------------------------------- CSV tables


def test_published_tables_as_csv(published_run: Path) -> None:
    """Every table of the published run `full`, named one by one: no page and no charts are made."""
    names = json.loads((GOLDEN / "report_csv.json").read_text(encoding="utf-8"))
    options = [word for name in names for word in ("--table", name)]
    printed = run_sweep_command("report", str(published_run), *options, "--format", "csv")
    assert "this table cannot be made" not in printed
    check_golden("report_csv.json", dict(zip(names, digest_tables(printed), strict=True)))


@pytest.mark.render
def test_published_report_as_csv(published_run: Path) -> None:
    """The same tables in the same order are printed if no table is named."""
    printed = run_sweep_command("report", str(published_run), "--format", "csv")
    stored = json.loads((GOLDEN / "report_csv.json").read_text(encoding="utf-8"))
    assert digest_tables(printed) == list(stored.values())


def digest_tables(printed: str) -> list[dict[str, Any]]:
    """Return header, number of rows and digest of each table; an empty line ends a table."""
    digests = []
    for table in printed.removesuffix("\n\n").split("\n\n"):
        header, *rows = table.splitlines()
        digests.append({"header": header, "rows": len(rows), "sha256": sha256(table)})
    return digests


# ---------------------------------------------------------------------------- help texts


def test_help_texts() -> None:
    """`sweep --help` and the help of each command, word for word, 80 characters wide."""
    texts = []
    for words in ([], *([name] for name in sorted(sweep_command.commands))):
        title = " ".join(["sweep", *words, "--help"])
        texts.append(f"$ {title}\n{run_sweep_command(*words, '--help')}")
    check_golden("help.txt", "\n".join(texts))
