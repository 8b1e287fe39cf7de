"""Scheduler without Ray: one attempt after another, as children of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from orchestrator.execution.events import AttemptStarted, DeviceLost
from orchestrator.execution.fork_client import ForkServer
from orchestrator.execution.host_probe import probe_here
from orchestrator.execution.measurement import FORK_SERVERS, Slot, begin_import, measure, only_on
from orchestrator.hardware.gpu_catalog import matches_kind
from orchestrator.hardware.host import GpuInfo, HostInfo, cores_here, visible_gpu_uuids
from orchestrator.scheduling.cluster import REPAIR_REMEDY
from orchestrator.scheduling.multi_gpu import require_gpus
from orchestrator.scheduling.scheduler import Notify, OnStart, Queue, Scheduler
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome


class SerialScheduler(Scheduler):
    """Runs one attempt at a time on the first GPUs of this host that have not failed.

    example: an attempt like those to come; the fork server imports torch while the host is probed.
    """

    def __init__(self, notify: Notify, example: Attempt | None = None) -> None:
        self._notify = notify
        self._server: ForkServer | None = None
        if example is not None:
            self._server = begin_import(example, Slot(cores_here()))
        self._gpus: dict[str, str] = {}  # visible name -> UUID
        self._models: tuple[GpuInfo, ...] = ()
        self._lost: dict[str, str] = {}  # visible name -> what happened to it

    def hosts(self) -> Sequence[HostInfo]:
        host = probe_here(self._server)
        self._gpus, self._models = visible_gpu_uuids(host) if host.gpus else {}, host.gpus
        return [host]

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        has_kind = gpu_kind is None or any(matches_kind(gpu.name, gpu_kind) for gpu in self._models)
        return int(has_kind)

    def import_ahead(self, attempt: Attempt) -> None:
        """Do nothing: the fork server imports since it was started first of all."""

    def run(self, queue: Queue, on_start: OnStart) -> Iterator[Outcome]:
        for attempt in queue:
            working = [name for name in self._gpus if name not in self._lost]
            if self._lost:
                require_gpus(attempt.cell, len(working), self._lost.values())
            on_start(AttemptStarted(attempt, "here", "", time.monotonic()))
            wanted = attempt.cell.params.gpu_count
            gpu = ",".join(working[:wanted])
            # A single attempt sees what this process sees, unless a GPU must be hidden from it.
            placed = only_on(gpu, attempt) if self._lost or wanted > 1 else attempt
            event = measure(placed, Slot(cores_here(), None, gpu, self._gpus))
            yield self._exclude(event) if isinstance(event, DeviceLost) else event

    def _exclude(self, event: DeviceLost) -> Outcome:
        """Use no failed GPU again. There is no other host, so a failed host is only reported."""
        if event.gpu:
            self._lost[event.gpu] = event.description
            return event.lost_outcome
        self._notify(f"{event.description}. {REPAIR_REMEDY}")
        return event.own_outcome

    def close(self) -> None:
        FORK_SERVERS.close()
