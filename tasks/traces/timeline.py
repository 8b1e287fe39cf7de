"""The contents of a trace, independent of its format. Times are ns on one clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ThreadId = int | str

_LATEST_NS = 2**62
_LONGEST_NS = 24 * 3600 * 10**9  # of one kernel, operator or range: sums of them fit 63 bits
# Spans within one another are calls of Python, which allows 1,000. The search for the innermost
# span takes a step for each.
_DEEPEST = 2000


def checked_times(start_ns: object, end_ns: object) -> tuple[int, int]:
    """Return a start and an end. Raise ValueError for times that nothing can have."""
    if (
        isinstance(start_ns, int)
        and isinstance(end_ns, int)
        and abs(start_ns) < _LATEST_NS
        and 0 <= end_ns - start_ns <= _LONGEST_NS
    ):
        return start_ns, end_ns
    raise ValueError(f"a span of time in it is invalid: {start_ns!r} to {end_ns!r} ns")


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals, given as start and end: overlaps count once."""
    covered_ns, reached_ns = 0, -_LATEST_NS
    for start_ns, end_ns in sorted(intervals):
        covered_ns += max(0, end_ns - max(start_ns, reached_ns))
        reached_ns = max(reached_ns, end_ns)
    return covered_ns


class PhaseSpan(NamedTuple):
    """One occurrence of a phase."""

    name: str
    start_ns: int
    end_ns: int


# The range of a node of the backward pass, with the work of autograd for it.
BACKWARD_NODE = "autograd::engine::evaluate_function"


class TraceSpan(NamedTuple):
    """An operator of torch, or a part of the model, that a thread of the host executed."""

    name: str
    is_operator: bool  # else a part: a range around a module, or around a function that is a part
    start_ns: int
    end_ns: int
    # The number that a forward operator shares with its operators of the backward pass.
    sequence: int | None = None
    is_backward: bool = False


class Launch(NamedTuple):
    """The launch of a piece of work: the host's thread and the time."""

    thread: ThreadId
    at_ns: int


class Activity(NamedTuple):
    """A kernel, copy or fill on the device."""

    name: str
    start_ns: int
    end_ns: int
    # None if the trace does not contain it: 11 % of the activities in one of four GPU traces.
    launch: Launch | None

    @property
    def begun_ns(self) -> int:
        """The moment of the launch, or of the start if the launch is unknown."""
        return self.launch.at_ns if self.launch else self.start_ns


class Thread:
    """The spans of one thread of the host, in the order of their starts. Spans nest.

    The lists have an index into `spans` for each span, or -1. around: the span that contains
    it; part, operator and backward: the innermost span of that kind, which may be the span itself.
    """

    def __init__(self, spans: Iterable[TraceSpan]) -> None:
        # Of spans that start together, the longer one contains the other.
        self.spans = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
        self.around: list[int] = []
        self.part: list[int] = []
        self.operator: list[int] = []
        self.backward: list[int] = []
        self._starts = [span.start_ns for span in self.spans]
        inside: list[tuple[int, int]] = []  # index and end of the spans around, innermost last
        for index, (_, is_operator, start_ns, end_ns, _, is_backward) in enumerate(self.spans):
            while inside and inside[-1][1] <= start_ns:
                inside.pop()
            around = part = operator = backward = -1
            if inside:
                around = inside[-1][0]
                part, operator = self.part[around], self.operator[around]
                backward = self.backward[around]
            if is_operator:
                operator = index
            else:
                part = index
            if is_backward:
                backward = index
            self.around.append(around)
            self.part.append(part)
            self.operator.append(operator)
            self.backward.append(backward)
            inside.append((index, end_ns))
            if len(inside) > _DEEPEST:
                raise ValueError(
                    f"more than {_DEEPEST} operators and ranges in it lie in each other"
                )

    def innermost(self, at_ns: int) -> int:
        """Return the index of the innermost span at a moment, or -1."""
        index = bisect_right(self._starts, at_ns) - 1
        while index >= 0 and self.spans[index].end_ns < at_ns:
            index = self.around[index]
        return index


class Timeline:
    """A trace. Without device activities it is a CPU trace, in which the operators are the work."""

    def __init__(
        self,
        phases: Iterable[PhaseSpan],
        spans: Mapping[ThreadId, Iterable[TraceSpan]],
        activities: Iterable[Activity],
        on_device: bool,
    ) -> None:
        self.phases = sorted(phases, key=lambda phase: phase.start_ns)
        self.threads = {thread: Thread(of_thread) for thread, of_thread in spans.items()}
        self.activities = list(activities)
        self.on_device = on_device
        self._phase_starts = [phase.start_ns for phase in self.phases]

    def phase_at(self, at_ns: int) -> tuple[str, int]:
        """Return the phase at a moment on any thread, and its index."""
        # Containment in time is enough: the main thread waits in `backward` while autograd's works.
        index = bisect_right(self._phase_starts, at_ns) - 1
        if index >= 0 and at_ns <= self.phases[index].end_ns:
            return self.phases[index].name, index
        return "", -1

    def phase_totals(self) -> Mapping[str, int]:
        """Return the total duration of each phase on the host in ns."""
        totals: Counter[str] = Counter()
        for phase in self.phases:
            totals[phase.name] += phase.end_ns - phase.start_ns
        return totals

    def forward_operators(self) -> Mapping[int, tuple[Thread, int]]:
        """Return the forward operator of each sequence number, as a thread and an index."""
        # Several operators may share a number: those that dispatch to others, and those that save
        # nothing for the backward pass. The one that began last owns the backward operators: this
        # agreed with Kineto's own forward-backward arrows in 905 of 905 cases.
        owners: dict[int, tuple[Thread, int]] = {}
        begun: dict[int, int] = defaultdict(lambda: -1)
        for thread in self.threads.values():
            for index, span in enumerate(thread.spans):
                number = span.sequence
                if number is None or span.is_backward or span.start_ns < begun[number]:
                    continue
                owners[number], begun[number] = (thread, index), span.start_ns
        return owners
