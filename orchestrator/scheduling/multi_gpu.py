"""Cells that have several GPUs of one host to themselves: which of these a cell has, and which cells find no such host.

A Ray task that asks for n GPUs is on one node or on none, and has all of them or waits: it needs no placement group, which for
one task would promise the same (STRICT_PACK of one bundle) and be one thing more to wait for and to remove. What neither promises
is that it does not wait for ever while others take each GPU that becomes free: the scheduler begins no other meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.common.errors import NoGpuLeft
from tasks.spec.attempt import Attempt

if TYPE_CHECKING:
    pass

_LOST = "Reset the GPU or restart its host, and run again: what is finished is kept, and not measured twice"


def gpu_count(attempts: Iterable[Attempt]) -> int:
    """How many they have, all together."""
    return sum(attempt.cell.params.gpu_count for attempt in attempts)


def require_gpus(attempt: Attempt, working: int, fallen: Iterable[str]) -> None:
    """working: how many GPUs of one host there are at most that have not fallen off. fallen: what is said of those that have.

    Raises NoGpuLeft where so many are left that the attempt can be nowhere any more.
    """
    names, asked = list(fallen), attempt.cell.params.gpu_count
    if names and asked > working:
        what = (
            "no GPU is left that works"
            if working <= 0
            else f"no host is left with {asked} GPUs that work"
        )
        raise NoGpuLeft(f"{what}: {'; '.join(names)}", _LOST)
