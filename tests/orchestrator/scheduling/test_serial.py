"""The scheduler without Ray: its start, and the GPUs that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from orchestrator.execution.events import DeviceLost
from orchestrator.execution.fork_client import ForkServerLost
from orchestrator.execution.slot_supervision import Slot
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.scheduling import serial
from orchestrator.scheduling.serial import SerialScheduler
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome

PROBED: dict[str, Any] = {"host": "here", "gpus": [], "fingerprints": {"cpu": [{}]}}
BOTH_GPUS = HostInfo(
    "here",
    tuple(GpuInfo("H100", 80 * 1024**3, uuid) for uuid in ("first", "second")),
)


class FakeServer:
    """A fork server that answers a probe, or disappears."""

    def __init__(self, log: list[str], answer: Mapping[str, Any] | None) -> None:
        self.log, self.answer = log, answer

    def probe_host(self) -> Mapping[str, Any]:
        self.log.append("probe in a fork")
        if self.answer is None:
            raise ForkServerLost("it ended")
        return self.answer


class FakeStarter:
    def __init__(self, server: FakeServer) -> None:
        self.server: FakeServer | None = server

    def close(self) -> None:
        self.server = None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which the fakes add what the scheduler does, in order."""
    done: list[str] = []

    def probe_here() -> HostInfo:
        done.append("probe in a new process")
        return HostInfo("new")

    def begin_to_prepare(attempt: Attempt, environment: Mapping[str, str]) -> None:
        done.append("prepare")

    monkeypatch.setattr(serial, "probe_here", probe_here)
    monkeypatch.setattr(serial, "begin_to_prepare", begin_to_prepare)
    return done


def test_the_fork_server_starts_first_and_answers_the_probe(
    monkeypatch: pytest.MonkeyPatch, log: list[str], make_attempt: Callable[..., Attempt]
) -> None:
    monkeypatch.setattr(serial, "CHILD_STARTER", FakeStarter(FakeServer(log, PROBED)))
    scheduler = SerialScheduler(log.append, make_attempt())
    assert [host.name for host in scheduler.hosts()] == ["here"]
    assert log == ["prepare", "probe in a fork"]


def test_a_lost_fork_server_is_closed_and_a_new_process_probes(
    monkeypatch: pytest.MonkeyPatch, log: list[str], make_attempt: Callable[..., Attempt]
) -> None:
    starter = FakeStarter(FakeServer(log, None))
    monkeypatch.setattr(serial, "CHILD_STARTER", starter)
    scheduler = SerialScheduler(log.append, make_attempt())
    assert [host.name for host in scheduler.hosts()] == ["new"]
    assert log == ["prepare", "probe in a fork", "probe in a new process"]
    assert starter.server is None


def test_without_an_example_a_new_process_probes(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(serial, "CHILD_STARTER", FakeStarter(FakeServer(log, PROBED)))
    assert [host.name for host in SerialScheduler(log.append).hosts()] == ["new"]
    assert log == ["probe in a new process"]


def test_a_sweep_starts_although_no_process_can_be_forked_early(
    monkeypatch: pytest.MonkeyPatch, log: list[str], make_attempt: Callable[..., Attempt]
) -> None:
    def fail(attempt: Attempt, environment: Mapping[str, str]) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(serial, "begin_to_prepare", fail)
    monkeypatch.setattr(serial, "CHILD_STARTER", FakeStarter(FakeServer(log, PROBED)))
    assert SerialScheduler(log.append, make_attempt()).hosts()


def test_a_lost_gpu_gets_no_further_cell(
    monkeypatch: pytest.MonkeyPatch,
    log: list[str],
    make_attempt: Callable[..., Attempt],
    make_outcome: Callable[..., Outcome],
) -> None:
    used: list[str] = []

    def measure(attempt: Attempt, slot: Slot) -> Outcome | DeviceLost:
        used.append(slot.gpu)
        if len(used) == 1:
            return DeviceLost(make_outcome(), make_outcome(), "GPU 0 fell off", slot.gpu)
        return make_outcome()

    monkeypatch.setattr(serial, "probe_here", lambda: BOTH_GPUS)
    monkeypatch.setattr(serial, "measure", measure)
    scheduler = SerialScheduler(log.append)
    scheduler.hosts()
    outcomes = list(scheduler.run([make_attempt(device="cuda")] * 3, lambda started: None))
    assert len(outcomes) == 3
    assert used[1] == used[2] != used[0]
