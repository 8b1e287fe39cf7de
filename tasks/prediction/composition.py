"""Divides the memory at a peak by role. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.prediction.trace import STEPS, Label, Peaks, Trace


def compose(trace: Trace, phase: str, peak: Peaks) -> dict[str, int]:
    """Return bytes by role at the peak of a phase of the steady step, largest first.

    They add up to the allocated memory. Storages that the forward pass made and that are alive at
    its end are activations, named by the part of the model that made them. Other storages without a
    label are temporary. `slack` is by how much the allocator's blocks exceed the requested sizes.
    """
    activations = _made_by_forward(trace)
    sizes: dict[str, int] = {}
    for storage in _live_at(trace, phase, peak.at):
        role = _role(trace.labels[storage], storage in activations)
        sizes[role] = sizes.get(role, 0) + trace.sizes_bytes[storage]
    sizes["slack"] = peak.allocated - sum(sizes.values())
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _role(label: Label, is_activation: bool) -> str:
    if label.role:
        return label.role
    return f"activations: {label.part or 'other'}" if is_activation else "temporary"


def _live_at(trace: Trace, phase: str, at: int) -> set[int]:
    """Return the storages alive after event `at` of a phase of the steady step."""
    live: set[int] = set()
    for step in STEPS:
        for span in trace.spans[step]:
            if step == "steady" and span.phase == phase:
                _follow(span.events[: at + 1], live)
                return live
            _follow(span.events, live)
    return live


def _made_by_forward(trace: Trace) -> set[int]:
    """Return the storages of the steady step's forward pass that are alive at its end."""
    for span in trace.spans["steady"]:
        if span.phase == "forward":
            made: set[int] = set()
            _follow(span.events, made)
            return made
    return set()


def _follow(events: Iterable[int], live: set[int]) -> None:
    for event in events:
        if event < 0:
            live.discard(~event)
        else:
            live.add(event)
