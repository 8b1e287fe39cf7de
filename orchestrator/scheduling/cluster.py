"""Nodes of a cluster while cells are measured: which are lost, and whether one can run what waits.

Ray reports a node whose connection closes. A node that freezes, or that the network cuts off, only
stops to count as alive, and a task that no node can run waits for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.common.errors import NoNodeLeft
from orchestrator.common.text import format_seconds
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.gpu_catalog import matches_kind
from tasks.spec.attempt import Attempt

GPU_TYPE = "ray.io/accelerator-type"  # a label that Ray gives each node, by its first GPU

REPAIR_REMEDY = "Mend what `sweep doctor` says there"  # of a host that measures nothing

_EVERY_S = 2.0
_PATIENCE_S = 300.0  # for another node to join

Node = Mapping[str, Any]  # as `ray.nodes()` has it


def gpu_type(node: Node) -> str:
    """Return Ray's name of a node's GPUs, such as GeForce-RTX-5090, or an empty string."""
    return str(node["Labels"].get(GPU_TYPE, "")) if node["Resources"].get("GPU") else ""


class NodeHealth:
    """`alive` returns the living nodes, `working` those of them that cells may run on."""

    def __init__(
        self,
        alive: Callable[[], Sequence[Node]],
        working: Callable[[], Sequence[Node]],
        say: Callable[[str], None],
    ) -> None:
        self._alive, self._working = alive, working
        self._say = say
        self._looked_at = -math.inf
        self._missing_since: float | None = None

    def gone(self, running: Mapping[Any, AttemptStarted]) -> list[Any]:
        """Return the keys of attempts whose node is no longer alive.

        Raises NoNodeLeft if an attempt has waited for long, and no node could run it.
        """
        now = time.monotonic()
        if now - self._looked_at < _EVERY_S:
            return []
        self._looked_at, nodes = now, self._alive()
        self._require_some(
            self._working(),
            [started.attempt for started in running.values() if not started.host],
            now,
        )
        living = {node["NodeID"] for node in nodes}
        return [
            key for key, started in running.items() if started.node and started.node not in living
        ]

    def _require_some(self, nodes: Sequence[Node], waiting: Sequence[Attempt], now: float) -> None:
        without = next(
            (attempt for attempt in waiting if not any(_has_room(node, attempt) for node in nodes)),
            None,
        )
        if without is None:
            self._missing_since = None
            return
        lacking = f"no node is left that has {_asked(without)}"
        if self._missing_since is None:
            self._missing_since = now
            self._say(f"{lacking}: waiting {format_seconds(_PATIENCE_S)} for one to join")
        elif now - self._missing_since > _PATIENCE_S:
            raise NoNodeLeft(
                lacking,
                "Have one join (`ray start --address=…`) and run again: finished cells are not measured again",
            )


def unplaceable_reason(
    attempt: Attempt, working: Sequence[Node], broken: Iterable[str]
) -> str | None:
    """Return why no healthy node can run this attempt, or None if one can or may.

    Args:
        broken: a description of each host that measures nothing.

    Raises NoNodeLeft if no host is left at all.
    """
    reasons = "; ".join(broken)
    if not reasons or any(_has_room(node, attempt) for node in working):
        return None
    if not any(map(measures, working)):
        raise NoNodeLeft(
            f"no host is left that measures: {reasons}",
            f"{REPAIR_REMEDY}, and run again: finished cells are not measured again",
        )
    return f"no host is left that could measure it: {reasons}"


def measures(node: Node) -> bool:
    return bool(node["Resources"].get("CPU") or node["Resources"].get("GPU"))


def _has_room(node: Node, attempt: Attempt) -> bool:
    """Return True if the attempt could run there if nothing else did."""
    params, has = attempt.cell.params, node["Resources"]
    if not params.gpu_count:
        return bool(has.get("CPU", 0) >= 1)
    return bool(has.get("GPU", 0) >= params.gpu_count) and (
        params.gpu_kind is None or matches_kind(gpu_type(node), params.gpu_kind)
    )


def _asked(attempt: Attempt) -> str:
    params = attempt.cell.params
    if not params.gpu_count:
        return "a core"
    kind = f"{params.gpu_kind} " if params.gpu_kind else ""
    return f"{params.gpu_count} {kind}GPU{'s' if params.gpu_count > 1 else ''}"
