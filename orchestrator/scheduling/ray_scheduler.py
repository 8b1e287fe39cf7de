"""Scheduler on Ray: submits attempts as tasks, waits for their events, and collects outcomes.

It uses the GPUs of this machine or of a cluster. Only this file imports Ray.
"""

from __future__ import annotations

import logging
import os
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.common.errors import NoNodeLeft, PlatformError
from orchestrator.common.text import format_seconds
from orchestrator.execution.attempt_archive import AttemptArchive, unpack, write_folder_token
from orchestrator.execution.events import AttemptStarted, DeviceLost, Event
from orchestrator.execution.exit_diagnosis import lost_outcome
from orchestrator.execution.fork_server import ForkServerTemplate
from orchestrator.execution.host_probe import TIMEOUT_S, probe_here
from orchestrator.execution.supervisor import (
    cores_here,
    prepare_slot,
    start_template,
    supervise,
)
from orchestrator.hardware.gpu_catalog import matches_kind
from orchestrator.hardware.host import HostInfo
from orchestrator.hardware.nvml import gpu_names
from orchestrator.hardware.visible_gpus import visible_gpu_uuids
from orchestrator.scheduling.cluster import (
    GPU_TYPE,
    REPAIR_REMEDY,
    NodeHealth,
    gpu_type,
    measures,
    unplaceable_reason,
)
from orchestrator.scheduling.multi_gpu import gpu_count, require_gpus
from orchestrator.scheduling.ray_reaper import MARK
from orchestrator.scheduling.ray_session import (
    IS_IT_RUNNING,
    RAY_ENVIRONMENT,
    require_listener,
    session_folder,
    shipped,
    start_reaper,
)
from orchestrator.scheduling.scheduler import Notify, OnStart, Scheduler
from tasks.spec.attempt import PREPARATION_S, Attempt
from tasks.spec.outcome import Outcome

# Added to an attempt's time-out before its supervisor is given up: its preparation and its checks.
_BACKSTOP_S = (
    2 * PREPARATION_S + 3 * TIMEOUT_S + 60.0
)  # of a parent and a process; of a GPU and a host that are tried
_ANSWER_S = PREPARATION_S + TIMEOUT_S  # for a node to get this program, and to import torch
_BEGIN_S = 60.0  # for one that has it to begin anything
_CRASHES = 3  # of workers in a row, after which a node gets no other cell
_LATE_S = 20.0  # after which the user sees who has not answered
_POLL_S = 0.5
_OBJECT_STORE_BYTES = 100 * 1024**2
_WORKERS_CRASH = "Ray's workers crash there"
_SEE_STATUS = "See `ray status`"
_NODE = "ray.io/node-id"  # a label that Ray gives each node

Answer = TypeVar("Answer")


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
        self._notify = notify
        self._cpu_cells = cpu_cells
        self._types: set[str] = set()  # of GPU, of all nodes that there have been
        self._gpus: dict[
            str, dict[str, str]
        ] = {}  # of each host, once its environment is known: UUID by visible name
        self._fallen: dict[
            Any, tuple[AttemptStarted, DeviceLost]
        ] = {}  # by the task that holds it so that no other cell has it
        self._out: dict[str, str] = {}  # reason by node id
        self._crashes: Counter[str] = (
            Counter()
        )  # of Ray's workers, by node, since one brought a cell to its end there
        self._session: str | None = None
        self._lock: int | None = None  # on the session's folder
        if not address:
            self._session, self._lock = session_folder()
        self._reaper = start_reaper(self._session) if self._session else None
        self._preparing: list[Any] = []
        self._local: HostInfo | None = None
        self._grandparent: ForkServerTemplate | None = None
        if self._session is None:
            self._ray = _connect(address)
        else:
            marked = {MARK: self._session}
            if example is not None:
                self._grandparent = start_template(example, Path(self._session), cpu_cells, marked)
            marked |= self._grandparent.variables if self._grandparent else {}
            try:
                self._ray, self._local = _start_here(self._session, marked)
            except BaseException:
                self._end_helpers()
                raise

    def hosts(self) -> list[HostInfo]:
        hosts = [self._local] if self._local is not None else self._probe_nodes()
        for host in hosts:
            self._gpus.setdefault(host.name, {}).update(visible_gpu_uuids(host))
        return hosts

    def _probe_nodes(self) -> list[HostInfo]:
        found, refused = self._ask_nodes(probe_here, _ANSWER_S)
        if not found:
            raise next(
                iter(refused.values()),
                PlatformError("no node of the cluster answers", _SEE_STATUS),
            )
        return found

    def _ask_nodes(
        self, question: Callable[[], Answer], limit_s: float, only: str = ""
    ) -> tuple[list[Answer], dict[str, PlatformError]]:
        """Return the answers of all nodes, and the error of each node that cannot answer.

        Nodes with an error get no cell, unless no node answered.

        Args:
            only: one node to ask, if others can measure too.
        """
        ask = self._ray.remote(num_cpus=0, max_retries=1)(question)  # a single worker may be killed
        nodes = {
            node["NodeID"]: node["NodeManagerHostname"]
            for node in self._alive()
            if only in ("", node["NodeID"])
        }
        asked = {node: ask.options(label_selector={_NODE: node}).remote() for node in nodes}
        self._wait_for({one: nodes[node] for node, one in asked.items()}, limit_s)
        found, refused = list[Answer](), dict[str, PlatformError]()
        for node, one in asked.items():
            try:
                found += self._answer(one, limit_s)
            except PlatformError as error:
                refused[node] = PlatformError(f"host {nodes[node]}: {error.message}", error.remedy)
        for node, why in refused.items() if found or only else ():
            self._leave_out(node, why.message)
        return found, refused

    def _wait_for(self, asked: Mapping[Any, str], limit_s: float) -> None:
        """Wait for answers. `asked` maps each to the host that it comes from."""
        _, late = (
            self._ray.wait(list(asked), num_returns=len(asked), timeout=_LATE_S)
            if asked
            else ([], [])
        )
        if late:
            hosts = ", ".join(sorted({asked[one] for one in late}))
            self._notify(f"waiting for {hosts} to answer, for up to {format_seconds(limit_s)}")
            self._ray.wait(late, num_returns=len(late), timeout=limit_s - _LATE_S)

    def _answer(self, asked: Any, limit_s: float) -> list[Any]:
        """Return the answer in a list, which is empty for a node that is gone. Raises PlatformError.

        For a while Ray counts a dead node among the living.
        """
        missing = self._ray.exceptions
        try:
            return [self._ray.get(asked, timeout=_POLL_S)]
        except missing.RayTaskError as error:
            if isinstance(error.cause, PlatformError):
                raise error.cause from error  # whose text is not Ray's traceback
            raise PlatformError(
                f"this program does not begin there: {error.cause!r}", REPAIR_REMEDY
            ) from error
        except (missing.TaskUnschedulableError, missing.NodeDiedError):
            return []
        except missing.WorkerCrashedError as error:
            raise PlatformError(_WORKERS_CRASH, _SEE_STATUS) from error
        except missing.GetTimeoutError as error:
            self._end([asked])
            raise PlatformError(
                f"no answer came from there in {format_seconds(limit_s)}", _SEE_STATUS
            ) from error
        except missing.RuntimeEnvSetupError as error:
            last = str(error).strip().splitlines()[-1]  # before it comes Ray's traceback
            raise PlatformError(f"it does not get this program: {last}", _SEE_STATUS) from error

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        if gpu_kind is not None:
            return int(
                sum(
                    node["Resources"].get("GPU", 0)
                    for node in self._alive()
                    if matches_kind(gpu_type(node), gpu_kind)
                )
            )
        if device != "cuda":
            return self._cpu_cells
        return max(1, self._all_gpus() - self._held())

    def prepare(self, attempt: Attempt) -> None:
        params = attempt.cell.params
        slots = self.slots(params.device, params.gpu_kind) // max(1, params.gpu_count)
        self._preparing = [self._on_a_place(prepare_slot, attempt) for _ in range(slots)]

    def run(self, queue: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        ray, pending = self._ray, iter(queue)
        running: dict[Any, AttemptStarted] = {}
        nodes = NodeHealth(self._living, self._alive, self._notify)
        try:
            while True:
                # Taken only when a slot is free: a queue with a deadline decides late.
                while self._has_room(running) and (attempt := next(pending, None)):
                    if why := unplaceable_reason(attempt, self._alive(), self._out.values()):
                        yield lost_outcome(attempt, why, 0.0)
                        continue
                    self._require_gpu(attempt)
                    running[self._submit(attempt)] = AttemptStarted(
                        attempt, "", "", time.monotonic()
                    )
                if not running:
                    return
                for stream in nodes.gone(running):
                    yield self._give_up(stream, running.pop(stream), "its node went away")
                ready, _ = (
                    ray.wait(list(running), timeout=_POLL_S, fetch_local=False)
                    if running
                    else ([], [])
                )
                for stream in ready or list(running):
                    event = self._next_event(stream, running[stream], is_ready=bool(ready))
                    if isinstance(event, AttemptStarted):
                        running[stream] = replace(event, at_s=time.monotonic())
                        on_start(running[stream])
                    elif isinstance(event, AttemptArchive):
                        _take_in(event)
                    elif isinstance(event, DeviceLost):
                        yield self._without(event, stream, running.pop(stream))
                    elif event is not None:
                        del running[stream]
                        yield event
        finally:
            self._end(running)

    def _without(self, fallen: DeviceLost, stream: Any, started: AttemptStarted) -> Outcome:
        """Give no other cell to a lost device, and return how the attempt ended.

        A single host stays in use, because no other could replace it.
        """
        if fallen.gpu:
            self._fallen[stream] = started, fallen
            return fallen.lost_outcome
        if self._has_several_hosts():
            self._leave_out(started.node, fallen.description)
            return fallen.lost_outcome
        self._notify(f"{fallen.description}. {REPAIR_REMEDY}")
        return fallen.own_outcome

    def _has_several_hosts(self) -> bool:
        return sum(map(measures, self._living())) > 1

    def _leave_out(self, node: str, why: str) -> None:
        if node not in self._out:
            self._notify(f"{why}: it gets no other cell. {REPAIR_REMEDY}")
            self._out[node] = why

    def _end(self, streams: Iterable[Any]) -> None:
        for stream in streams:
            with suppress(Exception):
                self._ray.cancel(stream, force=True)

    def close(self) -> None:
        self._end(self._fallen)
        self._ray.shutdown()
        self._end_helpers()

    def _end_helpers(self) -> None:
        if self._grandparent:
            self._grandparent.close()
        if self._reaper:
            self._reaper.communicate()  # ends its lifeline
        if self._lock is not None:
            os.close(self._lock)

    def _submit(self, attempt: Attempt) -> Any:
        mark = None if self._local else _marked(attempt)
        return self._on_a_place(
            _saying_what_it_has(supervise), attempt, mark, num_returns="streaming"
        )

    def _on_a_place(
        self, task: Callable[..., Any], attempt: Attempt, *more: Any, **options: Any
    ) -> Any:
        gpus = attempt.cell.params.gpu_count
        cpus = self._cores_for(gpus) if gpus else self._cores_per_cpu_cell()
        # max_calls=0: the worker only supervises, so it may serve the next cell; max_retries=0: Ray would start a
        # crashing cell four times in silence. Both hold only in the decorator.
        labels = {
            **self._of_kind(attempt.cell.params.gpu_kind),
            **({_NODE: f"!in({','.join(self._out)})"} if self._out else {}),
        }
        resources = {"num_cpus": cpus, "num_gpus": gpus, "label_selector": labels}
        decorate = self._ray.remote(**resources, max_calls=0, max_retries=0, **options)
        return decorate(task).remote(attempt, cpus, self._gpus, *more)

    def _of_kind(self, kind: str | None) -> dict[str, str]:
        """Return the labels of nodes with this kind of GPU, also of nodes that will join."""
        if kind is None:
            return {}
        self._types |= {gpu_type(node) for node in self._alive()}
        wanted = sorted(name for name in self._types if matches_kind(name, kind)) or [
            kind.replace(" ", "-")
        ]
        return {GPU_TYPE: f"in({','.join(wanted)})"}

    def _cores_for(self, gpus: int) -> int:
        """Return the cores that every node with enough GPUs can give to a cell.

        Ray would wait for ever for more than a node has.
        """
        return max(
            1,
            min(
                (int(n["CPU"] * gpus // n["GPU"]) for n in self._nodes() if n["GPU"] >= gpus),
                default=1,
            ),
        )

    def _cores_per_cpu_cell(self) -> int:
        return max(
            1,
            min((int(n["CPU"]) for n in self._nodes() if n["CPU"] >= 1), default=1)
            // self._cpu_cells,
        )

    def _require_gpu(self, attempt: Attempt) -> None:
        fallen = self._fallen.values()
        working = [
            node["Resources"].get("GPU", 0) - self._held(node["NodeManagerHostname"])
            for node in self._alive()
        ]
        require_gpus(
            attempt, int(max(working, default=0)), [event.description for _, event in fallen]
        )

    def _held(self, host: str | None = None) -> int:
        """Return how many GPUs, on one host or on all, belong to cells that lost a GPU."""
        return gpu_count(
            started.attempt for started, _ in self._fallen.values() if host in (None, started.host)
        )

    def _all_gpus(self) -> int:
        return int(sum(node["GPU"] for node in self._nodes()))

    def _nodes(self) -> list[dict[str, float]]:
        return [
            {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")}
            for node in self._alive()
        ]

    def _alive(self) -> list[dict[str, Any]]:
        """Return the nodes that cells may run on."""
        return [node for node in self._living() if node["NodeID"] not in self._out]

    def _living(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _has_room(self, running: Mapping[Any, AttemptStarted]) -> bool:
        """Return True if another attempt may be submitted.

        Ray would queue what exceeds its resources; this count decides how far we look ahead. While an
        attempt waits for several GPUs, no other is submitted, so that it gets what becomes free.
        """
        begun = [started.attempt for started in running.values()]
        devices = {attempt.cell.params.device for attempt in begun}
        if devices != {"cuda"}:
            return len(begun) < (self._cpu_cells if devices else 1)
        waits = any(
            gpu_count([started.attempt]) > 1 and not started.host for started in running.values()
        )
        return not waits and gpu_count(begun) < self.slots("cuda")

    def _next_event(self, stream: Any, started: AttemptStarted, is_ready: bool) -> Event | None:
        if not is_ready:
            return self._give_up_hung(stream, started)
        try:
            event: Event = self._ray.get(next(stream))
            if isinstance(event, Outcome | DeviceLost):
                del self._crashes[started.node]
            return event
        except self._ray.exceptions.LocalRayletDiedError as error:
            raise NoNodeLeft(
                "Ray's own process on this machine has died",
                "Run again: finished cells are not measured again",
            ) from error
        except (self._ray.exceptions.RayError, StopIteration) as error:
            reason = f"its supervisor went away: {type(error).__name__}: {error}"
            outcome = lost_outcome(started.attempt, reason, time.monotonic() - started.at_s)
            if self._has_several_hosts():
                self._doubt(started, error)
            return outcome

    def _doubt(self, started: AttemptStarted, error: Exception) -> None:
        """Check whether the node of a lost supervisor still starts tasks.

        Without a known node, check all of them.
        """
        ray = self._ray.exceptions
        if not isinstance(error, ray.RuntimeEnvSetupError | ray.WorkerCrashedError):
            return
        self._crashes[started.node] += isinstance(error, ray.WorkerCrashedError)
        if started.node and self._crashes[started.node] >= _CRASHES:
            self._leave_out(started.node, f"host {started.host}: {_WORKERS_CRASH}")
            return
        with suppress(ray.RayError):  # the next event reports it
            self._ask_nodes(_nothing, _BEGIN_S, started.node)

    def _give_up_hung(self, stream: Any, started: AttemptStarted) -> Outcome | None:
        """Return a lost outcome if the supervisor itself hangs, and None otherwise."""
        limit = started.attempt.settings.timeout_s + _BACKSTOP_S
        if not started.host or time.monotonic() - started.at_s < limit:
            return None
        return self._give_up(stream, started, f"its supervisor did not answer for {limit:g} s")

    def _give_up(self, stream: Any, started: AttemptStarted, reason: str) -> Outcome:
        self._end([stream])
        return lost_outcome(started.attempt, reason, time.monotonic() - started.at_s)


def _nothing() -> None: ...


@cache
def _saying_what_it_has(
    measure_there: Callable[..., Iterator[Event]],
) -> Callable[..., Iterator[Event]]:
    """Return the function with the node and its CPUs added to AttemptStarted.

    Only the worker knows where Ray has started it.
    """

    @wraps(measure_there)  # Ray calls the process by it
    def saying(*words: Any) -> Iterator[Event]:
        import ray

        for event in measure_there(*words):
            if isinstance(event, AttemptStarted):
                here = ray.get_runtime_context()
                has = here.get_assigned_resources()  # type: ignore[no-untyped-call]
                event = replace(event, node=here.get_node_id(), cpus=has.get("CPU", 0.0))
            yield event

    return saying


def _marked(attempt: Attempt) -> str | None:
    """Return the folder token, or None if the driver cannot write: the cell then reports it."""
    with suppress(OSError):
        return write_folder_token(attempt)
    return None


def _take_in(parcel: AttemptArchive) -> None:
    """Unpack an archive if possible: a cell without its log is still a result."""
    with suppress(OSError, ValueError, tarfile.TarError):
        unpack(parcel)


def _start_here(session: str, variables: Mapping[str, str]) -> tuple[Any, HostInfo]:
    """Start Ray on this host and probe the host at the same time: each takes seconds.

    Raises PlatformError.
    """
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe_here)
        count = len(gpu_names())
        ray = _connect(None, session, count, variables)
        try:
            here = probing.result()
        except PlatformError:
            ray.shutdown()
            raise
    if len(here.gpus) == count:
        return ray, here
    ray.shutdown()  # NVIDIA's driver counts GPUs that torch cannot use, and not those of others
    return _connect(None, session, len(here.gpus), variables), here


def _connect(
    address: str | None,
    session: str | None = None,
    gpus: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Start Ray with these variables, or join a cluster. Raises PlatformError."""
    require_listener(address)
    os.environ.update(
        {name: os.environ.get(name, value) for name, value in RAY_ENVIRONMENT.items()}
    )
    import ray
    import ray.exceptions

    local: dict[str, Any] = {
        "num_cpus": cores_here(),
        "num_gpus": gpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": session and f"{session}/r",  # one of its own: Ray opens it to everybody
    }
    variables = variables or {}
    os.environ.update(variables)
    try:
        with shipped() if address else nullcontext(local) as how:
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **how)
    except Exception as error:  # Ray raises that itself where its processes do not come up in time
        remedy = IS_IT_RUNNING if address else "`sweep run --scheduler serial` needs no Ray"
        raise PlatformError(f"Ray does not start: {str(error).splitlines()[0]}", remedy) from error
    finally:
        for name in variables:
            os.environ.pop(name, None)
    return ray
