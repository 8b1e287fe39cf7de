"""What the memory at a peak is made of, by role. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.prediction.trace import STEPS, Label, Peaks, Trace


def compose(trace: Trace, phase: str, peak: Peaks) -> dict[str, int]:
    """Bytes by role at the peak of a phase of the steady step, largest first; they add up to what is allocated there.

    What the forward pass made and kept to its end is an activation, by the part of the model that made it; what is neither
    that nor labelled is temporary. `slack` is by how much the allocator's blocks are larger than what was asked of them.
    """
    kept = _kept_by_forward(trace)
    sizes: dict[str, int] = {}
    for storage in _live_at(trace, phase, peak.at):
        role = _role(trace.labels[storage], storage in kept)
        sizes[role] = sizes.get(role, 0) + trace.sizes_bytes[storage]
    sizes["slack"] = peak.allocated - sum(sizes.values())
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _role(label: Label, kept: bool) -> str:
    if label.role:
        return label.role
    return f"activations: {label.part or 'other'}" if kept else "temporary"


def _live_at(trace: Trace, phase: str, at: int) -> set[int]:
    """The storages that are there after the event `at` of a phase of the steady step."""
    live: set[int] = set()
    for step in STEPS:
        for span in trace.spans[step]:
            is_it = step == "steady" and span.phase == phase
            _follow(span.events[: at + 1] if is_it else span.events, live)
            if is_it:
                return live
    return live


def _kept_by_forward(trace: Trace) -> set[int]:
    """Of the steady step."""
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
