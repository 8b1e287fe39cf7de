"""The task that Ray runs for an attempt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.execution.events import AttemptStarted
from orchestrator.scheduling import ray_task
from orchestrator.scheduling.ray_task import SweepHosts, supervise
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome


def test_a_cell_is_not_lost_when_its_files_cannot_be_sent(
    make_attempt: Callable[..., Attempt],
    make_outcome: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(measured: Attempt, original: Attempt) -> None:
        raise FileNotFoundError("a file went away")

    attempt, outcome = make_attempt(), make_outcome()
    monkeypatch.setattr(ray_task, "in_local_folder", lambda attempt: make_attempt(number=7))
    monkeypatch.setattr(ray_task, "measure", lambda attempt, slot: outcome)
    monkeypatch.setattr(ray_task, "move_into_archive", fail)
    started, ended = supervise(attempt, 1, SweepHosts("", {}), token="of another host")
    assert isinstance(started, AttemptStarted)
    assert isinstance(ended, Outcome)
    assert (ended.attempt, ended.samples) == (attempt, outcome.samples)
