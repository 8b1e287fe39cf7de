"""Replay the allocator's record: lifetime and phase of each allocation, and the moment of the peak.

Sizes are requested sizes, as in the record; the allocator's blocks are larger. A moment is the
index of an event: an allocation lives from its allocating event until the event that frees it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, TypedDict

from tasks.traces.parts import PHASE_PREFIX
from tasks.traces.ranges import phase_of

BEFORE = -1  # the moment before the first event
_MOST_PHASES = 1000  # of a step; they are looked through for each allocation


class Frame(TypedDict):
    """A call in a Python stack."""

    filename: str
    line: int
    name: str


Frames = Sequence[Frame]


class Event(TypedDict, total=False):
    """An event of the record, as torch writes it. Versions of torch differ in the keys."""

    action: str
    addr: int
    size: int
    time_us: int
    user_metadata: str
    frames: Frames


class AllocatorBlock(TypedDict, total=False):
    """Memory within a segment of the allocator, at the end of the record."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: Frames


class Segment(TypedDict):
    """Memory that the allocator got from the device."""

    device: int
    blocks: Sequence[AllocatorBlock]


class Annotation(TypedDict, total=False):
    """The start or the end of a named range."""

    name: str
    stage: str
    time_us: int
    device: int


class Snapshot(TypedDict, total=False):
    """A record of `torch.cuda.memory`, with the events of each device."""

    device_traces: Sequence[Sequence[Event]]
    segments: Sequence[Segment]
    external_annotations: Sequence[Annotation]


@dataclass(frozen=True, eq=False, slots=True)
class Allocation:
    """Memory that lived from the event `start` until before the event `end`."""

    address: int
    size_bytes: int
    start: int  # `BEFORE` if it existed before the record
    end: int
    part: str  # the module that ran; empty if unknown
    frames: Frames  # Python stack, innermost first; empty if unknown


class ReplayPhase(NamedTuple):
    """A phase of the step, over the events from `start` up to before `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Record:
    """A replayed record."""

    allocations: Sequence[Allocation]
    phases: Sequence[ReplayPhase]
    times_us: Sequence[int]  # of each event
    rounding_bytes: int  # size of the blocks that are live at the end, minus their requested sizes

    @property
    def entries(self) -> int:
        return len(self.times_us)

    @cached_property
    def step(self) -> Sequence[ReplayPhase]:
        """The phases of the last step."""
        return self.phases[self._first :]

    @property
    def begin(self) -> int:
        """The event at which the last step begins: the end of the phase before it, else 0."""
        if self._first > 0:
            return self.phases[self._first - 1].end
        return 0

    @property
    def _first(self) -> int:
        """The index of the last step's first phase."""
        names = [phase.name for phase in self.phases]
        if names:
            return len(names) - 1 - names[::-1].index(names[0])
        return 0

    def phase_at(self, moment: int) -> str:
        """Return the phase that an event of the last step falls into; empty outside of them."""
        for phase in self.step:
            if phase.start <= moment < phase.end:
                return phase.name
        return ""

    def live_bytes(self) -> list[int]:
        """Return the live bytes after each event."""
        changes = [0] * (self.entries + 1)
        held = 0
        for allocation in self.allocations:
            if allocation.start == BEFORE:
                held += allocation.size_bytes
            else:
                changes[allocation.start] += allocation.size_bytes
            changes[min(allocation.end, self.entries)] -= allocation.size_bytes
        return list(accumulate(changes[: self.entries], initial=held))[1:]

    def peak(self) -> int:
        """Return the last step's first moment with the most live bytes; `BEFORE` without events."""
        live = self.live_bytes()[self.begin :]
        return self.begin + live.index(max(live)) if live else BEFORE

    def live_at(self, moment: int) -> list[Allocation]:
        """Return the allocations that live after an event."""
        return [one for one in self.allocations if one.start <= moment < one.end]

    def live_bytes_at(self, moment: int) -> int:
        """Return the size of the allocations that live after an event."""
        return sum(one.size_bytes for one in self.live_at(moment))


def replay(
    snapshot: Snapshot, device: int = 0, chosen: Mapping[str, str] = MappingProxyType({})
) -> Record:
    """Replay the record of one device. Allocations without a recorded start are older than it.

    chosen: phases by the names of annotations, for snapshots of other programs.
    """
    traces = snapshot.get("device_traces") or []
    events: Sequence[Event] = traces[device] if device < len(traces) else []
    segments = [one for one in snapshot.get("segments") or [] if one["device"] == device]
    blocks = list(_live_blocks(segments))
    # Torch 2.1 wrote no times.
    times_us = [event.get("time_us", 0) for event in events]
    record = Record(
        allocations=list(_allocations(events, blocks)),
        phases=_phases(_annotations(snapshot, device, chosen), times_us),
        times_us=times_us,
        rounding_bytes=sum(block["size"] - _requested(block) for block in blocks),
    )
    if len(record.step) > _MOST_PHASES:
        raise ValueError(f"its last step has more than {_MOST_PHASES} phases")
    return record


def _requested(block: AllocatorBlock) -> int:
    return block.get("requested_size", block["size"])  # older versions wrote no requested size


def vanished(before: Iterable[Segment], after: Iterable[Segment]) -> list[int]:
    """Return the addresses of blocks that are live in `before` and not in `after`."""
    left = {block["address"] for block in _live_blocks(after)}
    return [block["address"] for block in _live_blocks(before) if block["address"] not in left]


def _live_blocks(segments: Iterable[Segment]) -> Iterator[AllocatorBlock]:
    for segment in segments:
        for block in segment["blocks"]:
            # "active_pending_free" is still in use by another stream.
            if block["state"].startswith("active"):
                yield block


def _allocations(
    events: Sequence[Event], live_at_end: Iterable[AllocatorBlock]
) -> Iterator[Allocation]:
    begun: dict[int, tuple[int, Event]] = {}  # moment and event of allocation, by address
    for moment, event in enumerate(events):
        match event["action"]:
            case "alloc":
                begun[event["addr"]] = (moment, event)
            case "free_completed":
                # Module and stack of a free event are not those of the allocation.
                unknown: Event = {"addr": event["addr"], "size": event["size"]}
                start, made = begun.pop(event["addr"], (BEFORE, unknown))
                yield _allocation(made, start, moment)
    forever = len(events) + 1
    for block in live_at_end:
        address, frames = block["address"], block.get("frames") or ()
        if address not in begun:
            yield Allocation(address, _requested(block), BEFORE, forever, "", frames)
    for start, made in begun.values():
        yield _allocation(made, start, forever)


def _allocation(made: Event, start: int, end: int) -> Allocation:
    part = str(made.get("user_metadata") or "")
    return Allocation(made["addr"], made["size"], start, end, part, made.get("frames") or ())


def _annotations(
    snapshot: Snapshot, device: int, chosen: Mapping[str, str]
) -> Iterator[tuple[str, str, int]]:
    """Yield phase, stage and time of the annotations that begin and end phases."""
    annotations = snapshot.get("external_annotations") or []
    is_own = any(str(one["name"]).startswith(PHASE_PREFIX) for one in annotations)
    for one in annotations:
        name = str(one["name"])
        if one.get("device", device) != device or (is_own and not name.startswith(PHASE_PREFIX)):
            continue
        if phase := phase_of(name, chosen):
            yield phase, one["stage"], one["time_us"]


def _phases(
    annotations: Iterable[tuple[str, str, int]], times_us: Sequence[int]
) -> list[ReplayPhase]:
    """Return phases in the order of their starts. One without an end lasts to the last event."""
    begun: dict[str, int] = {}
    phases: list[ReplayPhase] = []
    for name, stage, time_us in annotations:
        moment = bisect_right(times_us, time_us)
        if stage == "START":
            begun[name] = moment
        elif name in begun:
            phases.append(ReplayPhase(name, begun.pop(name), moment))
    # Memory may run out within a phase, which then has no end.
    phases += [ReplayPhase(name, start, len(times_us) + 1) for name, start in begun.items()]
    return sorted(phases, key=lambda phase: phase.start)
