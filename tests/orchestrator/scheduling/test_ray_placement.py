"""GPUs that cells may use on the nodes of a cluster, some of them used by other programs."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.common.errors import NoGpuLeft
from orchestrator.execution.events import AttemptStarted
from orchestrator.scheduling.cluster import GPU_TYPE_LABEL
from orchestrator.scheduling.ray_placement import RayPlacement
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.registry import make_cell

TYPES = {"a": "H100", "b": "A100"}  # of the GPUs of each node


class Ray:
    """A fake of the state that Ray has of a cluster. free: GPUs of each node that no program has taken."""

    def __init__(self, **free: float) -> None:
        self._private = SimpleNamespace(state=self)
        self.free = free

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {node: {"GPU": free} for node, free in self.free.items()}


def placement(ray: Any, **gpus: int) -> RayPlacement:
    nodes = [
        {
            "NodeID": name,
            "Resources": {"GPU": count, "CPU": 8},
            "Labels": {GPU_TYPE_LABEL: TYPES[name]},
        }
        for name, count in gpus.items()
    ]
    health: Any = SimpleNamespace(working=lambda: nodes, excluded={})
    return RayPlacement(health, 1, ray)


def started(node: str, host: str = "", at_s: float | None = None, **params: Any) -> AttemptStarted:
    cell = make_cell("matmul", {"device": "cuda", **params})
    attempt = Attempt(cell, 1, "/nowhere", Settings())
    return AttemptStarted(attempt, host, "0", at_s or time.monotonic(), node)


def free(placed: RayPlacement, *running: AttemptStarted) -> dict[str, int]:
    hosts = placed.hosts(running, lambda cell: None)
    return {host.name: host.free for host in hosts if host.name}


def test_an_attempt_that_waits_for_its_gpus_frees_none_of_others() -> None:
    """Ray counts its GPUs as free for a moment."""
    placed = placement(Ray(a=2.0), a=4)
    assert free(placed) == {"a": 2}
    assert free(placed, started("a")) == {"a": 1}
    assert free(placed, started("a"), started("a")) == {"a": 0}


def test_gpus_of_others_are_counted_again_once_all_attempts_run() -> None:
    ray = Ray(a=2.0)
    placed = placement(ray, a=4)
    free(placed)
    long_ago = started("a", "host", time.monotonic() - 60.0)
    ray.free["a"] = 3.0  # the others have ended
    assert free(placed, long_ago) == {"a": 3}
    assert free(placed, replace(long_ago, at_s=time.monotonic())) == {"a": 3}


def test_a_part_of_a_gpu_that_another_program_uses_makes_it_used() -> None:
    assert free(placement(Ray(a=3.5), a=4)) == {"a": 3}


def test_gpus_of_another_kind_do_not_replace_one_that_failed() -> None:
    placed = placement(None, a=8, b=2)
    lost: Any = SimpleNamespace(description="GPU 0 of b")
    holder: Any = object()
    placed.holding[holder] = started("b", gpu_kind="A100"), lost
    placed.require_gpus(make_two_of("H100"))
    with pytest.raises(NoGpuLeft, match="no host is left with 2 GPUs that work"):
        placed.require_gpus(make_two_of("A100"))


def make_two_of(kind: str) -> Any:
    values = {"device": "cuda", "gpus": 2, "gpu_kind": kind, "size": "tiny", "parallel": "ddp"}
    return make_cell("train_step", values)
