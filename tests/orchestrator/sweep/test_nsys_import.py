"""A trace of nsys becomes rows of a run, with or without cells of a sweep."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from orchestrator.analysis.results import load_results
from orchestrator.common.errors import PlatformError, RunError
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.nsys_import import import_nsys
from tasks.spec.outcome import Outcome
from tests.support.traces import AUTOGRAD, NsysExport

Sweep = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    written = NsysExport(tmp_path / "report1.sqlite")
    written.range("forward", 0, 100_000)
    written.range("computing softmax", 10_000, 40_000)
    written.kernel("void softmax_warp_forward<float>", 20_000, 50_000, 60_000)
    written.kernel("ampere_sgemm_128x64_tn", 50_000, 60_000, 90_000)
    written.range("backward", 110_000, 200_000)
    written.kernel("ampere_sgemm_128x64_nn", 120_000, 130_000, 190_000, AUTOGRAD)
    return written.path


def test_an_export_becomes_a_run(export: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    cell = import_nsys(export, run)
    kernels = run.read("kernels").set_index("name")
    softmax = kernels.loc["void softmax_warp_forward<float>"]
    assert (softmax["phase"], softmax["module"]) == ("forward", "computing softmax")
    assert (softmax["kernel_class"], softmax["total_ns"]) == ("softmax", 10_000)
    assert kernels.loc["ampere_sgemm_128x64_nn", "phase"] == "backward"
    results = load_results(run)
    (row,) = results.cells.to_dict("records")
    assert (row["cell"], row["task"], row["file"]) == (cell, "nsys", "report1.sqlite")
    assert row["attributed_to_phase"] == 1.0
    assert row["attributed_to_module"] == pytest.approx(0.1)
    assert results.kernels()["ms"].sum() == pytest.approx(0.1)


def test_an_imported_trace_joins_a_run_and_a_second_import_is_another_attempt(
    export: Path, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    run = Run(tmp_path / "run")
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "mine"})
        writer.append(make_outcome(), None)
    import_nsys(export, run)
    cell = import_nsys(export, run)
    assert run.read_manifest()["name"] == "mine"
    attempts = run.read("attempts")
    assert sorted(attempts.loc[attempts["task"] == "nsys", "attempt"]) == [1, 2]
    assert list(load_results(run).kernels()["cell"]).count(cell) == 3  # of the attempt that counts


def test_another_file_of_the_same_name_is_another_cell(export: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    first = import_nsys(export, run)
    (tmp_path / "other").mkdir()
    other = NsysExport(tmp_path / "other" / export.name)
    other.kernel("void relu", 10, 20, 30)
    second = import_nsys(other.path, run)
    assert first != second
    assert list(run.read("attempts")["attempt"]) == [1, 1]
    assert set(load_results(run).kernels()["cell"]) == {first, second}


@pytest.mark.parametrize("folder", ["a?mode=rwc", "a#b", "50%25", "%3f"])
def test_a_path_may_contain_special_characters_of_addresses(
    folder: str, export: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / folder).mkdir()
    named = export.rename(tmp_path / folder / "r?#%.sqlite")
    monkeypatch.chdir(tmp_path)
    import_nsys(named.relative_to(tmp_path), Run(tmp_path / "run"))
    assert len(Run(tmp_path / "run").read("kernels")) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.sqlite", "is not there"), ("text.sqlite", "not an export of Nsight Systems")],
)
def test_a_file_that_is_no_export_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database at all " * 100)
    with pytest.raises(RunError, match=message):
        import_nsys(tmp_path / name, Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_report_without_nsys_says_how_to_export_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "report1.nsys-rep").write_bytes(b"binary")
    with pytest.raises(PlatformError, match=r"nsys export --type sqlite report1\.nsys-rep"):
        import_nsys(tmp_path / "report1.nsys-rep", Run(tmp_path / "run"))


def test_a_report_is_exported_by_an_installed_nsys(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nsys is a script here, which copies an export. Its options are the documented ones.
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && cp {export} "$5"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (tmp_path / "report1.nsys-rep").write_bytes(b"binary")
    import_nsys(tmp_path / "report1.nsys-rep", Run(tmp_path / "run"))
    assert len(Run(tmp_path / "run").read("kernels")) == 3


def test_the_import_command_prints_the_top_kernels(
    export: Path, sweep: Sweep, sweep_here: Callable[..., Result], tmp_path: Path
) -> None:
    done = sweep("import-nsys", export)
    assert done.returncode == 0, done.stderr
    assert "## Top kernels by phase" in done.stdout
    assert "ampere_sgemm_128x64_nn" in done.stdout
    assert (tmp_path / "results" / "report1" / "run.json").exists()
    refused = sweep_here("status", "results/report1")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("sweep: results/report1: holds imported traces alone")
    assert sweep_here("report", "results/report1", "--table", "kernel-classes").exit_code == 0
