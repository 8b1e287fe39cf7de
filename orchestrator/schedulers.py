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
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from orchestrator.attempt import execute, lost, prepare
from orchestrator.child import STARTER, import_path
from orchestrator.cores import cores_for
from orchestrator.errors import EnvironmentError, GpusLost
from orchestrator.nvml import Watch, gpu_names
from orchestrator.plan import RETRIED
from orchestrator.probe import probe_here
from orchestrator.reaper import MARK
from tasks.harness.records import Attempt, Outcome, Status

_BACKSTOP_S = 60.0  # beyond its own time-out, after which an attempt's supervisor is given up
_POLL_S = 0.5
_MOST_COMPILERS = 32  # threads, as torch itself would have it: told, since a prepared parent may use more cores than its children
_OBJECT_STORE_BYTES = 100 * 1024**2
_LONGEST_BASE = 24  # Ray's sockets lie some 80 characters below, and the path of a socket may have 107
_CONNECT_S = 5.0
_IS_IT_RUNNING = "Is `ray start --head` running there?"
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


@dataclass(frozen=True)
class Started:
    """An attempt has begun: where, and when by time.monotonic() of this host. A wall clock jumps, and each host has its own."""

    attempt: Attempt
    host: str
    gpu: str
    at_s: float


@dataclass(frozen=True)
class Fallen:
    """The GPU has fallen off under an attempt. gpu: which, and what is wrong with it."""

    outcome: Outcome
    gpu: str


OnStart = Callable[[Started], None]
Event = Started | Outcome | Fallen  # what a supervisor tells the driver


class Scheduler(Protocol):
    def environments(self) -> list[Mapping[str, Any]]:
        """What each host that could measure is, as `probe` tells it."""
        ...

    def places(self, device: str) -> int:
        """How many cells of a device it measures at once."""
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
        self._fallen: dict[str, str] = {}  # what is said of each, by its name

    def environments(self) -> list[Mapping[str, Any]]:
        here = probe_here()
        self._gpus = visible_gpus(here)
        return [here]

    def places(self, device: str) -> int:
        return 1

    def prepare(self, attempt: Attempt) -> None:
        """Not before the first: it would have to be waited for."""

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        for attempt in attempts:
            _require_gpu(attempt, max(1, len(self._gpus)), self._fallen.values())
            on_start(Started(attempt, "here", "", time.monotonic()))
            gpu = next((name for name in self._gpus if name not in self._fallen), "")
            event = _measure(_only_on(gpu, attempt) if self._fallen else attempt, _cores(), None, gpu, self._gpus)
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
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        asked = [probe.options(label_selector={"ray.io/node-id": node}).remote() for node in nodes]
        found = [environment for one in asked if (environment := self._answer(one)) is not None]
        if not found:
            raise EnvironmentError("no node of the cluster answers", "See `ray status`")
        return found

    def _answer(self, asked: Any) -> Mapping[str, Any] | None:
        """None of a node that is gone: for a while Ray counts it among the living."""
        missing = self._ray.exceptions
        try:
            answer: Mapping[str, Any] = self._ray.get(asked)
            return answer
        except (missing.TaskUnschedulableError, missing.NodeDiedError, missing.WorkerCrashedError):
            return None

    def places(self, device: str) -> int:
        if device != "cuda":
            return self._cpu_cells
        return max(1, self._all_gpus() - len(self._fallen))

    def prepare(self, attempt: Attempt) -> None:
        places = self.places(attempt.cell.params.device)
        self._preparing = [self._on_a_place(_prepare, attempt) for _ in range(places)]

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
        return self._on_a_place(_supervise, attempt, num_returns="streaming")

    def _on_a_place(self, task: Callable[..., Any], attempt: Attempt, **options: Any) -> Any:
        gpus = 1 if attempt.cell.params.device == "cuda" else 0
        cpus = self._cores_per_gpu() if gpus else self._cores_per_cpu_cell()
        # max_calls=0: the worker only supervises, so it may serve the next cell; max_retries=0: Ray would start a
        # crashing cell four times in silence. Both hold only in the decorator.
        decorate = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=0, max_retries=0, **options)
        return decorate(task).remote(attempt, cpus, self._gpus)

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
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [{"CPU": node.get("CPU", 0.0), "GPU": node.get("GPU", 0.0)} for node in alive]

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


def _supervise(attempt: Attempt, cpus: int, gpus: Mapping[str, Mapping[str, str]]) -> Iterator[Event]:
    """The Ray task: says that it has begun, then measures in a child process."""
    gpu, host = _gpu_of(attempt), socket.gethostname()
    yield Started(attempt, host, gpu, time.monotonic())
    here = gpus.get(host, {})
    event = _measure(attempt, cpus, _cores_of(gpu, here), gpu, here)
    yield event
    if isinstance(event, Fallen):
        threading.Event().wait()  # for the driver's end: Ray takes this GPU for one that is at work


def _prepare(attempt: Attempt, cpus: int, gpus: Mapping[str, Mapping[str, str]]) -> None:
    """The Ray task in whose process the next attempts are likely to be supervised."""
    here = gpus.get(socket.gethostname(), {})
    prepare(*_placed(attempt, cpus, _cores_of(_gpu_of(attempt), here)))


def _gpu_of(attempt: Attempt) -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "") if attempt.cell.params.device == "cuda" else ""


def _cores_of(gpu: str, gpus: Mapping[str, str]) -> tuple[int, ...] | None:
    return cores_for(gpu, gpus) if gpu else None


def _measure(attempt: Attempt, count: int, cores: tuple[int, ...] | None, gpu: str, gpus: Mapping[str, str]) -> Outcome | Fallen:
    """gpu: the one that the cell comes to, if it is for one. Asks after it where the cell ends badly."""
    if attempt.cell.params.device != "cuda" or gpu not in gpus:
        return execute_or_lose(attempt, count, cores)
    watch = Watch(gpus[gpu])
    outcome = execute_or_lose(attempt, count, cores)
    last_word = str(outcome.evidence.get("message", ""))
    fault = watch.fault(last_word) if outcome.status in RETRIED else None
    if fault is None:
        return outcome
    name = f"GPU {gpu} ({gpus[gpu]}) of {socket.gethostname()}: {fault}"
    said = {"cell_ended_as": str(outcome.status), "cell_said": last_word}
    evidence = {**outcome.evidence, **said, "message": f"its GPU went away: {name}", "nvml": fault, "gpu_uuid": gpus[gpu]}
    return Fallen(replace(outcome, status=Status.LOST, evidence=evidence), name)


def _only_on(gpu: str, attempt: Attempt) -> Attempt:
    """The attempt at a place where it sees no other GPU."""
    return replace(attempt, settings=replace(attempt.settings, env={**attempt.settings.env, "CUDA_VISIBLE_DEVICES": gpu}))


def _require_gpu(attempt: Attempt, places: int, fallen: Iterable[str]) -> None:
    """Raises GpusLost where the attempt is for a GPU and all have fallen off."""
    names = list(fallen)
    if attempt.cell.params.device == "cuda" and len(names) >= places:
        remedy = "Reset the GPU or restart its host, and run again: what is finished is kept, and not measured twice"
        raise GpusLost(f"no GPU is left that works: {'; '.join(names)}", remedy)


def visible_gpus(environment: Mapping[str, Any]) -> dict[str, str]:
    """The UUIDs of a probed host's GPUs, by the names that they have in CUDA_VISIBLE_DEVICES."""
    gpus, named = environment.get("gpus", []), environment.get("visible_devices")
    names = [name.strip() for name in named.split(",")] if named else map(str, range(len(gpus)))
    return {name: gpu["uuid"] for name, gpu in zip(names, gpus, strict=False)}


def execute_or_lose(attempt: Attempt, count: int, cores: tuple[int, ...] | None = None) -> Outcome:
    """Measures a cell on so many cores, or on these. A disk that takes no attempt is not the cell's fault."""
    began = time.monotonic()
    attempt, variables = _placed(attempt, count, cores)
    try:
        return execute(attempt, variables)
    except OSError as error:
        return lost(attempt, f"its folder cannot be written: {error}", time.monotonic() - began)


def _placed(attempt: Attempt, count: int, cores: tuple[int, ...] | None) -> tuple[Attempt, dict[str, str]]:
    """The attempt on these cores, or on so many, and what its child's environment says of them."""
    if not cores:
        return attempt, {"OMP_NUM_THREADS": str(count)}
    variables = {"OMP_NUM_THREADS": str(len(cores)), "TORCHINDUCTOR_COMPILE_THREADS": str(min(len(cores), _MOST_COMPILERS))}
    return replace(attempt, settings=replace(attempt.settings, cores=cores)), variables


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
        "num_cpus": _cores(),
        "num_gpus": gpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": session,
    }
    if session:
        os.environ[MARK] = session
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else local))
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        remedy = _IS_IT_RUNNING if address else "`sweep run --scheduler serial` needs no Ray"
        raise EnvironmentError(f"Ray does not start: {str(error).splitlines()[0]}", remedy) from error
    finally:
        os.environ.pop(MARK, None)
    return ray


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


def _cores() -> int:
    return len(psutil.Process().cpu_affinity() or []) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1
