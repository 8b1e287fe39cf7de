"""GPUs that fail: the cell is lost, the GPU gets no other cell, and other GPUs are not affected."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pynvml
import pytest
from click.testing import Result

from orchestrator.execution import measurement
from orchestrator.execution.events import DeviceLost
from orchestrator.execution.host_probe import gpu_failure
from orchestrator.execution.measurement import Slot
from orchestrator.execution.program import PROGRAM
from orchestrator.hardware.nvml import GpuHealthWatch, gpu_names
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.killing import left_after, own_temporary_folder
from tests.support.fallen import FOLDER, SILENTLY, play

CONFIG = """
name: fallen
grids:
  - task: accumulation
    fixed: {device: cuda, count: 1}
    axes: {seed: [0, 1, 2, 3, 4, 5, 6, 7]}
"""


def set_nvml_answers(monkeypatch: pytest.MonkeyPatch, *answers: int | None) -> None:
    """Replace NVML's answers by error numbers, or None for a good answer. The last one repeats."""
    left = list(answers)

    def answer(gpu: object) -> None:
        number = left.pop(0) if len(left) > 1 else left[0]
        if number is not None:
            raise pynvml.NVMLError(number)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", answer)


UNKNOWN, NOT_FOUND = pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_FOUND
NO_DRIVER, GONE = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "CUDA error: unknown error"
LOST, RESET = pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED


@pytest.mark.parametrize(
    ("before", "after", "message", "fault"),
    [
        (None, None, "CUDA error: an illegal memory access was encountered", None),
        (None, None, GONE, None),
        (None, LOST, "", "GPU is lost"),
        (None, UNKNOWN, "killed by SIGSEGV", "Unknown Error"),
        (None, NOT_FOUND, "", "Not Found"),
        (LOST, LOST, "", "GPU is lost"),  # already when the cell began
        (RESET, RESET, "", "GPU requires restart"),
        (NOT_FOUND, NOT_FOUND, "wrong on purpose", None),  # NVML never found it: a part of a GPU
        (NOT_FOUND, NOT_FOUND, GONE, "Not Found"),
        (NO_DRIVER, NO_DRIVER, "", None),
        (UNKNOWN, None, GONE, None),
    ],
)
def test_a_gpu_that_nvml_loses_during_a_cell_has_failed(
    before: int | None,
    after: int | None,
    message: str,
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_nvml_answers(monkeypatch, before, after)
    found = GpuHealthWatch("aaaa").fault(message)
    assert (found is None) == (fault is None), found
    assert fault is None or fault in str(found)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        "No CUDA GPUs are available",
    ],
)
def test_a_message_of_cuda_about_an_unusable_gpu_counts(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_nvml_answers(monkeypatch, UNKNOWN)
    assert GpuHealthWatch("aaaa").fault(message) == "Unknown Error"


@pytest.mark.parametrize(
    ("message", "computes", "status"),
    [
        ("CUDA error: uncorrectable ECC error encountered", False, Status.LOST),
        # Only the cell's own context was affected.
        ("CUDA error: uncorrectable ECC error encountered", True, Status.FAILED),
        (GONE, False, Status.LOST),
        ("wrong on purpose", False, Status.FAILED),  # the GPU is not checked
    ],
)
def test_a_gpu_that_cannot_compute_gets_no_other_cell_even_if_nvml_answers(
    message: str,
    computes: bool,
    status: Status,
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise it would fail all cells, faster than another GPU measures one.
    set_nvml_answers(monkeypatch, None)
    attempt = make_attempt(1, device="cuda")
    ended = Outcome(attempt, Status.FAILED, "build", "", {"message": message}, {}, (), 0.0, 1.0)
    monkeypatch.setattr(measurement, "execute", lambda attempt: ended)
    monkeypatch.setattr(
        measurement,
        "gpu_failure",
        lambda gpu: None if computes else f"{gpu}: CUDA error: unknown error",
    )
    event = measurement.measure(attempt, Slot(1, None, "3", {"3": "aaaa"}))
    outcome = event.lost_outcome if isinstance(event, DeviceLost) else event
    assert (isinstance(event, DeviceLost), outcome.status) == (status is Status.LOST, status)
    if isinstance(event, DeviceLost):
        assert (event.gpu, outcome.evidence["cell_said"]) == ("3", message)
        assert "3: CUDA error: unknown error" in event.description


@pytest.mark.process
@pytest.mark.skipif(bool(gpu_names()), reason="there is a GPU")
def test_a_new_process_checks_whether_a_gpu_computes() -> None:
    assert "CUDA" in str(gpu_failure("0")) or "NVIDIA" in str(gpu_failure("0"))
    command = [*PROGRAM, "--compute", "cpu"]
    assert (
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120).returncode
        == 0
    )


def rows(folder: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return status, GPU and evidence of each attempt, in the order of their start."""
    attempts = Run(folder).read("attempts").sort_values("started_at")
    columns = zip(attempts["status"], attempts["facts"], attempts["evidence"], strict=True)
    return [
        (status, json.loads(facts)["visible_devices"], json.loads(evidence))
        for status, facts, evidence in columns
    ]


def run_while_one_fails(
    tmp_path: Path, path: Path, how: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a sweep on two GPUs, of which the second one fails. No process may be left."""
    fallen = tmp_path / "gpus"
    fallen.mkdir()
    (fallen / "1").write_text(how)
    with own_temporary_folder(tmp_path) as environment:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.fallen", fallen, "run", path, *options],
            cwd=tmp_path, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert not left_after(tmp_path, 20)
        assert not list((tmp_path / "ray").glob("sweep-ray-*"))
    return done


@pytest.mark.ray
def test_the_other_gpus_measure_the_cells_of_a_failed_one(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "results" / "fallen"
    done = run_while_one_fails(tmp_path, write_config(CONFIG), "")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "measured 8 cells: " in done.stdout
    assert sorted(row[:2] for row in rows(run)) == [("lost", "1"), *[("ok", "0")] * 7]
    (evidence,) = (row[2] for row in rows(run) if row[0] == "lost")
    assert {
        "nvml": "Unknown Error",
        "gpu_uuid": "bbbb",
        "cell_ended_as": "failed",
        "cell_said": GONE,
    }.items() <= evidence.items()


@pytest.fixture
def two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep_here: Callable[..., Result]
) -> Path:
    """Return the folder whose files make a GPU fail."""
    from orchestrator.execution import measurement
    from orchestrator.scheduling import ray_scheduler, ray_session, serial

    # `play` assigns these; monkeypatch restores them afterwards.
    for module, name in (
        (ray_session, "probe_here"),
        (ray_scheduler, "probe_here"),
        (serial, "probe_here"),
        (ray_scheduler, "supervise"),
        (ray_scheduler, "import_ahead"),
        (measurement, "execute"),
        (measurement, "gpu_failure"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    for name in (
        "nvmlInit",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCpuAffinity",
    ):
        monkeypatch.setattr(pynvml, name, getattr(pynvml, name))
    monkeypatch.setenv(FOLDER, "")
    (tmp_path / "gpus").mkdir()
    play(tmp_path / "gpus")
    return tmp_path / "gpus"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [("", "Unknown Error"), (SILENTLY, GONE)],
    ids=["NVML fails", "NVML answers"],
)
def test_a_run_without_a_working_gpu_stops_and_the_next_run_continues(
    how: str,
    message: str,
    write_config: Callable[..., Path],
    tmp_path: Path,
    sweep_here: Callable[..., Result],
    two_gpus: Path,
) -> None:
    path, run = write_config(CONFIG), tmp_path / "results" / "fallen"
    assert sweep_here("run", path, "--scheduler", "serial", "--where", "seed=0|1|2").exit_code == 0
    untouched = {part: part.read_bytes() for part in run.glob("*/*.parquet")}
    assert sorted(file.parent.name for file in untouched) == ["attempts", "samples"]
    assert [row[:1] for row in rows(run)] == [("ok",)] * 3
    for gpu in ("0", "1"):
        (two_gpus / gpu).write_text(how)
    done = sweep_here("run", path, "--scheduler", "serial")
    assert done.exit_code == 2, done.output
    assert "measured 2 cells: 2 lost" in done.output
    assert "3 cells left. To continue: sweep" in done.output
    assert re.search(
        rf"no GPU is left that works: GPU 0 \(aaaa\) of .*; GPU 1 \(bbbb\) of .*: {message}\. Reset",
        done.output,
    )
    assert [row[:2] for row in rows(run)] == [("ok", "0")] * 3 + [("lost", "0"), ("lost", "1")]
    assert len(pd.read_parquet(run / "cells.parquet")) == 5
    done = sweep_here("run", path, "--scheduler", "serial")  # they still fail
    assert (done.exit_code, "measured 2 cells: 2 lost" in done.output) == (2, True)
    (two_gpus / "1").unlink()
    done = sweep_here("run", path, "--scheduler", "serial")
    assert (done.exit_code, "measured 5 cells: 1 lost, 4 ok" in done.output) == (1, True), (
        done.output
    )
    done = sweep_here("run", path, "--scheduler", "serial", "--where", "seed=0|1|2|4|5|6|7")
    assert (done.exit_code, "nothing to measure: of 7 cells" in done.output) == (0, True)
    (two_gpus / "0").unlink()
    assert sweep_here("run", path, "--scheduler", "serial").exit_code == 0
    assert pd.read_parquet(run / "cells.parquet")["status"].tolist() == ["ok"] * 8
    assert {part: part.read_bytes() for part in untouched} == untouched
