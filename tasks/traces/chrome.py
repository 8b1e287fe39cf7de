"""Read a trace of torch.profiler in Chrome's format, which all versions of torch share."""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.json import Decoder

from tasks.traces.merged_ranks import MergedWork, find_owners
from tasks.traces.parts import PART_PREFIX
from tasks.traces.ranges import DeviceTrace, Range, Ranges, sort_ranges
from tasks.traces.timeline import (
    BACKWARD_NODE,
    Activity,
    Launch,
    ThreadId,
    Timeline,
    TraceSpan,
    checked_times,
)

# Categories in lower case: until 2021 torch wrote `Kernel`, `Memcpy`, `Runtime` and `Operator`.
_OPERATORS = frozenset({"cpu_op", "operator"})
_ON_DEVICE = frozenset({
    "kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "hpu_op", "mtia_ccp_events",
})  # fmt: skip
_CALLS = ("runtime", "driver")  # ends of the host's categories: xpu_runtime, privateuse1_driver
_RANGES = "user_annotation"
_GZIP = b"\x1f\x8b"
# A text that shrinks more than this is not a trace. Zeros and blanks shrink to a thousandth; the
# traces of torch.profiler shrink to a tenth or a twentieth.
_MOST_EXPANDED, _ALWAYS_EXPANDED = 100, 64 * 1024**2  # times, and bytes
_NS_PER_US = 1000

# Only these fields are decoded. With `gc=False` the garbage collector does not track the objects,
# because examining all of them repeatedly while a trace is read would take long.


class _Details(Struct, frozen=True, gc=False):
    correlation: int | None = None
    device: int = 0
    sequence: int | None = field(default=None, name="Sequence number")
    forward_thread: int = field(default=0, name="Fwd thread id")


_NO_DETAILS = _Details()


class _Event(Struct, gc=False):
    """An event of the trace. Times are in µs, with ns as fractions."""

    name: str = ""
    category: str = field(default="", name="cat")
    at: float = field(default=math.nan, name="ts")
    took: float = field(default=math.nan, name="dur")
    process: int | float | str | None = field(default=None, name="pid")
    thread: ThreadId = field(default=0, name="tid")
    details: _Details = field(default=_NO_DETAILS, name="args")


class _Document(Struct):
    events: list[_Event] = field(name="traceEvents")


class _Work(NamedTuple):
    """A kernel, copy or fill, with its position in the file."""

    event: _Event
    start_ns: int
    end_ns: int
    position: int


class _Process:
    """The events of one process of the host, and the work that it launched."""

    def __init__(self) -> None:
        self.launches: dict[int, Launch] = {}
        self.operators: dict[ThreadId, list[TraceSpan]] = defaultdict(list)
        self.ranges: list[Range] = []
        self.works: list[_Work] = []
        self.calls: set[tuple[str, int]] = set()
        self.is_mixed = False
        self.extent: tuple[int, int] | None = None  # first and last position in the file

    @property
    def is_traced(self) -> bool:
        """True if it ran operators or has ranges."""
        return bool(self.operators or self.ranges)

    def add(self, event: _Event, position: int) -> None:
        """Add an operator, a range or a launch; other events of the host count for nothing."""
        category, details = event.category.lower(), event.details
        if category in _OPERATORS:
            # Only operators of the backward pass name the thread of their forward operator.
            is_backward = details.forward_thread != 0
            span = TraceSpan(event.name, True, *_interval(event), details.sequence, is_backward)
            self.operators[event.thread].append(span)
        elif category == _RANGES:
            self.ranges.append(Range(event.name, *_interval(event), event.thread))
        elif details.correlation:
            # Launches have another category for each kind of device; an id of 0 means none.
            self.add_launch(details.correlation, Launch(event.thread, _nanoseconds(event.at)))
            if not category.endswith(_CALLS):
                return
            # Calls of a process have different ids. Processes of two containers may have one id.
            self.is_mixed |= (category, details.correlation) in self.calls
            self.calls.add((category, details.correlation))
        else:
            return
        self.extent = (self.extent[0] if self.extent else position, position)

    def add_launch(self, number: int, launch: Launch) -> None:
        # Events of the device may have the id of the launch too, but begin later.
        known = self.launches.get(number)
        if known is None or launch.at_ns < known.at_ns:
            self.launches[number] = launch

    def sorted_ranges(self, chosen: Mapping[str, str]) -> Ranges:
        """Return the ranges by what they are. chosen: phases by the name of a range."""
        operators = chain(*self.operators.values())
        nodes = (one for one in operators if one.name.startswith(BACKWARD_NODE))
        return sort_ranges(self.ranges, chosen, nodes)

    def timeline(self, ranges: Ranges, device: int | None = None) -> Timeline:
        """Return the timeline of one GPU, or of all."""
        activities: list[Activity] = []
        for event, start_ns, end_ns, _ in self.works:
            # By the correlation id. Kineto's `External id` leads to an operator directly, but in
            # older traces it equals the correlation id and leads nowhere.
            launch = self.launches.get(event.details.correlation or 0)
            activity = Activity(event.name, start_ns, end_ns, launch)
            is_chosen = device in (None, event.details.device)
            if is_chosen and not ranges.is_warmup(activity.begun_ns):
                activities.append(activity)
        on_device = bool(self.works or self.launches)
        return Timeline(ranges.phases, self._spans(ranges), activities, on_device)

    def _spans(self, ranges: Ranges) -> Mapping[ThreadId, list[TraceSpan]]:
        spans = defaultdict(list)
        for thread, operators in self.operators.items():
            spans[thread] = [one for one in operators if not ranges.is_warmup(one.start_ns)]
        for text, start_ns, end_ns, thread in ranges.parts:
            # Ranges of torch in a trace of this program are no modules.
            if text.startswith(PART_PREFIX) or not ranges.is_own:
                spans[thread].append(TraceSpan(text, False, start_ns, end_ns))
        return spans


def read_chrome(path: Path) -> Timeline:
    """Read a trace file of one process. Raise ValueError if it is not in Chrome's format."""
    return _timeline(_read(path))


def read_chrome_devices(path: Path, chosen: Mapping[str, str]) -> Mapping[str, DeviceTrace]:
    """Read a trace file, also a compressed one, as a trace for each process and GPU.

    chosen: phases by the names of ranges. Raise ValueError if it is not in Chrome's format.
    """
    processes, is_guess = _split(_read(path))
    traces = {}
    for name, own in processes.items():
        ranges = own.sorted_ranges(chosen)
        devices = sorted({work.event.details.device for work in own.works})
        for device in devices or (None,):
            timeline = own.timeline(ranges, device)
            is_only = device is None or len(devices) == len(processes) == 1
            rank = ", ".join(filter(None, [name, "" if is_only else f"GPU {device}"]))
            if timeline.activities or any(timeline.threads.values()):
                traces[rank] = DeviceTrace(timeline, ranges, is_guess or own.is_mixed)
    if not traces:
        raise ValueError(f"{path}: contains neither kernels nor operators of torch.profiler")
    return traces


def from_json(text: bytes) -> Timeline:
    """Parse a trace of one process. Raise ValueError if it is not in Chrome's format."""
    return _timeline(_TraceEvents(text))


def _timeline(events: _TraceEvents) -> Timeline:
    whole = _joined(events)
    return whole.timeline(whole.sorted_ranges({}))


def _read(path: Path) -> _TraceEvents:
    try:
        text = path.read_bytes()
        text = _decompressed(path, len(text)) if text.startswith(_GZIP) else text
        return _TraceEvents(text.removeprefix(codecs.BOM_UTF8))
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: not a trace of torch.profiler: {error}") from error


def _decompressed(path: Path, size: int) -> bytes:
    """Return the text of a compressed file of this size. Raise ValueError if it is too large."""
    most = max(_ALWAYS_EXPANDED, _MOST_EXPANDED * size)
    with gzip.open(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"it expands to more than {most:,} bytes")
    return text


class _TraceEvents:
    """The events of a file: the work of all devices, and the rest by the id of its process."""

    def __init__(self, text: bytes) -> None:
        self.works: list[_Work] = []
        self.processes: dict[str, _Process] = defaultdict(_Process)
        # Old versions of torch wrote numbers as texts.
        events = Decoder(_Document, strict=False).decode(text).events
        for position, event in enumerate(events):
            if event.category.lower() in _ON_DEVICE:
                self.works.append(_Work(event, *_interval(event), position))
            else:
                self.processes[str(event.process)].add(event, position)


def _joined(events: _TraceEvents) -> _Process:
    """Return everything as one process."""
    whole = _Process()
    whole.works = events.works
    for own in events.processes.values():
        for number, launch in own.launches.items():
            whole.add_launch(number, launch)
        for thread, operators in own.operators.items():
            whole.operators[thread] += operators
        whole.ranges += own.ranges
        whole.is_mixed |= own.is_mixed
    return whole


def _split(events: _TraceEvents) -> tuple[Mapping[str, _Process], bool]:
    """Return the processes of a file by name, and True if their work is split by a guess.

    A process alone has no name.
    """
    processes = _ranks(events)
    if len(processes) < 2:
        return {"": _joined(events)}, False
    works = [
        MergedWork(
            position, start_ns, event.details.correlation, f"{event.process} {event.details.device}"
        )
        for event, start_ns, _, position in events.works
    ]
    launches = {number: own.launches for number, own in processes.items()}
    extents = {number: own.extent for number, own in processes.items() if own.extent}
    owners, is_guess = find_owners(launches, extents, works)
    unknown = _Process()  # whose work has no launch
    for owner, work in zip(owners, events.works, strict=True):
        processes.get(owner, unknown).works.append(work)
    by_name = {f"process {number}": own for number, own in processes.items()}
    return {**by_name, "": unknown}, is_guess


def _ranks(events: _TraceEvents) -> Mapping[str, _Process]:
    """Return the processes that launched the work of the file, or without work ran operators."""
    traced = {number: own for number, own in events.processes.items() if own.is_traced}
    if not events.works:
        return traced
    worked = {work.event.details.correlation for work in events.works}
    launching = {}
    for number, own in events.processes.items():
        if (own.is_traced or own.calls) and not worked.isdisjoint(own.launches):
            launching[number] = own
    # Operators and launches of one process may have different ids if it ran in a container.
    return launching if launching.keys() & traced.keys() else {}


def _interval(event: _Event) -> tuple[int, int]:
    start_ns = _nanoseconds(event.at)
    return checked_times(start_ns, start_ns + _nanoseconds(event.took))


def _nanoseconds(microseconds: float) -> int:
    if not math.isfinite(microseconds * _NS_PER_US):
        raise ValueError("an event in it has no time")
    return round(microseconds * _NS_PER_US)
