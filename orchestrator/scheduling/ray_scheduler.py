"""Scheduler on Ray: submits attempts as tasks, waits for their events, and collects outcomes.

Where an attempt may run is decided in ray_placement.py, and which nodes are healthy in cluster.py.
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.common.errors import NoNodeLeft
from orchestrator.common.text import format_seconds
from orchestrator.execution.attempt_archive import AttemptArchive, unpack, write_folder_token
from orchestrator.execution.events import AttemptStarted, DeviceLost, Event
from orchestrator.execution.exit_diagnosis import lost_outcome
from orchestrator.execution.host_probe import TIMEOUT_S, probe_here
from orchestrator.execution.measurement import FORK_SERVERS, recover
from orchestrator.hardware.host import HostInfo, visible_gpu_uuids
from orchestrator.scheduling.cluster import REPAIR_REMEDY, NodeHealth
from orchestrator.scheduling.multi_gpu import next_start
from orchestrator.scheduling.ray_placement import RayPlacement
from orchestrator.scheduling.ray_session import RaySession
from orchestrator.scheduling.ray_task import SweepHosts, import_ahead, supervise, with_node
from orchestrator.scheduling.ray_watch import died_error
from orchestrator.scheduling.scheduler import Notify, OnStart, Queue, Scheduler
from tasks.spec.attempt import PREPARATION_S, Attempt
from tasks.spec.messages import typed_error_text
from tasks.spec.outcome import Outcome

if TYPE_CHECKING:
    from ray import ObjectRefGenerator

# Added to an attempt's time-out before its supervisor is given up. Until then the supervisor may
# prepare a fork server and a process, and check the GPU and twice the host.
_BACKSTOP_S = 2 * PREPARATION_S + 3 * TIMEOUT_S + 60.0
# For a private Ray to begin a cell while no other runs. Until then it may prepare the slot, and give
# up a worker that does not answer, which takes a minute (worker_register_timeout_seconds).
_START_S = PREPARATION_S + 90.0
_POLL_S = 0.5
_PATIENCE_S = 20.0  # before a line says what the sweep waits for

# The attempts that Ray has, by their stream of events. A host is known once one has started. The
# node is known from the beginning for those with a GPU.
Running: TypeAlias = "dict[ObjectRefGenerator, AttemptStarted]"


class RayScheduler(Scheduler):
    """Runs each attempt as a Ray task with its GPUs, or with its share of the CPU cores.

    Args:
        address: a running cluster, or None for a private Ray that ends with this process.
        cpu_cells: how many CPU cells may run at the same time.
        example: an attempt like those to come; this machine prepares for it while Ray starts.
    """

    def __init__(
        self,
        notify: Notify,
        address: str | None = None,
        cpu_cells: int = 1,
        example: Attempt | None = None,
    ) -> None:
        self._session = RaySession(address, cpu_cells, example)
        self._ray = self._session.ray
        self._notify = notify
        self._health = NodeHealth(self._ray, notify)
        shared = self._ray if self._session.host is None else None
        self._placement = RayPlacement(self._health, cpu_cells, shared)
        # UUIDs of each host's GPUs by visible name, once the host was probed.
        self._gpus: dict[str, dict[str, str]] = {}
        self._hosts = SweepHosts(FORK_SERVERS.session, self._gpus)

    def hosts(self) -> list[HostInfo]:
        host = self._session.host
        hosts = self._health.ask_all(probe_here) if host is None else [host]
        for host in hosts:
            self._gpus.setdefault(host.name, {}).update(visible_gpu_uuids(host))
        return hosts

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        return self._placement.slots(device, gpu_kind)

    def import_ahead(self, attempt: Attempt) -> None:
        params = attempt.cell.params
        slots = self.slots(params.device, params.gpu_kind) // max(1, params.gpu_count)
        for _ in range(slots):
            self._start_task(import_ahead, attempt, self._placement.resources(attempt))

    def run(self, queue: Queue, on_start: OnStart) -> Iterator[Outcome]:
        running: Running = {}
        # Counted from here: predictions before a run, or between those of a search, take minutes.
        self._idle_since, self._has_notified = time.monotonic(), False
        try:
            while True:
                self._session.require_alive()
                self._submit_while_free(queue, running)
                if not running:
                    yield from self._drop_unplaceable(queue)
                stuck = [] if running else list(islice(queue.waiting(), 1))
                if not running and not stuck:
                    return
                self._require_start(running)
                for stream in self._health.find_lost(running, stuck):
                    self._require_other_nodes()
                    yield self._give_up(stream, running.pop(stream), "its node went away")
                for stream, event in self._next_events(running):
                    if isinstance(event, AttemptStarted):
                        # Clocks of other hosts differ.
                        running[stream] = replace(event, at_s=time.monotonic())
                        on_start(running[stream])
                    elif isinstance(event, AttemptArchive):
                        _unpack_if_possible(event)
                    else:
                        started = running.pop(stream)
                        self._placement.note_end(started)
                        if isinstance(event, DeviceLost):
                            event = self._exclude(event, stream, started)
                        yield event
        finally:
            self._cancel(running)

    def _submit_while_free(self, queue: Queue, running: Running) -> None:
        """Submit the attempts that may start now, so that none waits inside Ray.

        They are taken only when slots are free, because a queue with a deadline decides late.
        """
        while True:
            hosts = self._placement.hosts(running.values(), queue.expected_s)
            start = next_start(queue.waiting(), hosts, queue.expected_s)
            if start is None:
                return
            cell, host = start
            attempt = queue.take(cell)
            if attempt is not None:
                stream = self._submit(attempt, host.name)
                running[stream] = AttemptStarted(attempt, "", "", time.monotonic(), host.name)

    def _drop_unplaceable(self, queue: Queue) -> Iterator[Outcome]:
        """Yield the outcomes of cells that no node can run, while nothing else runs."""
        while (cell := next(queue.waiting(), None)) is not None:
            reason = self._health.unplaceable_reason(cell)
            if reason is None:
                self._placement.require_gpus(cell)
                return
            attempt = queue.take(cell)
            if attempt is not None:
                yield lost_outcome(attempt, reason, 0.0)

    def _submit(self, attempt: Attempt, node: str) -> ObjectRefGenerator:
        token = None
        if self._session.host is None:
            with suppress(OSError):  # the cell reports a folder that cannot be written
                token = write_folder_token(attempt)
        task = with_node(supervise)
        resources = self._placement.resources(attempt, node)
        stream: ObjectRefGenerator = self._start_task(
            task, attempt, resources, token, num_returns="streaming"
        )
        return stream

    def _start_task(
        self,
        task: Callable[..., object],
        attempt: Attempt,
        resources: Mapping[str, object],
        *arguments: object,
        **options: str,
    ) -> object:
        # max_calls=0: the worker only supervises, so it may serve the next cell. max_retries=0: by
        # default Ray starts a crashing cell four times without a message. Both have an effect in
        # the decorator only.
        decorate = self._ray.remote(**resources, max_calls=0, max_retries=0, **options)
        return decorate(task).remote(attempt, resources["num_cpus"], self._hosts, *arguments)

    def _next_events(self, running: Running) -> Iterator[tuple[ObjectRefGenerator, Event]]:
        """Wait a moment, and yield at most one event of each attempt."""
        if not running:
            time.sleep(_POLL_S)  # for a node to join, or for another program to release GPUs
            return
        ready, _ = self._ray.wait(list(running), timeout=_POLL_S, fetch_local=False)
        for stream in ready:
            yield stream, self._next_event(stream, running[stream])
        if not ready:
            for stream, started in list(running.items()):
                outcome = self._give_up_hung(stream, started)
                if outcome is not None:
                    yield stream, outcome

    def _next_event(self, stream: ObjectRefGenerator, started: AttemptStarted) -> Event:
        try:
            event: Event = self._ray.get(next(stream))
        except self._ray.exceptions.LocalRayletDiedError as error:
            raise died_error("raylet") from error
        except (self._ray.exceptions.RayError, StopIteration) as error:
            if isinstance(error, self._ray.exceptions.NodeDiedError):
                self._require_other_nodes()
            reason = f"its supervisor went away: {typed_error_text(error)}"
            outcome = self._give_up(stream, started, reason)
            self._health.check(started, error)
            return outcome
        if isinstance(event, Outcome | DeviceLost):
            self._health.note_success(started.node)
        return event

    def _require_other_nodes(self) -> None:
        """Raise NoNodeLeft if a node that has died was the only one, that of a private Ray."""
        # Its cells may outlive it and finish, so they are not lost: the next driver looks at their
        # journals.
        if self._session.host is not None:
            raise died_error("raylet")

    def _require_start(self, running: Running) -> None:
        """Raise NoNodeLeft if a private Ray begins no cell although no other cell occupies it."""
        now = time.monotonic()
        if any(started.host for started in running.values()):
            self._idle_since, self._has_notified = now, False
        elif self._session.host is None:
            # On a cluster, other programs may have what the cell waits for.
            if now - self._idle_since > _PATIENCE_S and not self._has_notified:
                self._notify("waiting for a host with enough GPUs or cores that nobody uses")
                self._has_notified = True
        elif now - self._idle_since > _START_S:
            raise NoNodeLeft(
                f"Ray has begun no cell for {format_seconds(_START_S)}",
                "Run again, or without Ray: --scheduler serial. "
                "Finished cells are not measured again",
            )

    def _exclude(
        self, event: DeviceLost, stream: ObjectRefGenerator, started: AttemptStarted
    ) -> Outcome:
        """Give no other cell to a lost device, and return how the attempt ended."""
        if event.gpu:
            self._placement.holding[stream] = started, event
            return event.lost_outcome
        if self._health.has_several_hosts():
            self._health.exclude(started.node, event.description)
            return event.lost_outcome
        # A single host stays in use, because no other could replace it.
        self._notify(f"{event.description}. {REPAIR_REMEDY}")
        return event.own_outcome

    def _give_up_hung(self, stream: ObjectRefGenerator, started: AttemptStarted) -> Outcome | None:
        """Return a lost outcome if the supervisor itself hangs, and None otherwise."""
        limit_s = started.attempt.settings.timeout_s + _BACKSTOP_S
        if not started.host or time.monotonic() - started.at_s < limit_s:
            return None
        return self._give_up(stream, started, f"its supervisor did not answer for {limit_s:g} s")

    def _give_up(self, stream: ObjectRefGenerator, started: AttemptStarted, reason: str) -> Outcome:
        self._cancel([stream])
        wall_s = time.monotonic() - started.at_s
        # The measuring process may have finished before its supervisor or its node was lost.
        return recover(started.attempt) or lost_outcome(started.attempt, reason, wall_s)

    def _cancel(self, streams: Iterable[ObjectRefGenerator]) -> None:
        for stream in streams:
            with suppress(Exception):
                self._ray.cancel(stream, force=True)

    def close(self) -> None:
        self._cancel(self._placement.holding)
        self._session.close()


def _unpack_if_possible(archive: AttemptArchive) -> None:
    # A cell without its log is still a result.
    with suppress(OSError, ValueError, tarfile.TarError):
        unpack(archive)
