"""A private Ray session and its folder; ray_scheduler.py imports Ray itself.

It sets what Ray reads when it starts, removes folders of dead drivers, and ships this program to
the nodes of a cluster.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.common.errors import PlatformError
from orchestrator.common.provenance import PACKAGES, SOURCE_ROOT
from orchestrator.execution.measuring_process import import_path

IS_IT_RUNNING = "Is `ray start --head` running there?"
_IS_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
_LONGEST_BASE = (
    21  # Ray's sockets lie some 80 characters below, and the path of a socket may have 107
)
_CONNECT_S = 5.0
_SESSION_PREFIX = "sweep-ray-"
_LOCK = "lock"

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


def session_folder() -> tuple[str, int]:
    """Return a short private path for Ray's files, and the lock that we hold on it.

    Folders of dead drivers are removed. Their locks tell which those are: process ids do not, since
    each container numbers its processes by itself.
    """
    usual = tempfile.gettempdir()
    base = Path(usual if len(usual) <= _LONGEST_BASE else "/tmp")
    for left in base.glob(f"{_SESSION_PREFIX}*/{_LOCK}"):
        with suppress(OSError), left.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    while True:
        session = tempfile.mkdtemp(prefix=_SESSION_PREFIX, dir=base)
        lock_file = os.open(Path(session) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if (Path(session) / _LOCK).exists():
            return session, lock_file
        os.close(
            lock_file
        )  # another driver that begins was faster than the lock, and has taken it for dead


def start_reaper(session: str) -> subprocess.Popen[bytes]:
    """Start the reaper. It ends when its standard input is closed."""
    command = [sys.executable, "-P", "-m", "orchestrator.scheduling.ray_reaper", session]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def require_listener(address: str | None) -> None:
    """Raise PlatformError if nothing listens: Ray would look for a cluster for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise PlatformError(f"nothing answers at {address}: {error}", IS_IT_RUNNING) from error


@contextmanager
def shipped() -> Iterator[dict[str, Any]]:
    """Yield the options with which Ray ships this program to the nodes of a cluster.

    A driver that is itself a Ray job has no options: Ray accepts one working folder, the job's.
    """
    if _IS_A_JOB in os.environ:
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
