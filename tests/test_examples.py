"""What a stranger opens first runs: the notebook from its first cell to its last, the README's lines on other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.report.frames import load_results
from orchestrator.store import Run
from tasks.harness.records import Outcome, Status
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


@pytest.fixture
def here(tmp_path: Path, make_outcome: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small runs in its `results`, as if the sweeps demo and full had run."""
    for name in ("demo", "full"):
        with Run(tmp_path / "results" / name).opened_for_writing() as writer:
            writer.write_manifest({"name": name})
            for context in (64, 256):
                for precision, ms in (("fp32", 20.0), ("bf16", 10.0)):
                    times = (ms + context, ms + context + 1, ms + context + 2)
                    writer.append(make_outcome(step_ms=times, context_length=context, precision=precision), None)
            writer.append(make_outcome(Status.OOM, context_length=512), None)
            writer.write_cells(load_results(writer).cells)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_notebook_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IPYTHONDIR", str(here / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(here / "matplotlib"))
    notebook = nbformat.read(ROOT / "examples" / "results.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    done = nbclient.NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(here)}}).execute()
    said = [str(output.get("data", output.get("text"))) for cell in done.cells for output in cell.get("outputs", [])]
    assert "LoadedRun('results/demo', 5 cells)" in said[0]
    assert any("image/png" in text for text in said)
    assert any("gemm_backward" in text for text in said)
    assert any("it was oom" in text for text in said)


def test_duckdb_and_polars_read_the_same_numbers(here: Path) -> None:
    """The very lines of the README."""
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "duckdb" in block]
    names: dict[str, object] = {}
    exec(lines, names)
    cells = load_results(Run(here / "results" / "full")).cells
    ok = cells[cells["status"] == "ok"]
    assert dict(names["medians"].fetchall()) == ok.groupby("precision")["step_ms_median"].median().to_dict()  # type: ignore[attr-defined]
    steps = names["steps"]
    assert dict(steps.iter_rows()) == ok.set_index("cell")["step_ms_mean"].to_dict()  # type: ignore[attr-defined]
