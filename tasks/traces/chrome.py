"""Reads what torch.profiler exports: Chrome's trace format, which all its versions share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from tasks.traces.timeline import PART_PREFIX, PHASE_PREFIX, Activity, Kind, Launch, Phase, Span, Timeline

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NS_PER_US = 1000


def read_chrome(path: Path) -> Timeline:
    """Raises ValueError for what is no such trace."""
    document = orjson.loads(path.read_bytes())
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if events is None:
        raise ValueError(f"{path}: has no traceEvents")
    return from_events(events)


def from_events(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """`events`: those of the file's `traceEvents`; times in µs, with ns as fractions."""
    phases: list[Phase] = []
    spans: dict[int, list[Span]] = defaultdict(list)
    launches: dict[int, Launch] = {}
    on_device: list[Mapping[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "cpu_op":
            spans[event["tid"]].append(_operator(event))
        elif category in _LAUNCHES:
            correlation = event.get("args", {}).get("correlation")
            if correlation is not None:
                launches[correlation] = Launch(event["tid"], _ns(event["ts"]))
        elif category in _ON_DEVICE:
            on_device.append(event)
        elif category == "user_annotation":
            name: str = event["name"]
            if name.startswith(PHASE_PREFIX):
                phases.append(Phase(name.removeprefix(PHASE_PREFIX), *_interval(event)))
            elif name.startswith(PART_PREFIX):
                spans[event["tid"]].append(Span(name, Kind.PART, *_interval(event)))
    activities = [Activity(e["name"], *_interval(e), launches.get(e.get("args", {}).get("correlation"))) for e in on_device]
    return Timeline(phases, spans, activities, on_device=bool(activities or launches))


def _operator(event: Mapping[str, Any]) -> Span:
    details = event.get("args", {})
    return Span(
        event["name"],
        Kind.OPERATOR,
        *_interval(event),
        sequence=details.get("Sequence number"),
        backward=bool(details.get("Fwd thread id")),
    )


def _interval(event: Mapping[str, Any]) -> tuple[int, int]:
    start_ns = _ns(event["ts"])
    return start_ns, start_ns + _ns(event.get("dur", 0))


def _ns(us: float) -> int:
    return round(us * _NS_PER_US)
