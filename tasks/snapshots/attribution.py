"""Find the role and the part of the model of each allocation, and the evidence for them.

Known addresses come first: those of parameters, gradients, optimizer state and so on, noted at
moments when they were in use. The role of other allocations follows from the phase that made
them, and from whether they lived until the end of the forward pass, as in
`tasks/prediction/composition.py`. Older allocations without a known address stay unlabelled,
such as a tensor that a module hides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from tasks.snapshots.replay import Allocation, Record, ReplayPhase
from tasks.traces.parts import OPTIMIZER, label_of
from tasks.traces.timeline import PART_PREFIX

AT_BEGIN, AT_END = (
    "begin of the step",
    "end of the record",
)  # when a holding was seen, besides the ends of phases

_FORWARD = "forward"


class Role(StrEnum):
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AUTOCAST_COPIES = "autocast weight copies"
    ACTIVATIONS = "activations"  # made by the forward pass, and alive at its end
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
    """Label all allocations of a record.

    autocast: whether the forward pass makes copies of its weights in a narrower dtype.
    """
    held = _held(record, book)
    copies = _weight_copies(record, _owned_bytes(held)) if autocast else set[Allocation]()
    kept_until = next((phase.end - 1 for phase in record.step if phase.name == _FORWARD), None)
    return [
        _label(allocation, record, held, copies, kept_until) for allocation in record.allocations
    ]


def _label(
    allocation: Allocation,
    record: Record,
    held: Mapping[Allocation, Holding],
    copies: set[Allocation],
    kept_until: int | None,
) -> Labelled:
    made_in = record.phase_at(allocation.start)
    part = part_label(allocation.part)
    if allocation in held:
        _, role, name = held[allocation]
        return Labelled(
            allocation, role, label_of(_owner(name)) if name else "", RoleEvidence.BOOK, made_in
        )
    if allocation in copies:
        return Labelled(allocation, Role.AUTOCAST_COPIES, part, RoleEvidence.RULE, made_in)
    if not made_in:
        return Labelled(allocation, Role.UNLABELLED, part, RoleEvidence.NONE, made_in)
    survives = made_in == _FORWARD and kept_until is not None and allocation.end > kept_until
    role = Role.ACTIVATIONS if survives else Role.TEMPORARY
    if made_in == OPTIMIZER:
        part = OPTIMIZER
    return Labelled(
        allocation, role, part, RoleEvidence.PART if part else RoleEvidence.PHASE, made_in
    )


def part_label(part: str) -> str:
    return label_of(part.removeprefix(PART_PREFIX)) if part else ""


def _owner(name: str) -> str:
    """Return the path of the module that owns a parameter."""
    return name.rpartition(".")[0]


def _held(record: Record, book: Book) -> dict[Allocation, Holding]:
    """Return the allocation at the address of each holding; the first holding counts."""
    moments = {phase.name: phase.end - 1 for phase in record.step} | {
        AT_BEGIN: record.begin - 1,
        AT_END: record.entries - 1,
    }
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
    """Find copies of weights in half their width, which autocast holds until the forward pass ends.

    In a module, autocast casts the input first, then the weights; the result is allocated last.
    If the input is as large as the copy, the copy is therefore the last allocation of its size,
    except for the result.
    """
    forward = next((phase for phase in record.step if phase.name == _FORWARD), None)
    if forward is None:
        return set()
    made = sorted(_made_in(record, forward), key=lambda allocation: allocation.start)
    stays_until = made[-1].start if made else 0
    copies: set[Allocation] = set()
    for part, run in groupby(made, key=lambda allocation: allocation.part):
        *before_result, _ = run
        for parameter_bytes in owned_bytes.get(part.removeprefix(PART_PREFIX), ()):
            alike = [
                a
                for a in before_result
                if 2 * a.size_bytes == parameter_bytes and a.end > stays_until
            ]
            copies.update(alike[-1:])
    return copies


def _made_in(record: Record, phase: ReplayPhase) -> Iterator[Allocation]:
    return (
        allocation
        for allocation in record.allocations
        if phase.start <= allocation.start < phase.end
    )


def live_at(labelled: Iterable[Labelled], moment: int) -> list[Labelled]:
    return [one for one in labelled if one.allocation.start <= moment < one.allocation.end]
