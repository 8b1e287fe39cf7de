"""Cells that need several GPUs of one host.

A Ray task that asks for n GPUs gets all of them on one node, or waits. A placement group with a
single STRICT_PACK bundle would promise the same and would have to be created and removed. Neither
prevents that other cells take each GPU that becomes free: the scheduler therefore starts no other
cell while one waits for several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.common.errors import NoGpuLeft
from tasks.spec.attempt import Attempt

_LOST = "Reset the GPU or restart its host, and run again: finished cells are not measured again"


def gpu_count(attempts: Iterable[Attempt]) -> int:
    """Return how many GPUs these attempts have in total."""
    return sum(attempt.cell.params.gpu_count for attempt in attempts)


def require_gpus(attempt: Attempt, working: int, fallen: Iterable[str]) -> None:
    """Raise NoGpuLeft if too few GPUs are left for the attempt on any host.

    Args:
        working: the largest number of working GPUs on one host.
        fallen: a description of each GPU that failed.
    """
    names, asked = list(fallen), attempt.cell.params.gpu_count
    if names and asked > working:
        what = f"no host is left with {asked} GPUs that work"
        if working <= 0:
            what = "no GPU is left that works"
        raise NoGpuLeft(f"{what}: {'; '.join(names)}", _LOST)
