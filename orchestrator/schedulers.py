"""Where attempts run. One verb: `run(attempts)` takes the next attempt when there is room and yields outcomes as they come.

`SerialScheduler` runs them one after another in this process, for tests and for debugging; `RayScheduler` on the GPUs
of this machine or of a cluster. Both go through `attempt.execute`. The only file that imports ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from orchestrator.attempt import lost
from orchestrator.child import STARTER, import_path
from orchestrator.errors import EnvironmentError, GpusLost
from orchestrator.nvml import gpu_names
from orchestrator.parcel import Parcel, leave_mark, unpack
from orchestrator.probe import probe_here
from orchestrator.reaper import MARK
from orchestrator.report.gpus import is_kind
from orchestrator.supervisor import Event, Fallen, Started, cores_here, measure, only_on, prepare_place, supervise
from tasks.harness.records import Attempt, Outcome

_BACKSTOP_S = 60.0  # beyond its own time-out, after which an attempt's supervisor is given up
_POLL_S = 0.5
_HERE = Path(__file__).resolve().parent.parent
_PACKAGES = ("model", "tasks", "orchestrator")
_IS_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
_OBJECT_STORE_BYTES = 100 * 1024**2
_LONGEST_BASE = 24  # Ray's sockets lie some 80 characters below, and the path of a socket may have 107
_CONNECT_S = 5.0
_IS_IT_RUNNING = "Is `ray start --head` running there?"
_GPU_TYPE = "ray.io/accelerator-type"  # a label that Ray gives each node, by its first GPU
_SESSION_PREFIX = "sweep-ray-"

# Read by Ray when it starts. Each undoes something that disturbs a measurement (workers at nice 15, a monitor that
# kills innocent neighbours, metrics and usage reports) or opens a port to the network.
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_kill_worker_timeout_milliseconds": "2000",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


OnStart = Callable[[Started], None]


class Scheduler(Protocol):
    def environments(self) -> list[Mapping[str, Any]]:
        """What each host that could measure is, as `probe` tells it."""
        ...

    def places(self, device: str, kind: str | None = None) -> int:
        """How many cells of a device, or of a kind of GPU, it measures at once; none of a kind that is not there."""
        ...

    def prepare(self, attempt: Attempt) -> None:
        """Begins to make every place ready for attempts like this one, and does not wait for it."""
        ...

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        """Raises GpusLost when an attempt is for a GPU and the last one has fallen off."""
        ...

    def close(self) -> None: ...


class SerialScheduler:
    """One attempt at a time, as a child of this process, on the first GPU that has not fallen off."""

    def __init__(self) -> None:
        self._gpus: dict[str, str] = {}
        self._kinds: list[str] = []  # of them, once the environment is known
        self._fallen: dict[str, str] = {}  # what is said of each, by its name

    def environments(self) -> list[Mapping[str, Any]]:
        here = probe_here()
        self._gpus, self._kinds = visible_gpus(here), [gpu["name"] for gpu in here["gpus"]]
        return [here]

    def places(self, device: str, kind: str | None = None) -> int:
        return int(kind is None or any(is_kind(name, kind) for name in self._kinds))

    def prepare(self, attempt: Attempt) -> None:
        """Not before the first: it would have to be waited for."""

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        for attempt in attempts:
            _require_gpu(attempt, max(1, len(self._gpus)), self._fallen.values())
            on_start(Started(attempt, "here", "", time.monotonic()))
            gpu = next((name for name in self._gpus if name not in self._fallen), "")
            event = measure(only_on(gpu, attempt) if self._fallen else attempt, cores_here(), None, gpu, self._gpus)
            if isinstance(event, Fallen):
                self._fallen[gpu] = event.gpu
            yield event.outcome if isinstance(event, Fallen) else event

    def close(self) -> None:
        STARTER.close()


class RayScheduler:
    """A Ray task for each attempt, with a GPU of its own, or its share of the cores where the cell runs on the CPU.

    address: of a cluster that is running, or None for a private one on this machine, gone with this process.
    cpu_cells: how many CPU cells may run at once.
    """

    def __init__(self, address: str | None = None, cpu_cells: int = 1) -> None:
        self._cpu_cells = cpu_cells
        self._types: set[str] = set()  # of GPU, of all nodes that there have been
        self._gpus: dict[str, dict[str, str]] = {}  # of each host, once its environment is known: UUID by visible name
        self._fallen: dict[Any, str] = {}  # by the task that holds it until the end, so that no other cell comes to it
        self._session = None if address else _session_folder()
        self._reaper = _start_reaper(self._session) if self._session else None
        self._preparing: list[Any] = []
        self._local: Mapping[str, Any] | None = None
        if address:
            self._ray = _connect(address, self._session, 0)
        else:
            self._ray, self._local = _start_here(self._session)

    def environments(self) -> list[Mapping[str, Any]]:
        environments = [self._local] if self._local is not None else self._probe_nodes()
        for here in environments:
            self._gpus.setdefault(str(here["host"]), {}).update(visible_gpus(here))
        return environments

    def _probe_nodes(self) -> list[Mapping[str, Any]]:
        probe = self._ray.remote(num_cpus=0, max_retries=0)(probe_here)
        nodes = [node["NodeID"] for node in self._alive()]
        asked = [probe.options(label_selector={"ray.io/node-id": node}).remote() for node in nodes]
        found = [environment for one in asked if (environment := self._answer(one)) is not None]
        if not found:
            raise EnvironmentError("no node of the cluster answers", "See `ray status`")
        return found

    def _answer(self, asked: Any) -> Mapping[str, Any] | None:
        """None of a node that is gone: for a while Ray counts it among the living. Raises EnvironmentError."""
        missing = self._ray.exceptions
        try:
            answer: Mapping[str, Any] = self._ray.get(asked)
            return answer
        except (missing.TaskUnschedulableError, missing.NodeDiedError, missing.WorkerCrashedError):
            return None
        except missing.RuntimeEnvSetupError as error:
            raise EnvironmentError(
                f"a node does not get this program: {str(error).splitlines()[0]}", "See `ray status`"
            ) from error

    def places(self, device: str, kind: str | None = None) -> int:
        if kind is not None:
            return int(sum(node["Resources"].get("GPU", 0) for node in self._alive() if is_kind(_gpu_type(node), kind)))
        if device != "cuda":
            return self._cpu_cells
        return max(1, self._all_gpus() - len(self._fallen))

    def prepare(self, attempt: Attempt) -> None:
        places = self.places(attempt.cell.params.device, attempt.cell.params.gpu_kind)
        self._preparing = [self._on_a_place(prepare_place, attempt) for _ in range(places)]

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        ray, queue = self._ray, iter(attempts)
        running: dict[Any, Started] = {}
        try:
            while True:
                # Taken only when there is room, so that a queue with a deadline decides as late as it can.
                while self._has_room(running) and (attempt := next(queue, None)):
                    self._require_gpu(attempt)
                    running[self._submit(attempt)] = Started(attempt, "", "", time.monotonic())
                if not running:
                    return
                ready, _ = ray.wait(list(running), timeout=_POLL_S, fetch_local=False)
                for stream in ready or list(running):
                    event = self._next_event(stream, running[stream], is_ready=bool(ready))
                    if isinstance(event, Started):
                        running[stream] = replace(event, at_s=time.monotonic())
                        on_start(running[stream])
                    elif isinstance(event, Parcel):
                        _take_in(event)
                    elif isinstance(event, Fallen):
                        del running[stream]
                        self._fallen[stream] = event.gpu
                        yield event.outcome
                    elif event is not None:
                        del running[stream]
                        yield event
        finally:
            self._end(running)

    def _end(self, streams: Iterable[Any]) -> None:
        for stream in streams:
            with suppress(Exception):
                self._ray.cancel(stream, force=True)

    def close(self) -> None:
        self._end(self._fallen)
        self._ray.shutdown()
        if self._reaper:
            self._reaper.communicate()  # ends its lifeline

    def _submit(self, attempt: Attempt) -> Any:
        return self._on_a_place(supervise, attempt, None if self._local else _marked(attempt), num_returns="streaming")

    def _on_a_place(self, task: Callable[..., Any], attempt: Attempt, *more: Any, **options: Any) -> Any:
        gpus = 1 if attempt.cell.params.device == "cuda" else 0
        cpus = self._cores_per_gpu() if gpus else self._cores_per_cpu_cell()
        # max_calls=0: the worker only supervises, so it may serve the next cell; max_retries=0: Ray would start a
        # crashing cell four times in silence. Both hold only in the decorator.
        one = {"num_cpus": cpus, "num_gpus": gpus, **self._of_kind(attempt.cell.params.gpu_kind)}
        reserved = self._whole_host(attempt.settings.alone_on) or one
        decorate = self._ray.remote(**reserved, max_calls=0, max_retries=0, **options)
        return decorate(task).remote(attempt, cpus, self._gpus, *more)

    def _whole_host(self, host: str | None) -> dict[str, Any]:
        """All that a node of this host has and that still works; nothing where there is none, or none any more."""
        for node in self._alive() if host else ():
            if node["NodeManagerHostname"] == host:
                has = node["Resources"]
                here = {"ray.io/node-id": node["NodeID"]}
                gpus = max(0, has.get("GPU", 0) - len(self._fallen))
                return {"num_cpus": has.get("CPU", 0), "num_gpus": gpus, "label_selector": here}
        return {}

    def _of_kind(self, kind: str | None) -> dict[str, Any]:
        """What holds a cell to nodes with such GPUs, those included that will join."""
        if kind is None:
            return {}
        self._types |= {_gpu_type(node) for node in self._alive()}
        wanted = sorted(name for name in self._types if is_kind(name, kind)) or [kind.replace(" ", "-")]
        return {"label_selector": {_GPU_TYPE: f"in({','.join(wanted)})"}}

    def _cores_per_gpu(self) -> int:
        """What every node with GPUs can give to each of them: Ray would wait for ever for what none has."""
        return max(1, min((int(n["CPU"] // n["GPU"]) for n in self._nodes() if n["GPU"] >= 1), default=1))

    def _cores_per_cpu_cell(self) -> int:
        return max(1, min((int(n["CPU"]) for n in self._nodes() if n["CPU"] >= 1), default=1) // self._cpu_cells)

    def _require_gpu(self, attempt: Attempt) -> None:
        _require_gpu(attempt, max(1, self._all_gpus()), self._fallen.values())

    def _all_gpus(self) -> int:
        return int(self._ray.cluster_resources().get("GPU", 0))

    def _nodes(self) -> list[dict[str, float]]:
        return [{name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")} for node in self._alive()]

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _has_room(self, running: Mapping[Any, Started]) -> bool:
        """Ray would queue what exceeds its resources; the count here decides how far ahead we look."""
        devices = {started.attempt.cell.params.device for started in running.values()}
        return len(running) < (self.places("cuda") if devices == {"cuda"} else self._cpu_cells if devices else 1)

    def _next_event(self, stream: Any, started: Started, is_ready: bool) -> Event | None:
        if not is_ready:
            return self._give_up_hung(stream, started)
        try:
            event: Event = self._ray.get(next(stream))
            return event
        except (self._ray.exceptions.RayError, StopIteration) as error:
            reason = f"its supervisor went away: {type(error).__name__}: {error}"
            return lost(started.attempt, reason, time.monotonic() - started.at_s)

    def _give_up_hung(self, stream: Any, started: Started) -> Outcome | None:
        """A supervisor that is itself stopped, or on a node that no longer answers."""
        limit = started.attempt.settings.timeout_s + _BACKSTOP_S
        waited = time.monotonic() - started.at_s
        if not started.host or waited < limit:
            return None
        with suppress(Exception):
            self._ray.cancel(stream, force=True)
        return lost(started.attempt, f"its supervisor did not answer for {limit:g} s", waited)


class LastingScheduler:
    """A scheduler that several runs use one after the other: it is opened once, and closed when all are done."""

    def __init__(self, open_scheduler: Callable[[], Scheduler]) -> None:
        self._open = open_scheduler
        self._scheduler: Scheduler | None = None

    def opened(self) -> LastingScheduler:
        self._scheduler = self._scheduler or self._open()
        return self

    def environments(self) -> list[Mapping[str, Any]]:
        return self._scheduler.environments() if self._scheduler else []

    def places(self, device: str, kind: str | None = None) -> int:
        return self._scheduler.places(device, kind) if self._scheduler else 1

    def prepare(self, attempt: Attempt) -> None:
        if self._scheduler is not None:
            self._scheduler.prepare(attempt)

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        return self._scheduler.run(attempts, on_start) if self._scheduler else iter(())

    def close(self) -> None:
        """Not yet."""

    def end(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()


def _require_gpu(attempt: Attempt, places: int, fallen: Iterable[str]) -> None:
    """Raises GpusLost where the attempt is for a GPU and all have fallen off."""
    names = list(fallen)
    if attempt.cell.params.device == "cuda" and len(names) >= places:
        remedy = "Reset the GPU or restart its host, and run again: what is finished is kept, and not measured twice"
        raise GpusLost(f"no GPU is left that works: {'; '.join(names)}", remedy)


def _marked(attempt: Attempt) -> str | None:
    """None where the driver cannot write: that is said when the cell is measured."""
    with suppress(OSError):
        return leave_mark(attempt)
    return None


def _take_in(parcel: Parcel) -> None:
    """What it measured comes apart from this: without its log a cell is still a result."""
    with suppress(OSError, ValueError, tarfile.TarError):
        unpack(parcel)


def _gpu_type(node: Mapping[str, Any]) -> str:
    """What Ray calls the GPUs of a node, such as H100 or GeForce-RTX-5090; empty without any."""
    return str(node["Labels"].get(_GPU_TYPE, "")) if node["Resources"].get("GPU") else ""


def visible_gpus(environment: Mapping[str, Any]) -> dict[str, str]:
    """The UUIDs of a probed host's GPUs, by the names that they have in CUDA_VISIBLE_DEVICES."""
    gpus, named = environment.get("gpus", []), environment.get("visible_devices")
    names = [name.strip() for name in named.split(",")] if named else map(str, range(len(gpus)))
    return {name: gpu["uuid"] for name, gpu in zip(names, gpus, strict=False)}


def _start_here(session: str | None) -> tuple[Any, Mapping[str, Any]]:
    """Ray on this host, and what the host is: both at once, since each takes seconds. Raises EnvironmentError."""
    with ThreadPoolExecutor(1) as beside:
        probing = beside.submit(probe_here)
        count = len(gpu_names()) or len(probing.result()["gpus"])
        ray = _connect(None, session, count)
        try:
            here = probing.result()
        except EnvironmentError:
            ray.shutdown()
            raise
    if len(here["gpus"]) == count:
        return ray, here
    ray.shutdown()  # the driver counts GPUs that torch cannot use
    return _connect(None, session, len(here["gpus"])), here


def _connect(address: str | None, session: str | None, gpus: int) -> Any:
    """Ray, started or joined. Raises EnvironmentError."""
    _require_listener(address)
    os.environ.update({name: os.environ.get(name, value) for name, value in RAY_ENVIRONMENT.items()})
    import ray
    import ray.exceptions

    local: dict[str, Any] = {
        "num_cpus": cores_here(),
        "num_gpus": gpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": session,
    }
    if session:
        os.environ[MARK] = session
    try:
        with _shipped() if address else nullcontext(local) as how:
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **how)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        remedy = _IS_IT_RUNNING if address else "`sweep run --scheduler serial` needs no Ray"
        raise EnvironmentError(f"Ray does not start: {str(error).splitlines()[0]}", remedy) from error
    finally:
        os.environ.pop(MARK, None)
    return ray


@contextmanager
def _shipped() -> Iterator[dict[str, Any]]:
    """This program for the nodes of a cluster, which then measure with the same one, whatever they have themselves.

    A driver that is itself a job of Ray's leaves that to the job's own working folder: Ray takes one of them.
    """
    if _IS_A_JOB in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="sweep-code-") as folder:
        for package in _PACKAGES:
            shutil.copytree(_HERE / package, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__"))
        yield {"runtime_env": {"working_dir": folder}}


def _start_reaper(session: str) -> subprocess.Popen[bytes]:
    """With its standard input for a lifeline."""
    command = [sys.executable, "-P", "-m", "orchestrator.reaper", session]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": import_path()}, stdin=subprocess.PIPE, start_new_session=True
    )


def _require_listener(address: str | None) -> None:
    """Ray itself would look for minutes for a cluster that is not there."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise EnvironmentError(f"nothing answers at {address}: {error}", _IS_IT_RUNNING) from error


def _session_folder() -> str:
    """A short path of our own for Ray's files; those of drivers that died are cleared away."""
    usual = tempfile.gettempdir()
    base = Path(usual if len(usual) <= _LONGEST_BASE else "/tmp")
    for left in base.glob(f"{_SESSION_PREFIX}*"):
        owner = left.name.removeprefix(_SESSION_PREFIX)
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return str(base / f"{_SESSION_PREFIX}{os.getpid()}")
