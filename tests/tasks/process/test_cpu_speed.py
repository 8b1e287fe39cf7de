from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
def test_the_cpu_speed_is_measured_on_each_core_in_turn() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    many, rest = done.stdout.split(" ", 1)
    assert int(many) > 2 * len(os.sched_getaffinity(0))
    assert rest.strip() == f"{sorted(os.sched_getaffinity(0))} 1"
