from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.process import cpu_speed


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nobody chooses a core here")
def test_the_cpu_speed_is_measured_on_each_core_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    every = sorted(os.sched_getaffinity(0))
    at: list[list[int]] = []
    monkeypatch.setattr(
        cpu_speed, "dispatch_rate", lambda: at.append(sorted(os.sched_getaffinity(0))) or 1.0
    )
    with ThreadPoolExecutor(1) as thread:  # which ends on its last core
        thread.submit(cpu_speed.dispatch_rates, 0.05).result()
    assert len(at) > 2 * len(every)
    assert sorted({core for cores in at[1:] for core in cores}) == every
    assert max(map(len, at[1:])) == 1
