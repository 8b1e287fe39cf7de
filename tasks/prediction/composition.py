"""Divides the memory at a peak by role. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.prediction.replay import Label, Peaks, Trace

TEMPORARY = "temporary"


def compose(trace: Trace, peak: Peaks) -> dict[str, int]:
    """Return bytes by role at a peak of the steady step, largest first.

    They add up to the allocated memory. Storages that the forward pass made and that are alive at
    its end are activations, named by the part of the model that made them. Other storages without a
    label are temporary. `slack` is by how much the allocator's blocks exceed the requested sizes.
    """
    activations = _made_by_forward(trace)
    sizes: dict[str, int] = {}
    for storage in _live_at(trace, peak):
        role = _role(trace.labels[storage], storage in activations)
        sizes[role] = sizes.get(role, 0) + trace.sizes_bytes[storage]
    sizes["slack"] = peak.allocated - sum(sizes.values())
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def temporary_by_part(trace: Trace, peak: Peaks) -> dict[str, int]:
    """Return bytes of the temporary storages at a peak, by the part of the model that made them."""
    activations = _made_by_forward(trace)
    sizes: dict[str, int] = {}
    for storage in _live_at(trace, peak):
        label = trace.labels[storage]
        if _role(label, storage in activations) == TEMPORARY:
            name = f"{TEMPORARY}: {label.part or 'other'}"
            sizes[name] = sizes.get(name, 0) + trace.sizes_bytes[storage]
    return sizes


def _role(label: Label, is_activation: bool) -> str:
    if label.role:
        return label.role
    return f"activations: {label.part or 'other'}" if is_activation else TEMPORARY


def _live_at(trace: Trace, peak: Peaks) -> set[int]:
    """Return the storages alive at a peak of the steady step."""
    live: set[int] = set()
    steady = trace.spans["steady"]
    for step in ("built", "first", "second"):
        for span in trace.spans[step]:
            _follow(span.events, live)
    for span in steady[: peak.span]:
        _follow(span.events, live)
    _follow(steady[peak.span].events[: peak.at + 1], live)
    return live


def _made_by_forward(trace: Trace) -> set[int]:
    """Return the storages of the steady step's forward passes that are alive at their ends."""
    made: set[int] = set()
    for span in trace.spans["steady"]:
        if span.phase == "forward":
            _follow(span.events, made)
    return made


def _follow(events: Iterable[int], live: set[int]) -> None:
    for event in events:
        if event < 0:
            live.discard(~event)
        else:
            live.add(event)
