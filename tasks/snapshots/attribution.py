"""What each allocation is for: its role, the part of the model that it belongs to, and how that is known.

What was seen in use wins: the addresses of parameters, gradients, optimizer state and so on, written down at moments when
they were known. What nobody holds goes by the phase that made it, and by whether the forward pass kept it to its end, as in
`tasks/prediction/composition.py`. What was there before and nobody holds is unlabelled, such as a tensor that a module hides.
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
    ACTIVATIONS = "activations"  # made by the forward pass, and kept to its end
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"  # of cuBLAS, for each thread that multiplies
    SLACK = "slack"  # by how much the allocator's blocks are larger than what was asked of them
    UNLABELLED = "unlabelled"


class RoleEvidence(StrEnum):
    """What a role is known by."""

    BOOK = "book"  # somebody held it at a moment when its role was known
    RULE = "rule"  # of weights that autocast copies: their size, place and life
    PART = "part"  # what was being computed when it was made, and in which phase
    PHASE = "phase"  # that alone
    NONE = "none"


class Holding(NamedTuple):
    """Seen in use: where, as what, and under which name, such as that of a parameter."""

    address: int
    role: Role
    name: str = ""


Book = Mapping[str, Sequence[Holding]]  # by when: AT_BEGIN, AT_END, or the phase at whose end


class Labelled(NamedTuple):
    allocation: Allocation
    role: Role
    part: str
    how: RoleEvidence
    made_in: str  # the phase; empty outside of those of the last step


def attribute(record: Record, book: Book, autocast: bool = False) -> list[Labelled]:
    """All allocations of a record. autocast: whether the forward pass has copies of its weights in a narrower dtype."""
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
    kept = made_in == _FORWARD and kept_until is not None and allocation.end > kept_until
    role = Role.ACTIVATIONS if kept else Role.TEMPORARY
    if made_in == OPTIMIZER:
        part = OPTIMIZER
    return Labelled(
        allocation, role, part, RoleEvidence.PART if part else RoleEvidence.PHASE, made_in
    )


def part_label(part: str) -> str:
    return label_of(part.removeprefix(PART_PREFIX)) if part else ""


def _owner(name: str) -> str:
    """The module that a parameter is of."""
    return name.rpartition(".")[0]


def _held(record: Record, book: Book) -> dict[Allocation, Holding]:
    """What lived at the address of a holding when that was seen. Of several holdings the first counts."""
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
    """The sizes of each module's own parameters, by its path."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for allocation, holding in held.items():
        if holding.role is Role.PARAMETERS:
            sizes[_owner(holding.name)].add(allocation.size_bytes)
    return sizes


def _weight_copies(record: Record, owned_bytes: Mapping[str, set[int]]) -> set[Allocation]:
    """Copies of weights in half their width, which autocast keeps until the forward pass ends.

    Within a part it casts its input first, then its weights, and what is allocated last is its result: where an input or the
    result is as large as the copy, the copy is the last of that size but for the result.
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
