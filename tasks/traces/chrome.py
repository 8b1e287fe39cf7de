"""Read a trace of torch.profiler in Chrome's format, which all versions of torch share."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from msgspec import DecodeError, Struct, field
from msgspec.json import Decoder

from tasks.traces.parts import PART_PREFIX, PHASE_PREFIX
from tasks.traces.timeline import Activity, Launch, PhaseSpan, ThreadId, Timeline, TraceSpan

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_NS_PER_US = 1000

# Only these fields are decoded. With `gc=False` the garbage collector does not track the objects,
# because examining all of them repeatedly while a trace is read would take long.


class _Details(Struct, frozen=True, gc=False):
    correlation: int | None = None
    sequence: int | None = field(default=None, name="Sequence number")
    forward_thread: int = field(default=0, name="Fwd thread id")


_NO_DETAILS = _Details()


class _Event(Struct, gc=False):
    """An event of the trace. Times are in µs, with ns as fractions."""

    name: str = ""
    category: str = field(default="", name="cat")
    at: float = field(default=0.0, name="ts")
    took: float = field(default=0.0, name="dur")
    thread: ThreadId = field(default=0, name="tid")
    details: _Details = field(default=_NO_DETAILS, name="args")


class _Document(Struct):
    events: list[_Event] = field(name="traceEvents")


def read_chrome(path: Path) -> Timeline:
    """Read a trace file. Raise ValueError if it is not in Chrome's format."""
    try:
        return from_json(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def from_json(text: bytes) -> Timeline:
    """Parse a trace. Raise msgspec's DecodeError, a ValueError, if it is not in Chrome's format."""
    phases: list[PhaseSpan] = []
    spans: dict[ThreadId, list[TraceSpan]] = defaultdict(list)
    launches: dict[int | None, Launch] = {}
    on_device: list[_Event] = []
    for event in Decoder(_Document).decode(text).events:
        category, details = event.category, event.details
        if category == "cpu_op":
            # Only operators of the backward pass name the thread of their forward operator.
            is_backward = details.forward_thread != 0
            span = TraceSpan(event.name, True, *_interval(event), details.sequence, is_backward)
            spans[event.thread].append(span)
        elif category in _ON_DEVICE:
            on_device.append(event)
        elif category in _LAUNCHES:
            if details.correlation is not None:
                launches[details.correlation] = Launch(event.thread, round(event.at * _NS_PER_US))
        elif category == "user_annotation":
            if event.name.startswith(PHASE_PREFIX):
                phases.append(PhaseSpan(event.name.removeprefix(PHASE_PREFIX), *_interval(event)))
            elif event.name.startswith(PART_PREFIX):
                spans[event.thread].append(TraceSpan(event.name, False, *_interval(event)))
    activities: list[Activity] = []
    for event in on_device:
        # By the correlation id. Kineto's `External id` leads to an operator directly, but in older
        # traces it equals the correlation id and leads nowhere.
        launch = launches.get(event.details.correlation)
        activities.append(Activity(event.name, *_interval(event), launch))
    return Timeline(phases, spans, activities, on_device=bool(activities or launches))


def _interval(event: _Event) -> tuple[int, int]:
    start_ns = round(event.at * _NS_PER_US)
    return start_ns, start_ns + round(event.took * _NS_PER_US)
