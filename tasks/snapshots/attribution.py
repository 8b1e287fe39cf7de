"""Find the role and the part of the model of each allocation, and the evidence for them.

Known addresses come first: those of parameters, gradients, optimizer state and so on, noted at
moments when they were in use. The role of other allocations follows from the phase that made
them, and from whether they lived until the end of the forward pass, as in
`tasks/prediction/composition.py`. Older allocations without a known address stay unlabelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from tasks.snapshots.replay import Allocation, Record, ReplayPhase
from tasks.traces.parts import OPTIMIZER, PART_PREFIX, label_of

# Moments at which a holding was seen, in addition to the ends of phases.
AT_BEGIN, AT_END = "begin of the step", "end of the record"

_FORWARD = "forward"


class Role(StrEnum):
    """The use of an allocation."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AUTOCAST_COPIES = "autocast weight copies"
    COMMUNICATION = "communication buffers"  # of several ranks; in predictions only
    ACTIVATIONS = "activations"  # allocated by the forward pass, and alive at its end
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"  # of cuBLAS, for each thread that multiplies
    SLACK = "slack"  # size of the allocator's blocks minus the requested sizes
    UNLABELLED = "unlabelled"


class RoleEvidence(StrEnum):
    """Evidence for the role of an allocation."""

    BOOK = "book"  # its address was noted, with its role
    RULE = "rule"  # copies of weights by autocast: their size, order and lifetime
    PART = "part"  # the module that ran when it was made, and the phase
    PHASE = "phase"  # the phase only
    NONE = "none"


class Holding(NamedTuple):
    """A tensor in use: its address, its role, and its name, such as that of a parameter."""

    address: int
    role: Role
    name: str = ""


# Tensors in use by moment: AT_BEGIN, AT_END, or the phase that has just ended.
Book = Mapping[str, Sequence[Holding]]


class Labelled(NamedTuple):
    allocation: Allocation
    role: Role
    part: str
    how: RoleEvidence
    made_in: str  # the phase; empty outside of those of the last step


def attribute(record: Record, book: Book, autocast: bool = False) -> list[Labelled]:
    """Label all allocations of a record. autocast: the forward pass copies its weights."""
    held = _held(record, book)
    copies = _weight_copies(record, _owned_bytes(held)) if autocast else set[Allocation]()
    forward = _forward_phase(record)
    labelled: list[Labelled] = []
    for allocation in record.allocations:
        made_in = record.phase_at(allocation.start)
        part, role, how = "", Role.TEMPORARY, RoleEvidence.PHASE
        if allocation.part:
            part, how = label_of(allocation.part.removeprefix(PART_PREFIX)), RoleEvidence.PART
        if allocation in held:
            _, role, name = held[allocation]
            part, how = label_of(_owner(name)) if name else "", RoleEvidence.BOOK
        elif allocation in copies:
            role, how = Role.AUTOCAST_COPIES, RoleEvidence.RULE
        elif not made_in:
            role, how = Role.UNLABELLED, RoleEvidence.NONE
        elif made_in == OPTIMIZER:
            part, how = OPTIMIZER, RoleEvidence.PART
        elif forward is not None and made_in == _FORWARD and allocation.end >= forward.end:
            role = Role.ACTIVATIONS
        labelled.append(Labelled(allocation, role, part, how, made_in))
    return labelled


def _forward_phase(record: Record) -> ReplayPhase | None:
    return next((phase for phase in record.step if phase.name == _FORWARD), None)


def _owner(name: str) -> str:
    """Return the path of the module that owns a parameter."""
    return name.rpartition(".")[0]


def _held(record: Record, book: Book) -> dict[Allocation, Holding]:
    """Return the allocation at the address of each holding; the first holding counts."""
    # The allocator reuses addresses, so a holding is valid only at the moment at which it was seen.
    moments = {phase.name: phase.end - 1 for phase in record.step}
    moments |= {AT_BEGIN: record.begin - 1, AT_END: record.entries - 1}
    by_address: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in record.allocations:
        by_address[allocation.address].append(allocation)
    held: dict[Allocation, Holding] = {}
    for seen, holdings in book.items():
        for holding in holdings:
            for allocation in by_address[holding.address]:
                if seen in moments and allocation.start <= moments[seen] < allocation.end:
                    held.setdefault(allocation, holding)
    return held


def _owned_bytes(held: Mapping[Allocation, Holding]) -> dict[str, set[int]]:
    """Return the sizes of each module's own parameters, by its path."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for allocation, holding in held.items():
        if holding.role is Role.PARAMETERS:
            sizes[_owner(holding.name)].add(allocation.size_bytes)
    return sizes


def _weight_copies(record: Record, owned_bytes: Mapping[str, set[int]]) -> set[Allocation]:
    """Find copies of weights in half their width, which autocast holds until the forward ends."""
    forward = _forward_phase(record)
    if forward is None:
        return set()
    made = [one for one in record.allocations if forward.start <= one.start < forward.end]
    made.sort(key=lambda allocation: allocation.start)
    stays_until = made[-1].start if made else 0
    copies: set[Allocation] = set()
    for part, run in groupby(made, key=lambda allocation: allocation.part):
        # In a module, autocast casts the input first, then the weights; the result is allocated
        # last. If the input is as large as the copy, the copy is therefore the last allocation of
        # its size, except for the result.
        *before_result, _ = run
        for parameter_bytes in owned_bytes.get(part.removeprefix(PART_PREFIX), ()):
            halves = [one for one in before_result if 2 * one.size_bytes == parameter_bytes]
            copies.update([half for half in halves if half.end > stays_until][-1:])
    return copies
