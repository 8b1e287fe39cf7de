"""Several runs are read as one, with the cells of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import orchestrator as sweep
from orchestrator.cli.main import main
from orchestrator.common.errors import RunError
from orchestrator.store.open import open_for_writing, open_runs
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import KernelRow
from tests.support.pages import cells_of_page

KERNEL = KernelRow(
    "forward", "ffn", "GEMM", "scope", "aten::mm", "sgemm", 2, 4, 4_000_000, 1e6, 1e6, 1, 2, 0.5
)


@pytest.fixture
def runs(tmp_path: Path, make_outcome: Callable[..., Outcome]) -> list[Path]:
    """Return two runs of the same two cells. One cell runs out of memory in the first run."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder, ms, status in zip(folders, (10.0, 8.0), (Status.OOM, Status.OK), strict=True):
        with open_for_writing(Run(folder)) as writer:
            writer.write_manifest(
                {"name": folder.name, "invocations": [{"time": f"at {ms}", "command": ["run"]}]}
            )
            first = make_outcome(context_length=32, step_ms=(ms, ms, ms))
            writer.append(Outcome(**{**vars(first), "kernels": (KERNEL,)}), None)
            writer.append(make_outcome(status, context_length=64, step_ms=(2 * ms,) * 3), None)
    return folders


def report(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)], prog_name="sweep")


def test_a_table_has_the_cells_of_both_runs(runs: list[Path]) -> None:
    both = sweep.load(*runs)
    table = both.table("timings").set_index(["context_length", "run"])
    assert table.loc[(32, "old"), "forward_ms"] == 10.0
    assert table.loc[(32, "new"), "forward_ms"] == 8.0
    assert table.loc[(64, "old"), "status"] == "oom"
    assert table.loc[(64, "new"), "forward_ms"] == 16.0
    assert len(both.cells) == 4
    assert both.cells["cell"].is_unique
    for name, folder in zip(("old", "new"), runs, strict=True):
        own = sweep.load(folder).kernels
        assert (both.kernels["cell"].str.startswith(f"{name}:")).sum() == len(own) > 0
    assert set(both.samples["cell"]) <= set(both.cells["cell"])


def test_one_run_is_no_collection(runs: list[Path]) -> None:
    assert not isinstance(open_runs(runs[:1]), RunCollection)
    assert "run" not in sweep.load(runs[0]).cells


def test_frames_with_categories_are_the_same(runs: list[Path]) -> None:
    both = open_runs(runs)
    plain, categories = both.read("samples"), both.read("samples", categories=True)
    assert categories["cell"].dtype == "category"
    assert categories["metric"].dtype == "category"
    assert plain["cell"].tolist() == categories["cell"].tolist()
    assert plain["value"].tolist() == categories["value"].tolist()


@pytest.mark.render
def test_the_report_of_several_runs_is_one_page_with_all_their_cells(runs: list[Path]) -> None:
    done = report(*runs)
    assert done.exit_code == 0, done.output
    page = (runs[0] / "with-new" / "report" / "index.html").read_text()
    cells = sweep.load(*runs).cells["cell"]
    assert len(cells) == 4
    assert sorted(cells_of_page(page)) == sorted(cells)
    assert not (runs[0] / "report").exists()
    assert (
        Run(runs[0]).read_manifest()["name"] == "old"
    )  # nothing of the runs themselves is changed


@pytest.mark.render
def test_reports_of_many_runs_have_different_names(runs: list[Path]) -> None:
    many = [
        shutil.copytree(runs[1], runs[1].parent / f"{'ü' * 60}-{number}") for number in range(8)
    ]
    assert report(runs[0], *many[:7]).exit_code == 0
    assert report(runs[0], *many[1:]).exit_code == 0
    assert len(list(runs[0].glob("with-*/report/timings.md"))) == 2


def test_the_attempt_folder_of_a_cell_is_in_its_run(runs: list[Path]) -> None:
    both = open_runs(runs)
    (cell, *_) = sweep.load(runs[1]).cells["cell"]
    assert both.attempt_folder(f"new:{cell}", 1) == Run(runs[1]).attempt_folder(cell, 1)


def test_runs_of_the_same_name_are_named_by_more_of_their_paths(
    runs: list[Path], tmp_path: Path
) -> None:
    for host in ("a", "b"):
        shutil.copytree(runs[0], tmp_path / host / "full")
    both = sweep.load(tmp_path / "a" / "full", tmp_path / "b" / "full")
    assert both.manifest["name"] == "a/full, b/full"
    assert both.manifest["runs"] == ["a/full", "b/full"]
    assert set(both.cells["run"]) == {"a/full", "b/full"}


def test_a_title_names_the_first_of_many_runs(runs: list[Path], tmp_path: Path) -> None:
    copies = [shutil.copytree(runs[0], tmp_path / name) for name in "abcde"]
    assert open_runs(copies[:3]).read_manifest()["name"] == "a, b, c"
    assert open_runs(copies).read_manifest()["name"] == "a, b, c and 2 more"


def test_errors_are_one_line(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is named twice"):
        open_runs([runs[0], runs[0]])
    done = report(runs[0], tmp_path / "nothing")
    assert done.exit_code == 2
    assert "holds no run" in done.output
    assert "Traceback" not in done.output
