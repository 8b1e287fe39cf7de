"""One real sweep for each seam: serial, Ray and resume, each a process; report and publish, both in one.

The other tests of the default tier run in one process or with fakes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.conftest import ROOT, sweep_command
from tests.support.imports import FOR_MEASURING, run_without_importing
from tests.support.pages import cells_of_page

# One group: the sweeps share a folder, and each needs both cores.
pytestmark = [pytest.mark.seam, pytest.mark.xdist_group("seam")]

CONFIG = """
name: seam
grids:
  - task: train_step
    fixed: {device: cpu, size: tiny, vocab_size: 50, batch_size: 1, pass: forward}
    axes: {context_length: [8, 16, 24]}
defaults: {warmup_steps: 1, measured_steps: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seam")
    (folder / "seam.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def serial_run(folder: Path) -> Path:
    """A serial run whose driver was killed after its first cell, and that was then resumed."""
    command = ["run", "seam.yaml", "--scheduler", "serial", "--out", "serial"]
    driver = subprocess.Popen(
        sweep_command(*command),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout
        assert any(" ok " in line for line in driver.stdout)
        driver.send_signal(signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL
    resumed = run_sweep(folder, *command)
    assert "[1/2]" in resumed
    return folder / "serial"


def run_sweep(folder: Path, *words: object) -> str:
    done = subprocess.run(
        sweep_command(*words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_every_cell_is_measured_once(run: Path) -> None:
    cells = pd.read_parquet(run / "cells.parquet")
    assert cells["status"].tolist() == 3 * ["ok"]
    assert sorted(cells["context_length"]) == [8, 16, 24]
    assert (cells["step_ms_median"] > 0).all()
    attempts = pd.read_parquet(run / "attempts")
    assert attempts[attempts["status"] == "ok"].groupby("cell").size().tolist() == [1, 1, 1]


def test_a_killed_serial_sweep_resumes_without_measuring_a_finished_cell_twice(
    serial_run: Path,
) -> None:
    assert_every_cell_is_measured_once(serial_run)


def test_a_third_run_has_nothing_to_do(
    serial_run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = ["run", "seam.yaml", "--scheduler", "serial", "--out", "serial"]
    ended = CliRunner().invoke(main, words, prog_name="sweep")
    assert ended.exit_code == 0, ended.output
    assert "start" not in ended.stdout
    assert_every_cell_is_measured_once(serial_run)


@pytest.fixture(scope="module")
def printed(serial_run: Path, folder: Path) -> str:
    """The output of publishing and reporting the run. Neither imports what only measuring needs."""
    commands = ("publish serial --out published", "report serial --reference h100")
    return run_without_importing(dict.fromkeys(commands, FOR_MEASURING), folder)


def test_a_report_of_the_run_is_printed_and_written(serial_run: Path, printed: str) -> None:
    # A mark follows a time that other processes disturbed.
    assert re.search(r"\nmodel +8 +16 +24\n +tiny( +[0-9.]+[^\w\s]?){3} *\n", printed), printed
    page = (serial_run / "report" / "index.html").read_text()
    keys = cells_of_page(page)
    assert len(set(keys)) == 3
    assert all(re.fullmatch("seam:[0-9a-f]{12}", key) for key in keys)


@pytest.mark.usefixtures("printed")
def test_the_run_is_published_and_the_publication_has_its_cells(
    serial_run: Path, folder: Path
) -> None:
    measured = pd.read_parquet(serial_run / "cells.parquet").set_index("cell")
    published = pd.read_parquet(folder / "published" / "cells.parquet").set_index("cell")
    medians = {f"serial:{cell}": ms for cell, ms in measured["step_ms_median"].items()}
    assert published["step_ms_median"].to_dict() == medians


def test_ray_measures_every_cell(folder: Path) -> None:
    run_sweep(folder, "run", "seam.yaml", "--out", "ray")
    assert_every_cell_is_measured_once(folder / "ray")
