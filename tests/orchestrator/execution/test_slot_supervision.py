"""Errors of the system while an attempt is started, each by its own name."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.common.errors import PlatformError
from orchestrator.execution import host_probe, slot_supervision
from orchestrator.execution.events import AttemptStarted
from orchestrator.execution.slot_supervision import Slot, execute_or_report_lost, supervise
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

LIMITS = (errno.E2BIG, errno.EMFILE, errno.EAGAIN, errno.ENOMEM)
BROKEN_INTERPRETER = (errno.ENOENT, errno.ENOEXEC, errno.EACCES)


def refuse(number: int) -> Callable[..., Any]:
    def start(command: list[str], **_: Any) -> Any:
        raise OSError(number, os.strerror(number), command[0])

    return start


@pytest.mark.parametrize("number", [*LIMITS, *BROKEN_INTERPRETER])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_cannot_be_started_is_no_fault_of_a_folder(
    number: int,
    method: str,
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempt = make_attempt(settings={"start_method": method})
    monkeypatch.setattr(subprocess, "Popen", refuse(number))
    outcome = execute_or_report_lost(attempt, Slot(1))
    assert outcome.status is Status.LOST
    expected = f"no process could be started: {os.strerror(number)}"
    assert outcome.evidence["message"] == expected


def test_a_folder_that_cannot_be_written_is_named(make_attempt: Callable[..., Attempt]) -> None:
    attempt = make_attempt()
    attempt.path.parent.mkdir(parents=True)
    attempt.path.touch()
    outcome = execute_or_report_lost(attempt, Slot(1))
    assert str(outcome.evidence["message"]).startswith("its folder cannot be written: ")
    assert str(attempt.path) in str(outcome.evidence["message"])


@pytest.mark.parametrize("number", [*LIMITS, *BROKEN_INTERPRETER])
def test_a_host_on_which_no_process_starts_is_refused_with_the_reason(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", refuse(number))
    reason = f"no process could be started here: {os.strerror(number)}"
    with pytest.raises(PlatformError, match=reason):
        host_probe.probe_here()


def test_a_cell_is_not_lost_when_its_files_cannot_be_sent(
    make_attempt: Callable[..., Attempt],
    make_outcome: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(measured: Attempt, original: Attempt) -> None:
        raise FileNotFoundError("a file went away")

    attempt, outcome = make_attempt(), make_outcome()
    monkeypatch.setattr(slot_supervision, "in_local_folder", lambda attempt: make_attempt(number=7))
    monkeypatch.setattr(slot_supervision, "measure", lambda attempt, slot: outcome)
    monkeypatch.setattr(slot_supervision, "move_into_archive", fail)
    started, ended = supervise(attempt, 1, {}, token="of another host")
    assert isinstance(started, AttemptStarted)
    assert isinstance(ended, Outcome)
    assert (ended.attempt, ended.samples) == (attempt, outcome.samples)
