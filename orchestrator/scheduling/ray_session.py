"""Ray as a driver uses it: a private session with a folder for its files, or a running cluster.

It sets what Ray reads when it starts, removes folders of dead drivers, and ships this program to
the nodes of a cluster.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.common.errors import LIMIT_REMEDIES, PlatformError
from orchestrator.common.files import try_lock
from orchestrator.common.limits import require_threads
from orchestrator.common.provenance import PACKAGES, SOURCE_ROOT
from orchestrator.execution.fork_client import ForkServer
from orchestrator.execution.host_probe import probe_here
from orchestrator.execution.measurement import FORK_SERVERS, Slot, begin_import, cores_near
from orchestrator.execution.program import import_path
from orchestrator.hardware.host import HostInfo, cores_here
from orchestrator.hardware.nvml import gpu_names, gpu_uuids
from orchestrator.scheduling.ray_reaper import MARK, RAY_FOLDER
from orchestrator.scheduling.ray_watch import RayWatch
from tasks.spec.attempt import Attempt
from tasks.spec.messages import error_text

_IS_IT_RUNNING = "Is `ray start --head` running there?"
_IS_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
# Ray's sockets lie some 80 characters below, and the path of a socket may have 107.
_LONGEST_BASE = 21
_CONNECT_S = 5.0
_SHUTDOWN_S = 20.0  # for Ray to end its processes; it needs seconds
_SESSION_PREFIX = "sweep-ray-"
_LOCK = "lock"
_THREADS = 150  # that Ray's processes have together on a host with two cores
# Enough for events and archives of attempts. Ray takes 30 % of the memory by default.
_OBJECT_STORE_BYTES = 100 * 1024**2

# Each undoes something that disturbs a measurement or opens a port to the network.
_RAY_ENVIRONMENT = {
    # At the default of nice 15, a step next to two busy processes took 15.8 ms, at 0 0.9 ms.
    "RAY_worker_niceness": "0",
    # Ray's memory monitor kills younger neighbours together with the process that grows.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    # A stopped worker dies after this instead of 5 s.
    "RAY_kill_worker_timeout_milliseconds": "2000",
    # With it, Ray keeps 127.0.0.1 as its address on Linux too, and listens on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

# Processes of a private Ray that nothing here uses: the server of the dashboard, which reports the
# usage even without one, the monitor of the autoscaler, and the one that copies logs. They take half
# of the time in which Ray starts, and longer to end.
_UNUSED_PROCESSES = ("start_api_server", "start_monitor", "start_log_monitor")


class RaySession:
    """A connection to Ray that ends, together with a private Ray, when it is closed.

    Args:
        address: a running cluster, or None for a private Ray on this host.
        cpu_cells: how many CPU cells may run at the same time.
        example: an attempt like those to come; this host prepares for it while Ray starts.

    Attributes:
        ray: the module `ray`, connected.
        host: this host, or None on a cluster.
        watch: the watch of a private Ray's processes, or None on a cluster.
    """

    ray: ModuleType
    host: HostInfo | None = None
    watch: RayWatch | None = None

    def __init__(self, address: str | None, cpu_cells: int, example: Attempt | None) -> None:
        self._folder = ""
        with ExitStack() as helpers:
            if address:
                self.ray = _connect(address)
            else:
                self._start_private(helpers, cpu_cells, example)
            self._helpers = helpers.pop_all()

    def _start_private(self, helpers: ExitStack, cpu_cells: int, example: Attempt | None) -> None:
        folder, lock = session_folder()
        helpers.callback(os.close, lock)
        self._folder = folder
        reaper = _start_reaper(folder)
        helpers.callback(reaper.communicate)  # closes its standard input and waits
        helpers.callback(FORK_SERVERS.close)
        server = _first_fork_server(example, cpu_cells) if example is not None else None
        self.ray, self.watch, self.host = _start_here(folder, server)
        if reaper.stdin is not None:
            with suppress(BrokenPipeError):
                reaper.stdin.write(b"Ray is up\n")
                reaper.stdin.flush()

    def close(self) -> None:
        """Disconnect, and end everything that a private Ray has started."""
        if self.watch is not None:
            self.watch.stop()
            if self.watch.died:
                # Ray would wait for processes that cannot end in good order without the dead one.
                self._helpers.close()
        # Ray would wait for ever for a process that hangs, such as a raylet that is stopped.
        killing = threading.Timer(_SHUTDOWN_S, self._helpers.close)
        killing.start()
        self.ray.shutdown()
        killing.cancel()
        killing.join()
        self._helpers.close()
        if self._folder:
            # After a death Ray's shutdown creates its folder again.
            shutil.rmtree(self._folder, ignore_errors=True)

    def require_alive(self) -> None:
        """Raise NoNodeLeft if a process of a private Ray has died."""
        if self.watch is not None:
            self.watch.require_alive()


def session_folder() -> tuple[str, int]:
    """Return a short private path for Ray's files, and the lock that we hold on it.

    Folders of dead drivers are removed.
    """
    usual = tempfile.gettempdir()
    base = Path(usual if len(usual) <= _LONGEST_BASE else "/tmp")
    # Process ids do not identify dead drivers: each container numbers its processes by itself.
    for left in base.glob(f"{_SESSION_PREFIX}*/{_LOCK}"):
        with suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    while True:
        session = tempfile.mkdtemp(prefix=_SESSION_PREFIX, dir=base)
        lock_file = os.open(Path(session) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try_lock(lock_file, fcntl.LOCK_EX, session)
        if (Path(session) / _LOCK).exists():
            return session, lock_file
        # Another driver took the lock first and removed the folder as a dead driver's.
        os.close(lock_file)


def _start_reaper(session: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "orchestrator.scheduling.ray_reaper", session]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _first_fork_server(example: Attempt, cpu_cells: int) -> ForkServer | None:
    """Start to import torch on this host before it is known where cells will run.

    Expected is an equal share of the cores for each GPU, or for each concurrent CPU cell. A slot
    with other variables starts another fork server.
    """
    params, uuids = example.cell.params, gpu_uuids()
    if params.device == "cuda" and not uuids:
        return None
    names = list(uuids)[: params.gpu_count]
    cpus = cores_here() * len(names) // len(uuids) if names else cores_here() // cpu_cells
    return begin_import(example, Slot(max(1, cpus), cores_near(",".join(names), uuids)))


def _start_here(session: str, server: ForkServer | None) -> tuple[ModuleType, RayWatch, HostInfo]:
    """Start Ray on this host and probe the host at the same time: each takes seconds.

    Raises PlatformError.
    """
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe_here, server)
        gpus = len(gpu_names())
        ray, watch = _start_private_ray(session, gpus)
        try:
            host = probing.result()
        except PlatformError:
            watch.stop()
            ray.shutdown()
            raise
    if len(host.gpus) == gpus:
        return ray, watch, host
    # NVIDIA's driver counts GPUs that torch cannot use, and no GPUs of other makers.
    watch.stop()
    ray.shutdown()
    return *_start_private_ray(session, len(host.gpus)), host


def _start_private_ray(session: str, gpus: int) -> tuple[ModuleType, RayWatch]:
    """Start Ray with the mark of its session. Raises PlatformError."""
    largest_file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file != resource.RLIM_INFINITY and largest_file < _OBJECT_STORE_BYTES:
        raise PlatformError(
            f"files may have {largest_file:,} bytes here, and one of Ray's needs more",
            f"{LIMIT_REMEDIES[errno.EFBIG]}, or measure with --scheduler serial",
        )
    try:
        require_threads(_THREADS)
    except OSError as error:
        message = f"Ray needs more than {_THREADS} threads: {error.strerror}"
        raise PlatformError(message, LIMIT_REMEDIES[errno.EAGAIN]) from error
    watch = RayWatch()
    _keep_token_private()
    os.environ[MARK] = session
    # With `error`, the first warning of a library would end one of Ray's processes.
    warnings = os.environ.pop("PYTHONWARNINGS", None)
    try:
        with _only_used_processes():
            ray = _init_ray(
                "local",
                "`sweep run --scheduler serial` needs no Ray",
                num_cpus=cores_here(),
                num_gpus=gpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                # Below the session's folder, which is ours alone: Ray opens its own to everybody.
                _temp_dir=f"{session}/{RAY_FOLDER}",
            )
        return ray, watch
    except BaseException:
        watch.stop()
        raise
    finally:
        del os.environ[MARK]
        if warnings is not None:
            os.environ["PYTHONWARNINGS"] = warnings


@contextmanager
def _only_used_processes() -> Iterator[None]:
    """Start a private Ray without `_UNUSED_PROCESSES`. A Ray that does not know them starts all.

    Ray has no public option: `include_dashboard=False` starts the API server nevertheless.
    """
    _set_variables()
    node: Any = None
    with suppress(ImportError, AttributeError):
        node = import_module("ray._private.node").Node
    started = {name: getattr(node, name) for name in _UNUSED_PROCESSES if hasattr(node, name)}
    for name in started:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in started.items():
            setattr(node, name, method)


def _set_variables() -> None:
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # Ray reads them when it is imported


def _keep_token_private() -> None:
    """Have nobody else read the token with which programs connect to this user's Ray.

    Ray would write it with mode 0644, and who has it runs programs as this user.
    """
    with suppress(OSError, RuntimeError):  # a home that is missing or read-only
        token = Path.home() / ".ray" / "auth_token"
        token.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            token.chmod(0o600)
            return
        with open(file, "w") as stream:
            stream.write(secrets.token_hex(32))


def _connect(address: str) -> ModuleType:
    """Join a cluster. Raises PlatformError."""
    _require_listener(address)
    with _shipped() as options:
        return _init_ray(address, _IS_IT_RUNNING, **options)


def _init_ray(address: str, remedy: str, **options: Any) -> ModuleType:
    _set_variables()
    import ray
    import ray.exceptions

    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # the class that Ray raises if its processes take too long
        raise PlatformError(
            f"Ray does not start: {error_text(error).splitlines()[0]}", remedy
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """Raise PlatformError if nothing listens: Ray would look for a cluster for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host:
        return
    try:
        # IPv6 addresses are in brackets.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise PlatformError(
            f"nothing answers at {address}: {error_text(error)}", _IS_IT_RUNNING
        ) from error


@contextmanager
def _shipped() -> Iterator[dict[str, dict[str, str]]]:
    """Yield the options with which Ray ships this program to the nodes of a cluster."""
    if _IS_A_JOB in os.environ:
        # Ray accepts one working folder, which is the job's.
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="sweep-code-") as folder:
        for package in PACKAGES:
            shutil.copytree(
                SOURCE_ROOT / package,
                Path(folder) / package,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        yield {"runtime_env": {"working_dir": folder}}
