"""Nodes of a cluster that are lost, broken or missing. A list replaces `ray.nodes()`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.common.errors import NoNodeLeft
from orchestrator.execution.events import AttemptStarted
from orchestrator.scheduling import cluster
from orchestrator.scheduling.cluster import NodeHealth
from orchestrator.scheduling.ray_scheduler import RayScheduler
from tasks.process.journal import FinalStatus, Journal
from tasks.spec.attempt import JOURNAL_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status


def node(name: str, cpus: int = 4, gpus: int = 0, kind: str = "H100") -> dict[str, Any]:
    labels = {"ray.io/accelerator-type": kind} if gpus else {}
    return {
        "NodeID": name,
        "NodeManagerHostname": "here",
        "Alive": True,
        "Resources": {"CPU": cpus, "GPU": gpus},
        "Labels": labels,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the time."""
    monkeypatch.setattr(cluster.time, "monotonic", lambda: 0.0)
    return lambda now: monkeypatch.setattr(cluster.time, "monotonic", lambda: now)


def health_of(nodes: list[Any], messages: list[str]) -> NodeHealth:
    return NodeHealth(SimpleNamespace(nodes=lambda: nodes), messages.append)


def test_attempts_of_a_dead_node_are_found(
    make_attempt: Callable[..., Attempt], clock: Callable[[float], None]
) -> None:
    alive, messages = [node("a"), node("b")], list[str]()
    health = health_of(alive, messages)
    running = {name: AttemptStarted(make_attempt(1), "host", "", 0.0, name) for name in ("a", "b")}
    running["waiting"] = AttemptStarted(make_attempt(1), "", "", 0.0)
    assert health.find_lost(running) == []
    del alive[0]
    clock(1.0)
    assert health.find_lost(running) == []  # Ray is asked every two seconds only
    clock(3.0)
    assert health.find_lost(running) == ["a"]
    assert not messages


def test_a_broken_kind_of_host_does_not_stop_cells_of_other_kinds(
    make_attempt: Callable[..., Attempt],
) -> None:
    on_cpu, on_gpu = make_attempt(1), make_attempt(1, device="cuda")
    nodes = [node("a")]
    health = health_of(nodes, [])
    assert health.unplaceable_reason(on_gpu.cell) is None  # a node with a GPU may join
    health.exclude("b", "host b: no torch")
    assert health.unplaceable_reason(on_cpu.cell) is None
    reason = "no host is left that could measure it: host b: no torch"
    assert health.unplaceable_reason(on_gpu.cell) == reason
    nodes[:] = [node("head", cpus=0)]
    with pytest.raises(NoNodeLeft, match="host b: no torch"):
        health.unplaceable_reason(on_gpu.cell)


@pytest.mark.parametrize(
    ("asked", "there", "lacks"),
    [
        ({}, node("a", cpus=0), "a core"),
        ({"device": "cuda"}, node("a"), "1 GPU"),
        ({"device": "cuda", "gpu_kind": "A100"}, node("a", gpus=8), "1 A100 GPU"),
        ({"device": "cuda", "gpu_kind": "H100"}, node("a", gpus=8), ""),
        ({}, node("a"), ""),
    ],
)
def test_an_attempt_that_no_node_can_run_waits_five_minutes(
    asked: dict[str, Any],
    there: Any,
    lacks: str,
    make_attempt: Callable[..., Attempt],
    clock: Callable[[float], None],
) -> None:
    messages = list[str]()
    health = health_of([there], messages)
    running = {"it": AttemptStarted(make_attempt(1, **asked), "", "", 0.0)}
    assert health.find_lost(running) == []
    clock(301.0)
    if not lacks:
        assert health.find_lost(running) == []
        assert not messages
        return
    lacking = f"no node is left that has {lacks}"
    assert messages == [f"{lacking}: waiting 5 min 00 s for one to join"]
    with pytest.raises(NoNodeLeft, match=rf"{lacking}. Have one join .* run again"):
        health.find_lost(running)
    assert len(messages) == 1


def test_a_node_that_joins_ends_the_wait(
    make_attempt: Callable[..., Attempt], clock: Callable[[float], None]
) -> None:
    alive, messages = list[Any](), list[str]()
    health = health_of(alive, messages)
    running = {"it": AttemptStarted(make_attempt(1), "", "", 0.0)}
    health.find_lost(running)
    alive.append(node("a"))
    for now in (299.0, 302.0):
        clock(now)
        assert health.find_lost(running) == []
    alive.clear()
    clock(400.0)
    assert health.find_lost(running) == []
    assert len(messages) == 2


class RayError(Exception): ...


class NodeDiedError(RayError): ...


class LocalRayletDiedError(RayError): ...


def scheduler_of(error: Exception, has_other_nodes: bool) -> RayScheduler:
    """Return a scheduler whose Ray raises this error for every event."""

    def fail(reference: object) -> None:
        raise error

    scheduler = RayScheduler.__new__(RayScheduler)
    errors = SimpleNamespace(
        RayError=RayError, NodeDiedError=NodeDiedError, LocalRayletDiedError=LocalRayletDiedError
    )
    scheduler._ray = SimpleNamespace(get=fail, exceptions=errors)
    scheduler._session = SimpleNamespace(host=None if has_other_nodes else "here")
    scheduler._health = SimpleNamespace(check=lambda started, error: None)
    return scheduler


@pytest.mark.parametrize("error", [NodeDiedError(), LocalRayletDiedError()])
def test_no_cell_is_lost_with_the_only_node(
    error: Exception, make_attempt: Callable[..., Attempt]
) -> None:
    scheduler = scheduler_of(error, has_other_nodes=False)
    with pytest.raises(NoNodeLeft, match="Ray's raylet on this machine has died"):
        scheduler._next_event(iter("x"), AttemptStarted(make_attempt(1), "host", "", 0.0))


@pytest.mark.parametrize("error", [NodeDiedError(), RayError()])
def test_a_cell_that_finished_before_its_node_died_counts(
    error: Exception, make_attempt: Callable[..., Attempt]
) -> None:
    scheduler, started = scheduler_of(error, True), AttemptStarted(make_attempt(1), "host", "", 0.0)
    outcome = scheduler._next_event(iter("x"), started)
    assert isinstance(outcome, Outcome)
    assert outcome.status is Status.LOST
    started.attempt.path.mkdir(parents=True)
    with (started.attempt.path / JOURNAL_FILE).open("w") as stream:
        Journal(stream).end(FinalStatus(Status.FAILED))
    outcome = scheduler._next_event(iter("x"), started)
    assert isinstance(outcome, Outcome)
    assert outcome.status is Status.FAILED
