from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from tasks.process.cpu_speed import Additions
from tests.conftest import ROOT

WATCHED = """
import os
from tasks.process import cpu_speed as pace
at = []
pace.dispatch_rate = lambda: at.append(sorted(os.sched_getaffinity(0))) or 1.0
pace.dispatch_rates(0.05)
print(len(at), sorted({core for cores in at[1:] for core in cores}), max(map(len, at[1:])))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nobody chooses a core here")
def test_it_is_read_on_each_core_by_turns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    many, rest = done.stdout.split(" ", 1)
    assert int(many) > 2 * len(os.sched_getaffinity(0))
    assert rest.strip() == f"{sorted(os.sched_getaffinity(0))} 1"


def test_an_addition_takes_as_long_on_its_way_back() -> None:
    """On the CPU the backward pass has no thread of its own."""
    additions = Additions(torch.device("cpu"), backward=True)
    read = [additions.read() for _ in range(40)]
    here, there = (sorted(ms)[len(read) // 2] for ms in zip(*read, strict=True))
    assert 0 < here < 1
    assert 1 / 3 < there / here < 3


def test_where_there_is_no_backward_pass_none_is_read() -> None:
    here, there = Additions(torch.device("cpu"), backward=False).read()
    assert here > 0
    assert math.isnan(there)
