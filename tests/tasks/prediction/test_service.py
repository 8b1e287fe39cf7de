"""The predictor gives way to cells that are measured, and to nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.execution.fork_client import ForkServers
from tasks.prediction import service
from tests.conftest import ROOT


@pytest.mark.parametrize(("device", "measures"), [("cpu", True), ("", False)])
def test_a_server_of_cells_may_be_measuring_and_one_of_predictions_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, measures: bool
) -> None:
    sockets = tmp_path / "unix"
    name = ForkServers().server(device, {}).address.replace("\0", "@")
    sockets.write_text(f"Num RefCount Path\n0000: 00000002 {name}\n")
    monkeypatch.setattr(service, "_SOCKETS", sockets)
    assert service.may_be_measuring() is measures


def test_where_sockets_are_not_listed_cells_may_be_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "_SOCKETS", tmp_path / "missing")
    assert service.may_be_measuring()


def test_a_process_that_yields_has_the_lowest_priority_also_in_a_session_of_its_own() -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from unittest.mock import Mock\n"
        "sys.modules['tasks.prediction.predictor'] = Mock()\n"  # it imports torch and its compiler
        "from tasks.prediction.service import yield_to_others\n"
        "os.setsid()\n"
        "yield_to_others()\n"
        "group = Path('/proc/self/autogroup')\n"
        "print(os.nice(0), group.read_text().split()[-1] if group.exists() else 19)\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["19", "19"]
