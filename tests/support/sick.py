"""Runs `sweep` on a cluster with broken hosts. Their label `sick` names the fault.

    python -m tests.support.sick run CONFIG --address ADDRESS

disk: files have at most a hundred bytes, as on a full disk. torch: the import of torch fails, because
the folder in SICK_TORCH has another module of that name. The fault begins with the host's first cell.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator

from orchestrator.execution.events import Event
from orchestrator.scheduling import ray_scheduler as schedulers
from orchestrator.scheduling import ray_task
from tasks.spec.attempt import Attempt

FOLDER, NO_TORCH = "SICK_TORCH", "libtorch_cpu.so: cannot open shared object file"
real_supervise = ray_task.supervise


def prepare_nothing(*arguments: object) -> None: ...


def supervise(attempt: Attempt, *arguments: object) -> Iterator[Event]:
    break_host()
    yield from real_supervise(attempt, *arguments)  # type: ignore[arg-type]


def break_host() -> None:
    import ray

    fault = ray.get_runtime_context().get_node_labels().get("sick")
    if fault == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    elif fault == "torch":
        os.environ["PYTHONPATH"] = f"{os.environ[FOLDER]}:{os.environ['PYTHONPATH']}"


def main() -> None:
    from orchestrator.cli.main import main as sweep

    schedulers.supervise = supervise  # type: ignore[assignment]
    schedulers.import_ahead = prepare_nothing
    sweep(sys.argv[1:], prog_name="sweep")


if __name__ == "__main__":
    # A Ray worker cannot import functions of __main__.
    from tests.support import sick

    sick.main()
