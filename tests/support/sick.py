"""Hosts of a cluster on which nothing is measured, from their first cell on: `sick`, a label of a node, says of what.

    python -m tests.support.sick run CONFIG --address ADDRESS

As of a disk that is full, no file there takes more than a hundred bytes; or torch is not to be imported: in the folder that
SICK_TORCH names there is another.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator

from orchestrator.execution import supervisor
from orchestrator.execution.events import Event
from orchestrator.scheduling import ray_scheduler as schedulers
from tasks.spec.attempt import Attempt

FOLDER, NO_TORCH = "SICK_TORCH", "libtorch_cpu.so: cannot open shared object file"
real_supervise = supervisor.supervise


def prepare_nothing(*told: object) -> None: ...


def supervise(attempt: Attempt, *told: object) -> Iterator[Event]:
    fall_sick()
    yield from real_supervise(attempt, *told)  # type: ignore[arg-type]


def fall_sick() -> None:
    import ray

    how = ray.get_runtime_context().get_node_labels().get("sick")
    if how == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    elif how == "torch":
        os.environ["PYTHONPATH"] = f"{os.environ[FOLDER]}:{os.environ['PYTHONPATH']}"


def main() -> None:
    from orchestrator.cli.main import main as sweep

    schedulers.supervise = supervise  # type: ignore[assignment]
    schedulers.prepare_slot = prepare_nothing
    sweep(sys.argv[1:], prog_name="sweep")


if __name__ == "__main__":
    from tests.support.sick import (
        main as main_of_the_module,  # by which a Ray worker can import what it is given
    )

    main_of_the_module()
