"""Find the phase and the part of the model of each piece of work, and the evidence for it.

Autograd launches backward kernels on another thread, where the ranges of the forward pass do
not exist. The phase therefore follows from the moment of the launch on any thread. The part
follows from the ranges around the launch; without ranges, the sequence number leads to the
operator of the forward pass. Compiled code has no ranges: the compiler's record of its kernels
replaces them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from tasks.traces.classes import classify
from tasks.traces.parts import GRADIENT_SUMS, OPTIMIZER, label_of
from tasks.traces.provenance import Graph, Regions
from tasks.traces.timeline import PART_PREFIX, Thread, ThreadId, Timeline, WorkKind

# The range of a node of the backward pass, with the work of autograd for it.
_EVALUATION = "autograd::engine::evaluate_function:"
_ADDITIONS = ("aten::add", "aten::add_")
# Time of a CPU trace outside of operators: allocation, page faults, Python, other threads.
OUTSIDE = "outside operators"


class ModuleEvidence(StrEnum):
    """Evidence for the part of a piece of work."""

    SCOPE = "scope"  # a range around the launch, on its thread
    SEQUENCE = "sequence"  # the operator of the forward pass with the same sequence number
    ENGINE = "engine"  # autograd, which adds up the gradients of a tensor
    PROVENANCE = "provenance"  # the compiler's record of the kernel
    PHASE = "phase"  # everything in the optimizer's phase belongs to the optimizer
    LAUNCH = "launch"  # the launch is known, and is in no part
    NONE = "none"  # the trace has no launch of it


class Work(NamedTuple):
    """A piece of work of the device, or of the host in a CPU trace.

    In a CPU trace `duration_ns` is an operator's own time, less than `end_ns - start_ns`.
    occurrence: index of its phase in the trace; -1 outside of all phases.
    """

    phase: str
    occurrence: int
    part: str
    kind: str
    how: ModuleEvidence
    operator: str
    name: str
    start_ns: int
    end_ns: int
    duration_ns: int
    launched_ns: int | None


class _Origin(NamedTuple):
    part: str
    how: ModuleEvidence
    operator: str


NamePart = Callable[[str], str]


def attribute(
    timeline: Timeline, name_part: NamePart = label_of, graphs: Sequence[Graph] = ()
) -> list[Work]:
    """Return the work of the device; in a CPU trace, of every operator, and the rest of each phase.

    name_part: returns the label of a part from its name in the trace. graphs: the compiler's
    records.
    """
    find = _OriginFinder(timeline, name_part, graphs)
    works = _on_device(timeline, find) if timeline.on_device else _on_host(timeline, find)
    return list(works)


def _on_device(timeline: Timeline, find: _OriginFinder) -> Iterator[Work]:
    for activity in timeline.activities:
        span = (activity.start_ns, activity.end_ns, activity.end_ns - activity.start_ns)
        launch = activity.launch
        if launch is None:
            yield Work(
                "",
                -1,
                "",
                classify(activity.name),
                ModuleEvidence.NONE,
                "",
                activity.name,
                *span,
                None,
            )
            continue
        thread = timeline.threads.get(launch.thread)
        phase, occurrence = timeline.phase_at(launch.at_ns)
        origin = find.at(
            thread, thread.innermost(launch.at_ns) if thread else -1, phase, activity.name
        )
        kind = classify(activity.name, origin.operator)
        yield Work(
            phase,
            occurrence,
            origin.part,
            kind,
            origin.how,
            origin.operator,
            activity.name,
            *span,
            launch.at_ns,
        )


def _on_host(timeline: Timeline, find: _OriginFinder) -> Iterator[Work]:
    within: dict[str, int] = defaultdict(int)
    for thread in timeline.threads.values():
        for index, own_ns in _own_times(thread):
            span = thread.spans[index]
            phase, occurrence = timeline.phase_at(span.start_ns)
            within[phase] += own_ns
            part, how, _ = find.at(thread, index, phase, span.name)
            times = (span.start_ns, span.end_ns, own_ns)
            yield Work(
                phase,
                occurrence,
                part,
                classify(span.name),
                how,
                span.name,
                span.name,
                *times,
                None,
            )
    for phase, took_ns in timeline.phase_totals().items():
        # Operators on several threads may add up to more than the phase: then nothing is outside.
        outside_ns = max(0, took_ns - within[phase])
        yield Work(
            phase, -1, "", "other", ModuleEvidence.NONE, OUTSIDE, OUTSIDE, 0, 0, outside_ns, None
        )


def _own_times(thread: Thread) -> Iterator[tuple[int, int]]:
    """Yield the index and own time of each operator: its time minus that of operators within it."""
    own = {
        index: s.end_ns - s.start_ns
        for index, s in enumerate(thread.spans)
        if s.kind is WorkKind.OPERATOR
    }
    for index in own:
        around = thread.around[index]
        operator = thread.operator[around] if around >= 0 else -1
        if operator >= 0:
            own[operator] -= thread.spans[index].end_ns - thread.spans[index].start_ns
    return iter(own.items())


class _OriginFinder:
    """Finder of the part that launched a kernel."""

    def __init__(self, timeline: Timeline, name_part: NamePart, graphs: Sequence[Graph]) -> None:
        self._owners = timeline.forward_operators()
        self._name_part = cache(name_part)
        self._regions = dict(_compiled_regions(timeline, graphs)) if graphs else {}

    def at(self, thread: Thread | None, index: int, phase: str, kernel: str) -> _Origin:
        """Return the origin of a kernel that a thread launched in the span at `index`."""
        if thread is None or index < 0:
            return (
                _Origin(OPTIMIZER, ModuleEvidence.PHASE, "")
                if phase == OPTIMIZER
                else _Origin("", ModuleEvidence.LAUNCH, "")
            )
        operator = self._operator(thread, index)
        if part := self._part(thread, index):
            return _Origin(part, ModuleEvidence.SCOPE, operator)
        if _adds_gradients(thread, thread.operator[index]):
            return _Origin(GRADIENT_SUMS, ModuleEvidence.ENGINE, operator)
        if part := self._part_of_forward(thread, index):
            return _Origin(part, ModuleEvidence.SEQUENCE, operator)
        if thread in self._regions and (part := self._regions[thread].parts(index, kernel)):
            return _Origin(part, ModuleEvidence.PROVENANCE, operator)
        return (
            _Origin(OPTIMIZER, ModuleEvidence.PHASE, operator)
            if phase == OPTIMIZER
            else _Origin("", ModuleEvidence.LAUNCH, operator)
        )

    def _operator(self, thread: Thread, index: int) -> str:
        operator = thread.operator[index]
        return thread.spans[operator].name if operator >= 0 else ""

    def _part(self, thread: Thread, index: int) -> str:
        part = thread.part[index]
        return (
            self._name_part(thread.spans[part].name.removeprefix(PART_PREFIX)) if part >= 0 else ""
        )

    def _part_of_forward(self, thread: Thread, index: int) -> str:
        """Return the part of the forward operator that a backward operator belongs to."""
        backward = thread.backward[index]
        sequence = thread.spans[backward].sequence if backward >= 0 else None
        if sequence is None or sequence not in self._owners:
            return ""
        return self._part(*self._owners[sequence])


def _adds_gradients(thread: Thread, operator: int) -> bool:
    """Return whether an addition belongs to autograd, and not to the node that it evaluates."""
    if operator < 0 or thread.spans[operator].name not in _ADDITIONS:
        return False
    around = thread.around[operator]
    return around >= 0 and thread.spans[around].name.startswith(_EVALUATION)


def _compiled_regions(
    timeline: Timeline, graphs: Sequence[Graph]
) -> Iterator[tuple[Thread, Regions]]:
    launched: dict[ThreadId, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for activity in timeline.activities:
        if activity.launch is not None and activity.launch.thread in timeline.threads:
            index = timeline.threads[activity.launch.thread].innermost(activity.launch.at_ns)
            launched[activity.launch.thread][index].append(activity.name)
    for number, thread in timeline.threads.items():
        yield thread, Regions(thread, launched[number], graphs)
