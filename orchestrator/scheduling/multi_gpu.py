"""Decides which waiting cell starts next and on which host, if cells need several GPUs of one host.

This is backfill with one reservation (EASY: Lifka, "The ANL/IBM SP scheduling system", 1995). The
first cell for which no host has enough free GPUs reserves those of the host where it can start
earliest. A later cell may start before it if that does not delay it. Nothing here uses Ray or a
clock: hosts, estimates and remaining times are arguments.

A Ray task that needs n GPUs gets all of them on one node, as the single bundle of a placement group
with STRICT_PACK does. Neither prevents that other cells take each GPU that becomes free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import NoGpuLeft
from orchestrator.hardware.gpu_catalog import matches_kind
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell

_LOST = "Reset the GPU or restart its host, and run again: finished cells are not measured again"
# Cells of one kind differ in how well they use the device: that of duration_estimate.py.
_MARGIN = 1.25
# As many waiting cells may pass the first one: to estimate them takes the driver 20 ms.
_LOOK_AHEAD = 1000

# Returns the estimated duration of a cell in seconds, or None if nothing is known about it.
Estimate = Callable[[Cell], float | None]


@dataclass(frozen=True)
class Occupied:
    """Slots that are in use. ends_in_s: when they are expected to become free; None if unknown."""

    slots: int
    ends_in_s: float | None


@dataclass(frozen=True)
class HostSlots:
    """The GPUs of one host, or the CPU cells that may run at a time.

    Args:
        slots: how many there are, without GPUs that failed.
        gpu_type: Ray's name of the GPUs; None for CPU cells.
    """

    name: str
    slots: int
    gpu_type: str | None
    running: tuple[Occupied, ...] = ()

    @property
    def free(self) -> int:
        """The number of slots that are not in use."""
        return self.slots - sum(one.slots for one in self.running)

    def suits(self, cell: Cell) -> bool:
        """Return True if the cell could run here if nothing else did."""
        if (self.gpu_type is None) != (cell.params.gpu_count == 0):
            return False
        has_kind = matches_kind(self.gpu_type or "", cell.params.gpu_kind)
        return has_kind and cell.params.slots <= self.slots


@dataclass(frozen=True)
class _Reservation:
    """Slots of a host for a cell that waits.

    Args:
        starts_in_s: when they are expected to be free; None if that is not known.
        spare: slots that will then be free beyond those.
    """

    host: str
    starts_in_s: float | None
    spare: int

    def admits(self, cell: Cell, host: HostSlots, expected_s: Estimate) -> bool:
        """Return True if the cell, started on this host now, would not delay the reserved one."""
        if host.name != self.host or cell.params.slots <= self.spare:
            return True
        seconds = expected_s(cell) if self.starts_in_s is not None else None
        # A duration that nobody knows may be any.
        if seconds is None or self.starts_in_s is None:
            return False
        return seconds * _MARGIN <= self.starts_in_s


def next_start(
    waiting: Iterable[Cell], hosts: Sequence[HostSlots], expected_s: Estimate
) -> tuple[Cell, HostSlots] | None:
    """Return the cell to start now and its host, or None if no cell may start now.

    Args:
        waiting: in the order in which they should start. A cell that no host suits reserves nothing.
    """
    if all(host.free <= 0 for host in hosts):
        return None
    reservation: _Reservation | None = None
    looked_at = 0
    for cell in waiting:
        looked_at += reservation is not None
        if looked_at > _LOOK_AHEAD:
            return None
        fitting = [host for host in hosts if cell.params.slots <= host.free and host.suits(cell)]
        if reservation is not None:
            fitting = [host for host in fitting if reservation.admits(cell, host, expected_s)]
        elif not fitting:
            reservation = _reserve(cell, hosts)
        if fitting:
            # The tightest fit leaves the most GPUs together for wider cells.
            return cell, min(fitting, key=lambda host: host.free)
    return None


def _reserve(cell: Cell, hosts: Sequence[HostSlots]) -> _Reservation | None:
    """Return the earliest reservation for a cell, or None if no host suits it."""
    found = [_reserve_on(host, cell.params.slots) for host in hosts if host.suits(cell)]
    return min(found, key=lambda one: _order(one.starts_in_s), default=None)


def _reserve_on(host: HostSlots, needed: int) -> _Reservation:
    free = host.free
    for one in sorted(host.running, key=lambda one: _order(one.ends_in_s)):
        free += one.slots
        if free >= needed and one.ends_in_s is not None:
            return _Reservation(host.name, one.ends_in_s, free - needed)
    # Any of those with unknown ends may end first, so that all that is free may be needed.
    return _Reservation(host.name, None, 0)


def _order(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


def gpu_count(attempts: Iterable[Attempt]) -> int:
    """Return how many GPUs these attempts have in total."""
    return sum(attempt.cell.params.gpu_count for attempt in attempts)


def require_gpus(cell: Cell, working: int, fallen: Iterable[str]) -> None:
    """Raise NoGpuLeft if too few GPUs are left for the cell on any host.

    Args:
        working: the largest number of working GPUs on one host.
        fallen: a description of each GPU that failed.
    """
    names, asked = list(fallen), cell.params.gpu_count
    if names and asked > working:
        what = f"no host is left with {asked} GPUs that work"
        if working <= 0:
            what = "no GPU is left that works"
        raise NoGpuLeft(f"{what}: {'; '.join(names)}", _LOST)
