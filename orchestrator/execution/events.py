"""Events that a supervisor reports to the scheduler about one attempt, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.execution.attempt_archive import AttemptArchive
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome


@dataclass(frozen=True)
class AttemptStarted:
    """An attempt has a slot and starts now.

    Args:
        gpu: its GPUs as in CUDA_VISIBLE_DEVICES, or empty for a cell on the CPU.
        at_s: time.monotonic() of the host that reports it. Wall clocks jump and differ by host.
        node: Ray's id of the node, or empty without Ray.
    """

    attempt: Attempt
    host: str
    gpu: str
    at_s: float
    node: str = ""


@dataclass(frozen=True)
class DeviceLost:
    """A GPU has failed during an attempt, or its host can measure nothing at all.

    Args:
        lost_outcome: the attempt as lost, so that it is repeated on another device.
        own_outcome: the attempt as it ended by itself.
        description: which device failed, and how.
        gpu: its name as in CUDA_VISIBLE_DEVICES, or empty if the whole host failed.
    """

    lost_outcome: Outcome
    own_outcome: Outcome
    description: str
    gpu: str


Event = AttemptStarted | AttemptArchive | Outcome | DeviceLost
