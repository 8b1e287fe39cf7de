"""Find the phase and the part of the model of each piece of work, and the evidence for it.

The phase follows from the moment of the launch on any thread. The part follows from the ranges
around the launch; without ranges, the sequence number leads to the operator of the forward pass.
Compiled code has no ranges: the compiler's record of its kernels replaces them.
"""

# Autograd launches backward kernels on another thread, where the ranges of the forward pass do not
# exist: 61 % of the kernels in the trace of a ResNet. By the ranges of the launching thread alone,
# 67 % of that trace's kernel time would be in no phase.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from tasks.spec.tables import OUTSIDE_OPERATORS, UNKNOWN_CLASS
from tasks.traces.kernel_classes import classify
from tasks.traces.parts import GRADIENT_SUMS, OPTIMIZER, PART_PREFIX, label_of
from tasks.traces.provenance import Graph, Regions
from tasks.traces.timeline import BACKWARD_NODE, Thread, ThreadId, Timeline

_ADDITIONS = ("aten::add", "aten::add_")


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
    """A piece of work of the device, or of the host in a CPU trace."""

    phase: str
    occurrence: int  # index of the phase in the trace; -1 outside of all phases
    part: str
    kind: str
    how: ModuleEvidence
    operator: str
    name: str
    start_ns: int
    end_ns: int
    duration_ns: int  # in a CPU trace an operator's own time, less than `end_ns - start_ns`
    launched_ns: int | None


class _Origin(NamedTuple):
    part: str
    how: ModuleEvidence
    operator: str


def attribute(
    timeline: Timeline, name_part: Callable[[str], str] = label_of, graphs: Sequence[Graph] = ()
) -> list[Work]:
    """Return the work of the device; in a CPU trace, of every operator, and the rest of each phase.

    name_part: returns the label of a part from its name in the trace. graphs: the compiler's
    records.
    """
    finder = _OriginFinder(timeline, name_part, graphs)
    if timeline.on_device:
        return list(_on_device(timeline, finder))
    return list(_on_host(timeline, finder))


def _on_device(timeline: Timeline, finder: _OriginFinder) -> Iterator[Work]:
    for name, start_ns, end_ns, launch in timeline.activities:
        times = (start_ns, end_ns, end_ns - start_ns)
        if launch is None:
            yield Work("", -1, "", classify(name), ModuleEvidence.NONE, "", name, *times, None)
            continue
        thread = timeline.threads.get(launch.thread)
        index = thread.innermost(launch.at_ns) if thread else -1
        phase, occurrence = timeline.phase_at(launch.at_ns)
        part, how, operator = finder.origin(thread, index, phase, name)
        kind = classify(name, operator)
        yield Work(phase, occurrence, part, kind, how, operator, name, *times, launch.at_ns)


def _on_host(timeline: Timeline, finder: _OriginFinder) -> Iterator[Work]:
    within: dict[str, int] = defaultdict(int)
    for thread in timeline.threads.values():
        for index, own_ns in _own_times(thread).items():
            span = thread.spans[index]
            name, times = span.name, (span.start_ns, span.end_ns, own_ns)
            phase, occurrence = timeline.phase_at(span.start_ns)
            within[phase] += own_ns
            part, how, _ = finder.origin(thread, index, phase, name)
            yield Work(phase, occurrence, part, classify(name), how, name, name, *times, None)
    for phase, took_ns in timeline.phase_totals().items():
        # Operators on several threads may add up to more than the phase: then nothing is outside.
        # On a 2-core CPU, operators covered only a third of a step of the small model.
        rest = (0, 0, max(0, took_ns - within[phase]), None)
        yield Work(
            phase,
            -1,
            "",
            UNKNOWN_CLASS,
            ModuleEvidence.NONE,
            OUTSIDE_OPERATORS,
            OUTSIDE_OPERATORS,
            *rest,
        )


def _own_times(thread: Thread) -> dict[int, int]:
    """Return the own time of each operator: its time minus that of operators within it."""
    lengths = {i: s.end_ns - s.start_ns for i, s in enumerate(thread.spans) if s.is_operator}
    own = dict(lengths)
    for index, length_ns in lengths.items():
        around = thread.around[index]
        if around >= 0 and thread.operator[around] >= 0:
            own[thread.operator[around]] -= length_ns
    return own


class _OriginFinder:
    """Finder of the part that launched a kernel."""

    def __init__(
        self, timeline: Timeline, name_part: Callable[[str], str], graphs: Sequence[Graph]
    ) -> None:
        self._owners = timeline.forward_operators()
        self._name_part = cache(name_part)
        self._regions = _compiled_regions(timeline, graphs) if graphs else {}

    def origin(self, thread: Thread | None, index: int, phase: str, kernel: str) -> _Origin:
        """Return the origin of a kernel that a thread launched in the span at `index`."""
        operator = ""
        if thread is not None and index >= 0:
            operator = self._operator(thread, index)
            if part := self._part(thread, index):
                return _Origin(part, ModuleEvidence.SCOPE, operator)
            if _adds_gradients(thread, thread.operator[index]):
                return _Origin(GRADIENT_SUMS, ModuleEvidence.ENGINE, operator)
            if part := self._part_of_forward(thread, index):
                return _Origin(part, ModuleEvidence.SEQUENCE, operator)
            if thread in self._regions and (part := self._regions[thread].parts(index, kernel)):
                return _Origin(part, ModuleEvidence.PROVENANCE, operator)
        if phase == OPTIMIZER:
            return _Origin(OPTIMIZER, ModuleEvidence.PHASE, operator)
        return _Origin("", ModuleEvidence.LAUNCH, operator)

    def _operator(self, thread: Thread, index: int) -> str:
        operator = thread.operator[index]
        if operator < 0:
            return ""
        return thread.spans[operator].name

    def _part(self, thread: Thread, index: int) -> str:
        part = thread.part[index]
        if part < 0:
            return ""
        return self._name_part(thread.spans[part].name.removeprefix(PART_PREFIX))

    def _part_of_forward(self, thread: Thread, index: int) -> str:
        """Return the part of the forward operator that a backward operator belongs to."""
        backward = thread.backward[index]
        if backward < 0:
            return ""
        sequence = thread.spans[backward].sequence
        if sequence is None or sequence not in self._owners:
            return ""
        return self._part(*self._owners[sequence])


def _adds_gradients(thread: Thread, operator: int) -> bool:
    """Return True for an addition of autograd, which is not part of the node that it evaluates."""
    if operator < 0 or thread.spans[operator].name not in _ADDITIONS:
        return False
    around = thread.around[operator]
    return around >= 0 and thread.spans[around].name.startswith(BACKWARD_NODE)


def _compiled_regions(timeline: Timeline, graphs: Sequence[Graph]) -> dict[Thread, Regions]:
    launched: dict[ThreadId, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, _, _, launch in timeline.activities:
        if launch is not None and launch.thread in timeline.threads:
            index = timeline.threads[launch.thread].innermost(launch.at_ns)
            launched[launch.thread][index].append(name)
    return {
        thread: Regions(thread, launched[number], graphs)
        for number, thread in timeline.threads.items()
    }
