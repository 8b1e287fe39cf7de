"""Commands that take long say so on the standard error, and nothing if they are quick."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from orchestrator.common import output
from orchestrator.common.output import ProgressLine
from tests.conftest import ROOT

LONG = """
import time
from orchestrator.common.output import ProgressLine
with ProgressLine("reading results", 3) as progress:
    progress.done = 2
    time.sleep(3)
print("result")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_FIRST_IN_LOG_S", 0.2)


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("predicting memory", 20) as shown:
        shown.done = 12
        time.sleep(1.0)  # after 0.2 and 0.6 s, and then after 1.4 s
    out, lines = capsys.readouterr()
    assert out == ""
    assert 1 <= len(lines.splitlines()) <= 2
    assert all(line.startswith("predicting memory: 12 of 20, ") for line in lines.splitlines())
    assert all(line.endswith(" s") for line in lines.splitlines())


def test_what_is_quick_or_fails_at_once_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("reading results"):
        pass
    with pytest.raises(ValueError, match="broken"), ProgressLine("reading results"):
        raise ValueError("broken")
    time.sleep(0.3)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_live_line_that_is_removed_before_the_result() -> None:
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LONG]
    subprocess.run(command, stdout=inner, stderr=inner, env=environment, check=True)
    text = os.read(outer, 4096).decode()
    assert text.startswith("\r\x1b[2Kreading results: 2 of 3, 2 s\r\x1b[2K")
    assert text.endswith("\r\x1b[2Kresult\r\n")


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        with ProgressLine("reading results"):
            time.sleep(0.4)
        with pytest.raises(BrokenPipeError):
            closed.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
