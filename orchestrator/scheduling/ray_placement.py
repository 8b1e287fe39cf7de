"""Placement of attempts on Ray: the slots of each node, and the resources that an attempt asks for."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from orchestrator.execution.events import AttemptStarted, DeviceLost
from orchestrator.hardware.gpu_catalog import matches_kind
from orchestrator.scheduling.cluster import (
    GPU_TYPE_LABEL,
    NODE_LABEL,
    Node,
    NodeHealth,
    capacity,
    gpu_type,
)
from orchestrator.scheduling.multi_gpu import (
    Estimate,
    HostSlots,
    Occupied,
    gpu_count,
    require_gpus,
)
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell

if TYPE_CHECKING:
    from ray import ObjectRefGenerator


# For Ray to release the GPUs of an attempt that has ended; within 0.05 s on an idle machine.
_RELEASE_S = 2.0


class RayPlacement:
    """Resources of the working nodes, less those that belong to attempts with a failed GPU.

    Args:
        cpu_cells: how many CPU cells may run at the same time.
        shared: the module ray, if other programs may use GPUs of the cluster, or None.
    """

    def __init__(
        self, health: NodeHealth, cpu_cells: int, shared: ModuleType | None = None
    ) -> None:
        self._health, self._cpu_cells, self._shared = health, cpu_cells, shared
        self._gpu_types: set[str] = set()  # of all nodes that ever joined
        self._used_by_others: dict[str, int] = {}  # GPUs by node
        self._ended_at: dict[str, float] = {}  # by node, when the last attempt ended there
        # Supervisors that keep the GPUs of an attempt reserved, so that Ray gives a failed GPU to
        # no other cell.
        self.holding: dict[ObjectRefGenerator, tuple[AttemptStarted, DeviceLost]] = {}

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        """Return how many cells of a device type or kind of GPU can run at the same time."""
        nodes = self._health.working()
        if gpu_kind is not None:
            nodes = [node for node in nodes if matches_kind(gpu_type(node), gpu_kind)]
            return _gpus_of(nodes)
        if device != "cuda":
            return self._cpu_cells
        return max(1, _gpus_of(nodes) - self._held())

    def hosts(self, running: Collection[AttemptStarted], expected_s: Estimate) -> list[HostSlots]:
        """Return the GPUs of each working node and those in use, and the slots for CPU cells."""
        nodes, now = self._health.working(), time.monotonic()
        ours: dict[str, list[Occupied]] = defaultdict(list)
        for one in running:
            cell = one.attempt.cell
            seconds = expected_s(cell)
            left_s = None if seconds is None else max(0.0, seconds - (now - one.at_s))
            ours[one.node if cell.params.gpu_count else ""].append(
                Occupied(cell.params.slots, left_s)
            )
        # Ray counts the GPUs of an attempt a moment after it got them.
        fresh = {one.node for one in running if not one.host or now - one.at_s < _RELEASE_S}
        settled = [node for node in nodes if node["NodeID"] not in fresh]
        self._look_for_others(settled, {name: _in_use(used) for name, used in ours.items()})
        hosts = []
        for node in nodes:
            name = node["NodeID"]
            used = (*ours[name], Occupied(self._used_by_others.get(name, 0), None))
            slots = int(capacity(node, "GPU")) - self._held(name)
            hosts.append(HostSlots(name, slots, gpu_type(node), used))
        # Any node with cores may get CPU cells. Cells on GPUs need cores, too.
        cpu_cells = self._cpu_cells if any(capacity(node, "CPU") >= 1 for node in nodes) else 0
        on_gpus = Occupied(sum(bool(one.attempt.cell.params.gpu_count) for one in running), None)
        return [*hosts, HostSlots("", cpu_cells, None, (*ours[""], on_gpus))]

    def note_end(self, started: AttemptStarted) -> None:
        """Remember that an attempt has ended. Ray counts its GPUs as used for a moment longer."""
        self._ended_at[started.node] = time.monotonic()

    def _look_for_others(self, nodes: Iterable[Node], ours: Mapping[str, int]) -> None:
        """Count the GPUs of each node that other programs of the cluster use."""
        if self._shared is None:
            return
        # No public function says it by node.
        available = self._shared._private.state.available_resources_per_node()
        for node in nodes:
            name = node["NodeID"]
            if time.monotonic() - self._ended_at.get(name, 0.0) > _RELEASE_S and name in available:
                used = capacity(node, "GPU") - available[name].get("GPU", 0.0)
                of_others = math.ceil(used) - ours.get(name, 0) - self._held(name)
                self._used_by_others[name] = max(0, of_others)

    def resources(self, attempt: Attempt, node: str = "") -> dict[str, object]:
        """Return the options of a Ray task for an attempt: `num_cpus`, `num_gpus` and labels.

        Args:
            node: where it must run; empty: on any node that suits it.
        """
        params = attempt.cell.params
        labels = self._kind_labels(params.gpu_kind)
        if node:
            labels = {NODE_LABEL: node}
        elif self._health.excluded:
            labels[NODE_LABEL] = f"!in({','.join(self._health.excluded)})"
        return {
            "num_cpus": self._cpus(params.gpu_count),
            "num_gpus": params.gpu_count,
            "label_selector": labels,
        }

    def _kind_labels(self, kind: str | None) -> dict[str, str]:
        """Return the labels of nodes with this kind of GPU, also of nodes that will join."""
        if kind is None:
            return {}
        self._gpu_types |= {gpu_type(node) for node in self._health.working()}
        matching = sorted(name for name in self._gpu_types if matches_kind(name, kind))
        return {GPU_TYPE_LABEL: f"in({','.join(matching or [kind.replace(' ', '-')])})"}

    def _cpus(self, gpus: int) -> int:
        """Return the cores that every suitable node can give to a cell with this number of GPUs."""
        shares = []
        for node in self._health.working():
            node_cpus, node_gpus = capacity(node, "CPU"), capacity(node, "GPU")
            if gpus and node_gpus >= gpus:
                shares.append(int(node_cpus * gpus // node_gpus))
            elif not gpus and node_cpus >= 1:
                shares.append(int(node_cpus) // self._cpu_cells)
        # The smallest share: Ray would wait for ever for more than a node has.
        return max(1, min(shares, default=1))

    def require_gpus(self, cell: Cell) -> None:
        """Raise NoGpuLeft if too few GPUs are left for the cell on any host."""
        kind, nodes = cell.params.gpu_kind, self._health.working()
        working = [
            int(capacity(node, "GPU")) - self._held(node["NodeID"])
            for node in nodes
            if matches_kind(gpu_type(node), kind)
        ]
        failed = [event.description for _, event in self.holding.values()]
        require_gpus(cell, max(working, default=0), failed)

    def _held(self, node: str | None = None) -> int:
        """Return how many GPUs, on one node or on all, belong to attempts that lost a GPU."""
        holders = (started for started, _ in self.holding.values())
        return gpu_count(one.attempt for one in holders if node in (None, one.node))


def _in_use(used: Iterable[Occupied]) -> int:
    return sum(one.slots for one in used)


def _gpus_of(nodes: Iterable[Node]) -> int:
    return int(sum(capacity(node, "GPU") for node in nodes))
