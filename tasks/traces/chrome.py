"""Read a trace of torch.profiler in Chrome's format, which all versions of torch share."""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.json import Decoder

from tasks.traces.parts import PART_PREFIX
from tasks.traces.ranges import DeviceTrace, Range, sort_ranges
from tasks.traces.timeline import Activity, Launch, ThreadId, Timeline, TraceSpan, checked_times

# Categories in lower case: until 2021 torch wrote `Kernel`, `Memcpy`, `Runtime` and `Operator`.
_OPERATORS = frozenset({"cpu_op", "operator"})
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
_RANGES = "user_annotation"
_GZIP = b"\x1f\x8b"
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
    thread: ThreadId = field(default=0, name="tid")
    details: _Details = field(default=_NO_DETAILS, name="args")


class _Document(Struct):
    events: list[_Event] = field(name="traceEvents")


def read_chrome(path: Path) -> Timeline:
    """Read a trace file. Raise ValueError if it is not in Chrome's format."""
    return _parsed(path).timeline()


def read_chrome_devices(path: Path, chosen: Mapping[str, str]) -> Mapping[str, DeviceTrace]:
    """Read a trace file, also a compressed one, as a trace for each GPU.

    chosen: phases by the names of ranges. Raise ValueError if it is not in Chrome's format.
    """
    parsed = _parsed(path, chosen)
    devices = sorted({event.details.device for event, _, _ in parsed.on_device})
    if len(devices) > 1:
        return {f"GPU {one}": DeviceTrace(parsed.timeline(one), parsed.ranges) for one in devices}
    timeline = parsed.timeline()
    if not timeline.activities and not any(timeline.threads.values()):
        raise ValueError(f"{path}: contains neither kernels nor operators of torch.profiler")
    return {"": DeviceTrace(timeline, parsed.ranges)}


def from_json(text: bytes) -> Timeline:
    """Parse a trace. Raise ValueError if it is not in Chrome's format."""
    return _Trace(text, {}).timeline()


def _parsed(path: Path, chosen: Mapping[str, str] = MappingProxyType({})) -> _Trace:
    try:
        text = path.read_bytes()
        text = gzip.decompress(text) if text.startswith(_GZIP) else text
        return _Trace(text.removeprefix(codecs.BOM_UTF8), chosen)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a trace of torch.profiler: {error}") from error


class _Trace:
    """The events of a trace, sorted by what they are."""

    def __init__(self, text: bytes, chosen: Mapping[str, str]) -> None:
        self.launches: dict[int | None, Launch] = {}
        self.on_device: list[tuple[_Event, int, int]] = []  # with start and end in ns
        self._operators: dict[ThreadId, list[TraceSpan]] = defaultdict(list)
        ranges: list[Range] = []
        # Old versions of torch wrote numbers as texts.
        for event in Decoder(_Document, strict=False).decode(text).events:
            category, details = event.category.lower(), event.details
            if category in _OPERATORS:
                # Only operators of the backward pass name the thread of their forward operator.
                is_backward = details.forward_thread != 0
                span = TraceSpan(event.name, True, *_interval(event), details.sequence, is_backward)
                self._operators[event.thread].append(span)
            elif category in _ON_DEVICE:
                self.on_device.append((event, *_interval(event)))
            elif category in _LAUNCHES:
                if details.correlation is not None:
                    launch = Launch(event.thread, _nanoseconds(event.at))
                    self.launches[details.correlation] = launch
            elif category == _RANGES:
                ranges.append(Range(event.name, *_interval(event), event.thread))
        self.ranges = sort_ranges(ranges, chosen)

    def timeline(self, device: int | None = None) -> Timeline:
        """Return the timeline of one GPU, or of all."""
        activities: list[Activity] = []
        for event, start_ns, end_ns in self.on_device:
            # By the correlation id. Kineto's `External id` leads to an operator directly, but in
            # older traces it equals the correlation id and leads nowhere.
            launch = self.launches.get(event.details.correlation)
            activity = Activity(event.name, start_ns, end_ns, launch)
            is_chosen = device in (None, event.details.device)
            if is_chosen and not self.ranges.is_warmup(activity.begun_ns):
                activities.append(activity)
        on_device = bool(self.on_device or self.launches)
        return Timeline(self.ranges.phases, self._spans(), activities, on_device)

    def _spans(self) -> Mapping[ThreadId, list[TraceSpan]]:
        spans = defaultdict(list)
        for thread, operators in self._operators.items():
            spans[thread] = [one for one in operators if not self.ranges.is_warmup(one.start_ns)]
        for text, start_ns, end_ns, thread in self.ranges.parts:
            # Ranges of torch in a trace of this program are no modules.
            if text.startswith(PART_PREFIX) or not self.ranges.is_own:
                spans[thread].append(TraceSpan(text, False, start_ns, end_ns))
        return spans


def _interval(event: _Event) -> tuple[int, int]:
    start_ns = _nanoseconds(event.at)
    return checked_times(start_ns, start_ns + _nanoseconds(event.took))


def _nanoseconds(microseconds: float) -> int:
    if not math.isfinite(microseconds * _NS_PER_US):
        raise ValueError("an event in it has no time")
    return round(microseconds * _NS_PER_US)
