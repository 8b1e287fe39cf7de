"""The task that Ray runs for each attempt: it measures, and yields events about it to the driver."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, wraps

from orchestrator.execution.attempt_archive import in_local_folder, move_into_archive, shares_folder
from orchestrator.execution.events import AttemptStarted, DeviceLost, Event
from orchestrator.execution.exit_diagnosis import lost_outcome
from orchestrator.execution.measurement import (
    FORK_SERVERS,
    Slot,
    check_host,
    describe_os_error,
    fork_purpose,
    fork_server,
    measure,
    visible_gpus,
)
from orchestrator.hardware.host import GpuUuids
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome


@dataclass(frozen=True)
class SweepHosts:
    """Facts of a sweep that its workers need.

    Args:
        session: identifies the sweep's fork servers on each host.
        gpus: by host, the GPUs that cells may use.
    """

    session: str
    gpus: Mapping[str, GpuUuids]

    def slot(self, attempt: Attempt, cpus: int) -> Slot:
        """Return this process's slot. Its fork servers are those of the sweep from now on."""
        FORK_SERVERS.session = self.session
        return Slot.of(attempt, cpus, self.gpus.get(socket.gethostname(), {}))


def supervise(
    attempt: Attempt, cpus: int, hosts: SweepHosts, token: str | None = None
) -> Iterator[Event]:
    """Run an attempt in a child process and yield its events: its start, its files, its end.

    There is an event with its files only if the host does not share the driver's folder. After the
    loss of a GPU the generator waits until the driver ends it.

    Args:
        cpus: how many cores the attempt may use.
        token: the content of a file that the driver wrote into the attempt's folder, to find out
            whether this host shares that folder. None if the folder is known to be shared.
    """
    yield AttemptStarted(attempt, socket.gethostname(), visible_gpus(attempt), time.monotonic())
    try:
        is_shared = token is None or shares_folder(attempt, token)
        local = attempt if is_shared else in_local_folder(attempt)
    except OSError as error:
        yield check_host(lost_outcome(attempt, describe_os_error(error), 0.0))
        return
    event = measure(local, hosts.slot(local, cpus))
    if local is not attempt:
        with suppress(OSError):  # a cell without its files is still a result
            yield move_into_archive(local, attempt)
    yield _with_attempt(event, attempt)
    if isinstance(event, DeviceLost) and event.gpu:
        # As long as this task runs, Ray gives its GPUs to no other cell. The driver ends it.
        threading.Event().wait()


def import_ahead(attempt: Attempt, cpus: int, hosts: SweepHosts) -> None:
    """Have this host's fork server import what attempts like this one need, and wait for it.

    Ray starts a worker for this, which is likely to supervise the next attempts.
    """
    if purpose := fork_purpose(attempt):
        placed = hosts.slot(attempt, cpus).place(attempt)
        fork_server(placed).broken(purpose)


def _with_attempt(event: Outcome | DeviceLost, attempt: Attempt) -> Outcome | DeviceLost:
    if isinstance(event, Outcome):
        return replace(event, attempt=attempt)
    return replace(
        event,
        lost_outcome=replace(event.lost_outcome, attempt=attempt),
        own_outcome=replace(event.own_outcome, attempt=attempt),
    )


@cache
def with_node(task: Callable[..., Iterator[Event]]) -> Callable[..., Iterator[Event]]:
    """Return a task that adds its node to AttemptStarted.

    Only the worker knows where Ray has started it.
    """

    @wraps(task)  # Ray titles the process with the task's name
    def task_with_node(*arguments: object) -> Iterator[Event]:
        import ray

        for event in task(*arguments):
            if isinstance(event, AttemptStarted):
                event = replace(event, node=ray.get_runtime_context().get_node_id())
            yield event

    return task_with_node
