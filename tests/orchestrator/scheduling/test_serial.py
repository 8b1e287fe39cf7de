"""The scheduler without Ray: its start, and the GPUs that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from orchestrator.execution import host_probe, measurement
from orchestrator.execution.events import DeviceLost
from orchestrator.execution.fork_client import ForkServer, ForkServerLost
from orchestrator.execution.measurement import Slot
from orchestrator.hardware.host import GpuInfo, HostInfo
from orchestrator.scheduling import serial
from orchestrator.scheduling.serial import SerialScheduler
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tests.support.fake_sweep import ListQueue

PROBED: dict[str, Any] = {"host": "here", "gpus": [], "fingerprints": {"cpu": [{}]}}
BOTH_GPUS = HostInfo(
    "here",
    tuple(GpuInfo("H100", 80 * 1024**3, uuid) for uuid in ("first", "second")),
)


class FakeServer:
    """A fork server that answers a probe, or has disappeared."""

    def __init__(self, answer: Mapping[str, Any] | None) -> None:
        self.answer = answer

    def ask(self, kind: str, body: Mapping[str, object]) -> FakeServer:
        assert kind == "probe"
        return self

    def close(self) -> None: ...

    def receive(self, timeout_s: float) -> Mapping[str, Any]:
        if self.answer is None:
            raise ForkServerLost("it ended")
        return self.answer


@pytest.mark.parametrize(
    ("server", "name"),
    [(FakeServer(PROBED), "here"), (FakeServer(None), "new"), (None, "new")],
    ids=["fork server", "it disappears", "no process can be forked early"],
)
def test_the_fork_server_starts_first_and_answers_the_probe(
    server: FakeServer | None,
    name: str,
    make_attempt: Callable[..., Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serial, "begin_import", lambda attempt, slot: server)
    monkeypatch.setattr(host_probe, "_run_for_json", lambda words: {**PROBED, "host": "new"})
    assert [host.name for host in SerialScheduler(print, make_attempt()).hosts()] == [name]


def test_a_sweep_starts_although_no_process_can_be_forked_early(
    make_attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(server: ForkServer, purpose: str) -> None:
        raise OSError("no process left")

    monkeypatch.setattr(ForkServer, "begin_import", fail)
    assert measurement.begin_import(make_attempt(), Slot(1)) is None


def test_a_lost_gpu_gets_no_further_cell(
    monkeypatch: pytest.MonkeyPatch,
    make_attempt: Callable[..., Attempt],
    make_outcome: Callable[..., Outcome],
) -> None:
    used: list[str] = []

    def measure(attempt: Attempt, slot: Slot) -> Outcome | DeviceLost:
        used.append(slot.gpu)
        if len(used) == 1:
            return DeviceLost(make_outcome(), make_outcome(), "GPU 0 fell off", slot.gpu)
        return make_outcome()

    monkeypatch.setattr(serial, "probe_here", lambda server: BOTH_GPUS)
    monkeypatch.setattr(serial, "measure", measure)
    scheduler = SerialScheduler(print)
    scheduler.hosts()
    outcomes = list(
        scheduler.run(ListQueue([make_attempt(device="cuda")] * 3), lambda started: None)
    )
    assert len(outcomes) == 3
    assert used[1] == used[2] != used[0]
