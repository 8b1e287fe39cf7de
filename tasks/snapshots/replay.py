"""Plays the allocator's record back: when each allocation lived, in which phase it was made, when most was live.

Sizes are those that were asked for, as the record has them: the allocator's blocks are larger. Moments are places in the
record, of `entries` events: an allocation lives from the event that made it up to the one that released it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tasks.traces.timeline import PHASE_PREFIX

BEFORE = -1  # the moment before the first event

Snapshot = Mapping[str, Any]
Event = Mapping[str, Any]
Frames = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Allocation:
    """What lived from the event `start` (`BEFORE`: it was there already) until before the event `end`.

    part: what was being computed, as it was named then; frames: where, innermost first. Both are empty where unknown.
    """

    address: int
    size_bytes: int
    start: int
    end: int
    part: str
    frames: Frames


class ReplayPhase(NamedTuple):
    """A phase of the step, over the events from `start` up to before `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Record:
    """A record played back. times_us: of each event. rounding_bytes: by how much the blocks that are live at its end are larger
    than what was asked of them.
    """

    allocations: Sequence[Allocation]
    phases: Sequence[ReplayPhase]
    times_us: Sequence[int]
    rounding_bytes: int

    @property
    def entries(self) -> int:
        return len(self.times_us)

    @property
    def step(self) -> Sequence[ReplayPhase]:
        """The phases of the last step."""
        return self.phases[self._first :]

    @property
    def begin(self) -> int:
        """The event at which the last step begins: where the phase before it ended, if there is one on record."""
        return self.phases[self._first - 1].end if self._first > 0 else 0

    @property
    def _first(self) -> int:
        """The place of the last step's first phase."""
        return max(
            (place for place, phase in enumerate(self.phases) if phase.name == self.phases[0].name),
            default=0,
        )

    def phase_at(self, moment: int) -> str:
        """The phase that an event of the last step falls into; empty outside of them."""
        return next((phase.name for phase in self.step if phase.start <= moment < phase.end), "")

    def live_bytes(self) -> list[int]:
        """After each event of the record."""
        changes = [0] * (self.entries + 1)
        held = 0
        for allocation in self.allocations:
            if allocation.start == BEFORE:
                held += allocation.size_bytes
            else:
                changes[allocation.start] += allocation.size_bytes
            changes[min(allocation.end, self.entries)] -= allocation.size_bytes
        return list(_running_sum(held, changes[: self.entries]))

    def peak(self) -> int:
        """The moment of the last step at which most is live, the first of several; `BEFORE` in an empty record."""
        live = self.live_bytes()[self.begin :]
        return self.begin + live.index(max(live)) if live else BEFORE

    def live_at(self, moment: int) -> list[Allocation]:
        return [
            allocation
            for allocation in self.allocations
            if allocation.start <= moment < allocation.end
        ]


def _running_sum(start: int, changes: Iterable[int]) -> Iterator[int]:
    total = start
    for change in changes:
        total += change
        yield total


def replay(snapshot: Snapshot, device: int = 0) -> Record:
    """Of one device. Whatever the record does not tell the beginning of was there before it."""
    traces = snapshot.get("device_traces") or []
    events: Sequence[Event] = traces[device] if device < len(traces) else []
    blocks = list(
        _live_blocks(
            segment for segment in snapshot.get("segments") or [] if segment["device"] == device
        )
    )
    times_us = [event["time_us"] for event in events]
    return Record(
        allocations=list(_allocations(events, blocks)),
        phases=list(_phases(snapshot.get("external_annotations") or [], times_us, device)),
        times_us=times_us,
        rounding_bytes=sum(block["size"] - block["requested_size"] for block in blocks),
    )


def vanished(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[int]:
    """The addresses of what was live in some segments and is so no more."""
    left = {block["address"] for block in _live_blocks(after)}
    return [block["address"] for block in _live_blocks(before) if block["address"] not in left]


def _live_blocks(segments: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for segment in segments:
        yield from (block for block in segment["blocks"] if block["state"].startswith("active"))


def _allocations(
    events: Sequence[Event], live_at_end: Iterable[Mapping[str, Any]]
) -> Iterator[Allocation]:
    begun: dict[int, tuple[int, Event]] = {}  # by address: when, and how
    for moment, event in enumerate(events):
        match event["action"]:
            case "alloc":
                begun[event["addr"]] = (moment, event)
            case "free_completed":
                start, made = begun.pop(event["addr"], (BEFORE, _of_unknown_origin(event)))
                yield _allocation(made, start, moment)
    forever = len(events) + 1
    for block in live_at_end:
        if block["address"] not in begun:
            yield Allocation(
                block["address"],
                block["requested_size"],
                BEFORE,
                forever,
                "",
                block.get("frames") or (),
            )
    for start, made in begun.values():
        yield _allocation(made, start, forever)


def _allocation(made: Event, start: int, end: int) -> Allocation:
    part = str(made.get("user_metadata") or "")
    return Allocation(made["addr"], made["size"], start, end, part, made.get("frames") or ())


def _of_unknown_origin(release: Event) -> Event:
    """The part and the place in the code of a release are not those of what is released."""
    return {"addr": release["addr"], "size": release["size"]}


def _phases(
    annotations: Iterable[Mapping[str, Any]], times_us: Sequence[int], device: int
) -> Iterator[ReplayPhase]:
    """In the order in which they begin. One that does not end goes on to the end of the record."""
    begun: dict[str, int] = {}
    ended: list[ReplayPhase] = []
    for annotation in annotations:
        name = str(annotation["name"])
        if not name.startswith(PHASE_PREFIX) or annotation.get("device", device) != device:
            continue
        moment = bisect_right(times_us, annotation["time_us"])
        if annotation["stage"] == "START":
            begun[name] = moment
        elif name in begun:
            ended.append(ReplayPhase(name.removeprefix(PHASE_PREFIX), begun.pop(name), moment))
    unended = [
        ReplayPhase(name.removeprefix(PHASE_PREFIX), start, len(times_us) + 1)
        for name, start in begun.items()
    ]
    yield from sorted([*ended, *unended], key=lambda phase: phase.start)
