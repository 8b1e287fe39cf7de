"""Placement of attempts on Ray: the resources and labels that each asks for, and how many fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
from orchestrator.scheduling.multi_gpu import gpu_count, require_gpus
from tasks.spec.attempt import Attempt

if TYPE_CHECKING:
    from ray import ObjectRefGenerator


class RayPlacement:
    """Resources of the working nodes, less those that belong to attempts with a failed GPU.

    Args:
        cpu_cells: how many CPU cells may run at the same time.
    """

    def __init__(self, health: NodeHealth, cpu_cells: int) -> None:
        self._health, self._cpu_cells = health, cpu_cells
        self._gpu_types: set[str] = set()  # of all nodes that ever joined
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

    def has_room(self, running: Collection[AttemptStarted]) -> bool:
        """Return True if another attempt may be submitted.

        Ray would queue what exceeds its resources; this count decides how far we look ahead.
        """
        attempts = [started.attempt for started in running]
        if not attempts:
            return True
        if {attempt.cell.params.device for attempt in attempts} != {"cuda"}:
            return len(attempts) < self._cpu_cells
        for started in running:
            # An attempt that waits for several GPUs gets what becomes free.
            if started.attempt.cell.params.gpu_count > 1 and not started.host:
                return False
        return gpu_count(attempts) < self.slots("cuda")

    def resources(self, attempt: Attempt) -> dict[str, object]:
        """Return the options of a Ray task for an attempt: `num_cpus`, `num_gpus` and labels."""
        params = attempt.cell.params
        labels = self._kind_labels(params.gpu_kind)
        if self._health.excluded:
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

    def require_gpus(self, attempt: Attempt) -> None:
        """Raise NoGpuLeft if too few GPUs are left for the attempt on any host."""
        working = [
            capacity(node, "GPU") - self._held(node["NodeManagerHostname"])
            for node in self._health.working()
        ]
        failed = [event.description for _, event in self.holding.values()]
        require_gpus(attempt, int(max(working, default=0)), failed)

    def _held(self, host: str | None = None) -> int:
        """Return how many GPUs, on one host or on all, belong to attempts that lost a GPU."""
        holders = (started for started, _ in self.holding.values())
        return gpu_count(one.attempt for one in holders if host in (None, one.host))


def _gpus_of(nodes: Iterable[Node]) -> int:
    return int(sum(capacity(node, "GPU") for node in nodes))
