"""Tests of the limit on the memory of a cell's processes."""

from __future__ import annotations

import os

import psutil
import pytest

from orchestrator.execution.limits import bytes_over_limit


class Ended(psutil.Process):
    """A process that has ended after it was found."""

    def memory_info(self) -> None:
        raise psutil.NoSuchProcess(self.pid)


def test_a_process_that_ends_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [Ended(os.getpid())])
    resident = psutil.Process().memory_info().rss
    assert bytes_over_limit(os.getpid(), 1e-6) == pytest.approx(resident, rel=0.2)
    assert bytes_over_limit(os.getpid(), resident / 2**30 * 2) is None
    assert bytes_over_limit(os.getpid(), None) is None
