"""A run as frames: the same numbers as in the files and in the tables, nulls as nulls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import orchestrator as sweep
from orchestrator.api import LoadedRun
from orchestrator.common.errors import ConfigError, RunError
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import store_cells
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import KernelRow


@pytest.fixture
def run(tmp_path: Path, make_outcome: Callable[..., Outcome]) -> LoadedRun:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "test"})
        watched = make_outcome(context_length=32, precision="bf16", step_ms=(4.0, 5.0, 6.0))
        kernel = KernelRow(
            "forward",
            "ffn",
            "GEMM",
            "scope",
            "aten::mm",
            "sgemm",
            2,
            4,
            4_000_000,
            1e6,
            1e6,
            1,
            2,
            0.5,
        )
        for outcome in (
            make_outcome(context_length=32),
            Outcome(**{**vars(watched), "kernels": (kernel,)}),
            make_outcome(Status.OOM, context_length=64),
            make_outcome(context_length=64, precision="bf16"),
        ):
            writer.append(outcome, None)
        store_cells(writer)
    return sweep.load(tmp_path / "run")


def test_frames_are_those_of_the_files(run: LoadedRun, tmp_path: Path) -> None:
    written = pd.read_parquet(tmp_path / "run" / "cells.parquet")
    assert list(run.cells["cell"]) == list(written["cell"])
    assert run.cells["step_ms_median"].tolist() == written["step_ms_median"].tolist()
    assert len(run.samples) == 3 * 12
    assert run.kernels.set_index("name").loc["sgemm", "ms"] == 2.0  # of a step, of two
    assert run.manifest["name"] == "test"


def test_dtypes_know_null(run: LoadedRun) -> None:
    oom = run.cells.set_index("status").loc["oom"]
    assert oom["step_ms_median"] is pd.NA
    assert run.cells["context_length"].dtype == "Int64"


def test_a_table_has_numbers_where_it_prints_nothing_else(run: LoadedRun) -> None:
    table = run.table("precision").set_index("context_length")
    assert table["bf16_ms"].to_dict() == {32: 5.0, 64: 11.0}
    assert table["fp32_status"].to_dict() == {32: "ok", 64: "oom"}
    assert table.loc[64, "fp32_ms"] is pd.NA
    assert table.loc[32, "bf16_speed_up"] == pytest.approx(2.2)
    assert run.table("attention").empty


def test_a_number_of_thousands_is_a_number(run: LoadedRun) -> None:
    """16 tokens in 11 ms and in 5 are printed as 1,455 and 3,200; a failed cell has none."""
    table = run.table("timings").set_index(["context_length", "precision"])
    speeds = table["tokens_s"].round().dropna()
    assert speeds.to_dict() == {(32, "fp32"): 1455, (32, "bf16"): 3200, (64, "bf16"): 1455}
    assert table.loc[(64, "fp32"), "status"] == "oom"


def test_a_column_of_thousands_is_a_column_of_numbers(
    tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    with open_for_writing(Run(tmp_path / "run")) as writer:
        writer.write_manifest({"name": "test"})
        writer.append(make_outcome(), None)
    assert sweep.load(tmp_path / "run").table("timings")["tokens_s"].round().tolist() == [1455]


def test_missing_tables_and_runs_are_reported(run: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no table 'precisions'"):
        run.table("precisions")
    with pytest.raises(RunError, match="no run is named"):
        sweep.load()
    with pytest.raises(RunError, match="holds no run"):
        sweep.load(tmp_path)


def test_importing_the_api_imports_no_heavy_package() -> None:
    program = "import sys, orchestrator; assert not {'pandas', 'torch', 'ray', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
