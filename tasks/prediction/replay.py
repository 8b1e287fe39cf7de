"""The order in which a workload allocates and releases storages, and its replay in an allocator.

Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Literal, NamedTuple

from tasks.prediction.allocator import CachingAllocator, MemoryBlock
from tasks.spec.tables import Sample

Step = Literal["built", "first", "second", "steady"]
STEPS: tuple[Step, ...] = ("built", "first", "second", "steady")


class Label(NamedTuple):
    """Properties of a storage that are known when it is made.

    part: part of the model. role: what it is used for; empty if that follows from its lifetime.
    stream: number of the CUDA stream that it is made on; 0: the default one.
    """

    phase: str
    part: str
    role: str
    stream: int = 0


@dataclass(frozen=True)
class TensorLifetime:
    """The events of one phase of a step, or between two phases; then the name is empty.

    An event is the index of a storage in the trace's lists, inverted (~) when it is released.
    """

    phase: str
    events: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class Trace:
    """The trace of a workload's build, first step and a later step.

    The second step is in it if it differs from later ones. Storages are numbered in the order in
    which they were made.

    flops: operations of the steady step by phase, as samples.
    saved: what the steady step's forward pass saves for its backward pass, in the samples of
        tasks/harness/saved_tensors.py.
    module_bytes: sizes of what a step saves, by module and operation, and of parameters, by name.
        Layers are added up: `layers.*.ffn: SiluBackward0`.
    eager_functions: names of functions that are compiled on a GPU, but ran eagerly here.
    unfollowed: names of operations that a GPU computes in kernels with memory of unknown size.
    caveats: reasons why a later step may take more than the traced ones.
    sent: storages that a collective sends for which nobody waits: see `held_by_nccl`.
    """

    sizes_bytes: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    spans: dict[Step, list[TensorLifetime]] = field(
        default_factory=lambda: {step: [] for step in STEPS}
    )
    flops: list[Sample] = field(default_factory=list)
    saved: list[Sample] = field(default_factory=list)
    module_bytes: dict[str, int] = field(default_factory=dict)
    eager_functions: set[str] = field(default_factory=set)
    unfollowed: set[str] = field(default_factory=set)
    caveats: set[str] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)

    def without(self, phase: str) -> Trace:
        """Return the trace as if this phase had not run."""
        others = Trace(self.sizes_bytes, self.labels, flops=self.flops, saved=self.saved)
        others.unfollowed, others.caveats = self.unfollowed, self.caveats
        others.module_bytes = self.module_bytes
        for step, spans in self.spans.items():
            others.spans[step] = [span for span in spans if span.phase != phase]
        return others

    def events(self, step: Step) -> Iterator[int]:
        for span in self.spans[step]:
            yield from span.events


def held_by_nccl(trace: Trace) -> Trace:
    """Return the trace as if NCCL held what a step sends until the next step has sent its gradients.

    A collective's tensors are held until somebody waits for it, or else until a later collective
    begins after the watchdog of torch's ProcessGroupNCCL, every 100 ms, has found it complete
    (`stashed_for_allocator_safety_`). DDP waits for its future only. When the second step begins,
    it replaces the buckets of the first. On two H100s, `large` with DDP held 3.61 GiB of them in
    the second step's peak, and in another run it did not; with two micro-batches it held them. Of
    1.8 GiB of copies in bf16, a steady step held 1.3 GiB.
    """
    late: list[int] = []
    spans: list[TensorLifetime] = []
    backward = [at for at, span in enumerate(trace.spans["second"]) if span.phase == "backward"]
    for number, span in enumerate(trace.spans["second"]):
        events = span.events
        if backward and number <= backward[-1]:
            is_late = [event < 0 and ~event in trace.sent for event in span.events]
            late += compress(span.events, is_late)
            events = array(
                "q", (event for event, at in zip(events, is_late, strict=True) if not at)
            )
            if number == backward[-1]:
                events.extend(late)
        spans.append(TensorLifetime(span.phase, events))
    sizes, labels = list(trace.sizes_bytes), list(trace.labels)
    temporary = sorted({~event for event in trace.events("steady") if event < 0} & trace.sent)
    sizes += [sizes[storage] for storage in temporary]
    labels += [labels[storage] for storage in temporary]
    if temporary:
        copies = array("q", range(len(trace.sizes_bytes), len(sizes)))
        spans.insert(0, TensorLifetime("", copies))
    spans_of = {**trace.spans, "second": spans}
    return replace(trace, sizes_bytes=sizes, labels=labels, spans=spans_of)


@dataclass(frozen=True)
class Peaks:
    """Peaks within a phase in bytes, and memory at its end.

    A phase may run several times in a step: peaks are then the highest ones.

    at: event with the most allocated. span: index of its span in the step.
    """

    requested: int
    allocated: int
    reserved: int
    held_allocated: int
    at: int
    span: int

    def joined(self, later: Peaks) -> Peaks:
        """Return the peaks of this run of a phase and a later one in the same step."""
        highest = max(self, later, key=lambda peaks: peaks.allocated)
        return Peaks(
            max(self.requested, later.requested),
            highest.allocated,
            max(self.reserved, later.reserved),
            later.held_allocated,
            highest.at,
            highest.span,
        )


Replay = dict[tuple[Step, str], Peaks]


def replay(trace: Trace, allocator: CachingAllocator, steady_steps: int) -> Replay:
    """Return the peaks of each phase of each step; those of the build have the phase "".

    The steady step is replayed until two replays agree, at most `steady_steps` times. Raise
    OutOfMemory if the allocator's limit is too small.
    """
    player = _Player(trace, allocator)
    peaks: Replay = {}
    once: tuple[Step, ...] = ("built", "first", "second")
    steps: list[Step] = [*once, *["steady"] * steady_steps]  # type: ignore[list-item]
    for step in steps:
        # A repeated step has the same requests, but the positions of free blocks change, and with
        # them the peaks.
        before = dict(peaks)
        peaks |= {(step, phase): found for phase, found in player.play(step).items()}
        if step == "steady" and (peaks == before or not player.can_repeat):
            break
    return peaks


def highest(peaks: Replay, step: Step) -> tuple[str, Peaks]:
    """Return the phase of a step that allocates most."""
    keys = [key for key in peaks if key[0] == step]
    key = max(keys, key=lambda key: peaks[key].allocated)
    return key[1], peaks[key]


class _Player:
    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self._trace = trace
        self._allocator = allocator
        self._blocks: dict[int, MemoryBlock] = {}
        self._successors = _successors(trace)
        self._steady_before = False

    @property
    def can_repeat(self) -> bool:
        return self._successors is not None

    def play(self, step: Step) -> dict[str, Peaks]:
        """Return the peaks of each phase of a step, which is replayed once."""
        if step == "steady" and self._steady_before and self._successors is not None:
            for earlier, later in self._successors.items():
                self._blocks[earlier] = self._blocks.pop(later)
        self._steady_before = step == "steady"
        found: dict[str, Peaks] = {}
        for number, span in enumerate(self._trace.spans[step]):
            peaks, phase = self._play_span(number, span.events), span.phase
            if phase or step == "built":
                found[phase] = found[phase].joined(peaks) if phase in found else peaks
        return found

    def _play_span(self, number: int, events: Sequence[int]) -> Peaks:
        allocator, blocks = self._allocator, self._blocks
        sizes, labels = self._trace.sizes_bytes, self._trace.labels
        requested, allocated = allocator.requested, allocator.allocated
        reserved, at = allocator.reserved, -1
        for index, event in enumerate(events):
            if event < 0:
                allocator.free(blocks.pop(~event))
                continue
            blocks[event] = allocator.allocate(sizes[event], labels[event].stream)
            if allocator.requested > requested:
                requested = allocator.requested
            if allocator.allocated > allocated:
                allocated, at = allocator.allocated, index
            if allocator.reserved > reserved:
                reserved = allocator.reserved
        return Peaks(requested, allocated, reserved, allocator.allocated, at, number)


def left_behind_bytes(trace: Trace) -> int:
    """Return by how much the steady step leaves more memory in use than there was before it."""
    taken, left = _inherited(trace)
    sizes = trace.sizes_bytes
    return sum(sizes[event] for event in left) - sum(sizes[event] for event in taken)


def _successors(trace: Trace) -> dict[int, int] | None:
    """Match the storages that a step inherits, such as gradients, with those that it leaves behind.

    None if their sizes differ: a third step cannot be derived then.
    """
    taken, left = _inherited(trace)
    sizes = trace.sizes_bytes
    if [sizes[event] for event in taken] != [sizes[event] for event in left]:
        return None
    return dict(zip(taken, left, strict=True))


def _inherited(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the storages of earlier steps that the steady step releases, and those that it leaves."""
    first = {event for step in ("first", "second") for event in trace.events(step) if event >= 0}
    steady = set(trace.events("steady"))
    gone = {~event for event in steady if event < 0}
    return sorted(first & gone), sorted(event for event in steady - gone if event >= 0)
