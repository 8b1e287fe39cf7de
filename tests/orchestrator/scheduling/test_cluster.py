"""What is made of the nodes of a cluster, which a list stands in for: those that are gone, and those that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.common.errors import NoNodeLeft
from orchestrator.execution.events import AttemptStarted
from orchestrator.scheduling import cluster as watched
from orchestrator.scheduling.cluster import NodeHealth, unplaceable_reason
from tasks.spec.attempt import Attempt


def node(name: str, cpus: int = 4, gpus: int = 0, kind: str = "H100") -> dict[str, Any]:
    labels = {"ray.io/accelerator-type": kind} if gpus else {}
    return {
        "NodeID": name,
        "NodeManagerHostname": "here",
        "Resources": {"CPU": cpus, "GPU": gpus},
        "Labels": labels,
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets it."""
    monkeypatch.setattr(watched.time, "monotonic", lambda: 0.0)
    return lambda now: monkeypatch.setattr(watched.time, "monotonic", lambda: now)


def test_what_was_begun_on_a_node_that_is_gone(
    make_attempt: Callable[..., Attempt], clock: Callable[[float], None]
) -> None:
    alive, said = [node("a"), node("b")], list[str]()
    nodes = NodeHealth(lambda: alive, lambda: alive, said.append)
    running = {name: AttemptStarted(make_attempt(1), "host", "", 0.0, name) for name in ("a", "b")}
    running["waiting"] = AttemptStarted(make_attempt(1), "", "", 0.0)
    assert nodes.gone(running) == []
    del alive[0]
    clock(1.0)
    assert nodes.gone(running) == []  # not asked as often
    clock(3.0)
    assert nodes.gone(running) == ["a"]
    assert not said


def test_where_the_hosts_of_one_kind_are_broken_others_go_on(
    make_attempt: Callable[..., Attempt],
) -> None:
    here, gone = make_attempt(1), make_attempt(1, device="cuda")
    assert unplaceable_reason(gone, [node("a")], []) is None  # one may join
    assert unplaceable_reason(here, [node("a")], ["host b: no torch"]) is None
    assert (
        unplaceable_reason(gone, [node("a")], ["host b: no torch"])
        == "no host is left that could measure it: host b: no torch"
    )
    with pytest.raises(NoNodeLeft, match="host b: no torch"):
        unplaceable_reason(gone, [node("head", cpus=0)], ["host b: no torch"])


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
def test_what_there_is_no_node_for_waits_for_one_and_not_for_ever(
    asked: dict[str, Any],
    there: Any,
    lacks: str,
    make_attempt: Callable[..., Attempt],
    clock: Callable[[float], None],
) -> None:
    said = list[str]()
    nodes = NodeHealth(lambda: [there], lambda: [there], said.append)
    running = {"it": AttemptStarted(make_attempt(1, **asked), "", "", 0.0)}
    assert nodes.gone(running) == []
    assert said == (
        [f"no node is left that has {lacks}: waiting 5 min 00 s for one to join"] if lacks else []
    )
    clock(301.0)
    if not lacks:
        assert nodes.gone(running) == []
        return
    with pytest.raises(
        NoNodeLeft, match=rf"no node is left that has {lacks}. Have one join .* run again"
    ):
        nodes.gone(running)
    assert len(said) == 1


def test_one_that_joins_is_waited_for(
    make_attempt: Callable[..., Attempt], clock: Callable[[float], None]
) -> None:
    alive, said = list[Any](), list[str]()
    nodes = NodeHealth(lambda: alive, lambda: alive, said.append)
    running = {"it": AttemptStarted(make_attempt(1), "", "", 0.0)}
    nodes.gone(running)
    alive.append(node("a"))
    for now in (299.0, 302.0):
        clock(now)
        assert nodes.gone(running) == []
    alive.clear()
    clock(400.0)
    assert nodes.gone(running) == []
    assert len(said) == 2
