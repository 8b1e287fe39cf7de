"""The benchmark of reaching a GPU: the whole of it in two processes on the CPU, and where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from orchestrator.hardware.nvml import gpu_names
from tests.conftest import ROOT


def reaching(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/reaching.py", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170
    )


def test_each_part_alone_and_at_once() -> None:
    done = reaching("--cpu", "2", "--size", "tiny", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    lines = [[word.strip() for word in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert lines[0] == ["part", "alone ms", "2 at once ms", "at most ms", "at once / alone"]
    rows = {line[0]: list(map(float, line[1:])) for line in lines[2:]}
    assert list(rows) == ["build", "first step", "second step", "in all"]
    for alone, at_once, at_most, ratio in rows.values():
        assert 0 < at_once <= at_most
        assert ratio == pytest.approx(at_once / alone, rel=0.05)
    assert rows["in all"][0] == pytest.approx(
        sum(row[0] for part, row in rows.items() if part != "in all"), rel=0.01
    )


@pytest.mark.skipif(bool(gpu_names()), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it() -> None:
    done = reaching()
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "reaching.py: there is no GPU here. Add --cpu 2 to try it out on the CPU\n"
    )
