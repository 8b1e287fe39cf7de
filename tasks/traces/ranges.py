"""Recognise phases, steps and warm-up among the ranges of a trace, whose names users choose.

The ranges of a program enter; its phases, modules and the number of steps leave. A name counts by
its words: `Forward Pass`, `forward_3` and `fwd` are the same phase.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from tasks.traces.parts import OPTIMIZER, PHASE_PREFIX
from tasks.traces.timeline import PhaseSpan, ThreadId, Timeline, TraceSpan

# Words that name a phase. All words of a range, without the others below, must belong to one phase.
_PHASE_WORDS: Mapping[str, frozenset[str]] = {
    "forward": frozenset({"forward", "forwards", "fwd", "fw", "forwardpass"}),
    "backward": frozenset({
        "backward", "backwards", "bwd", "bw", "backprop", "backpropagation", "backwardpass",
    }),
    OPTIMIZER: frozenset({
        "optimizer", "optimiser", "optim", "opt", "adam", "adamw", "sgd", "update",
    }),
}  # fmt: skip
PHASE_NAMES = tuple(_PHASE_WORDS)
_ALL_PHASE_WORDS = frozenset().union(*_PHASE_WORDS.values())
_STEP_WORDS = frozenset({"step", "iteration", "iter"})
_OTHER_WORDS = _STEP_WORDS | {
    "a", "and", "batch", "call", "compute", "full", "loss", "mb", "micro", "microbatch",
    "model", "of", "parameter",
    "parameters", "params", "pass", "phase", "profiler", "range", "region", "run", "section", "steps", "the", "time", "total",
    "train", "training", "w", "weight", "weights",
}  # fmt: skip
# Names that torch writes; the class of an optimizer and the wrapper of a model are part of them.
_TORCH_NAMES = (
    (re.compile(r"Optimizer\.step#"), OPTIMIZER),
    (re.compile(r"\w*DataParallel\.forward$"), "forward"),
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Range(NamedTuple):
    """A named range of a thread of the host."""

    text: str
    start_ns: int
    end_ns: int
    thread: ThreadId


@dataclass(frozen=True)
class Ranges:
    """The ranges of one process, sorted by what they are.

    phases: without those inside of another one or outside of the counted steps. parts: ranges that contain no phase. warmups:
    ranges of warm-up; nothing else lies in one of them. steps: number of steps, None if unknown.
    is_own: the instruments of this program wrote ranges.
    """

    phases: Sequence[PhaseSpan]
    parts: Sequence[Range]
    warmups: Sequence[Range]
    steps: int | None
    is_own: bool

    def is_warmup(self, at_ns: int) -> bool:
        """Return True for a moment of the warm-up."""
        index = bisect_right(self.warmups, at_ns, key=lambda warmup: warmup.start_ns) - 1
        return index >= 0 and at_ns <= self.warmups[index].end_ns


class DeviceTrace(NamedTuple):
    """The work of one process on one GPU, and the ranges of that process.

    is_guess: other processes have the same ids. The order in time alone separates their work, or
    nothing does.
    """

    timeline: Timeline
    ranges: Ranges
    is_guess: bool = False


@lru_cache(maxsize=4096)
def _words(text: str) -> tuple[str, ...]:
    return tuple(map(str.lower, _WORD.findall(text)))


def phase_of(text: str, chosen: Mapping[str, str]) -> str:
    """Return the phase that a range is, or an empty text. chosen: phases by the name of a range."""
    if text.startswith(PHASE_PREFIX):
        return text.removeprefix(PHASE_PREFIX)
    for name, phase in chosen.items():
        if text == name or (_words(name) and _words(text) == _words(name)):
            return phase
    for pattern, phase in _TORCH_NAMES:
        if pattern.match(text):
            return phase
    words = set(_words(text)) - _OTHER_WORDS
    for phase, names in _PHASE_WORDS.items():
        if words and words <= names:
            return phase
    return ""


def _is_step(text: str) -> bool:
    words = set(_words(text))
    return bool(words & _STEP_WORDS) and words <= _OTHER_WORDS


def _is_warmup(text: str) -> bool:
    words = set(_words(text))
    has_word = "warmup" in words or {"warm", "up"} <= words
    return has_word and words <= _OTHER_WORDS | _ALL_PHASE_WORDS | {"warmup", "warm", "up"}


def sort_ranges(
    ranges: Iterable[Range],
    chosen: Mapping[str, str],
    backward: Iterable[Range | TraceSpan] = (),
) -> Ranges:
    """Sort the ranges of one process.

    chosen: phases by the name of a range. backward: nodes of the backward pass; empty if unknown.
    """
    in_order = sorted(ranges, key=lambda one: (one.start_ns, -one.end_ns))
    is_own = any(one.text.startswith(PHASE_PREFIX) for one in in_order)
    phases: list[PhaseSpan] = []
    steps: list[Range] = []
    warmups: list[Range] = []
    parts: list[Range] = []
    updates: list[Range] = []
    for one in in_order:
        phase = phase_of(one.text, chosen)
        if warmups and one.start_ns <= warmups[-1].end_ns:
            continue
        if _is_warmup(one.text):
            warmups.append(one)
        elif phase:
            # The outermost range counts: torch puts its own range into a user's optimizer step,
            # and a forward pass inside of the backward pass is a recomputation.
            if not phases or one.end_ns > phases[-1].end_ns:
                phases.append(PhaseSpan(phase, one.start_ns, one.end_ns))
                if phase == OPTIMIZER:
                    updates.append(one)
        elif _is_step(one.text):
            if not steps or one.end_ns > steps[-1].end_ns:
                steps.append(one)
        else:
            parts.append(one)
    starts = [phase.start_ns for phase in phases]
    parts = [one for one in parts if not _contains_phase(one, phases, starts)]
    if not steps and updates and len(updates) == len(phases):
        nodes = sorted((node.start_ns, node.end_ns) for node in backward)
        return Ranges(phases, parts, warmups, _count_steps(updates, nodes), is_own)
    complete, count = _of_complete_steps(phases, steps)
    return Ranges(complete, parts, warmups, count, is_own)


def _contains_phase(one: Range, phases: Sequence[PhaseSpan], starts: Sequence[int]) -> bool:
    """Return True for a range around phases, such as `Benchmarking Phase`, which is no module."""
    index = bisect_left(starts, one.start_ns)
    return index < len(phases) and phases[index].end_ns <= one.end_ns


def _count_steps(updates: Sequence[Range], nodes: Sequence[tuple[int, int]]) -> int | None:
    """Return the number of steps in which optimizers ran, if it is known.

    A step may have several optimizers, of one class or of many.

    nodes: begin and end of the nodes of the backward pass, in order.
    """
    counts: Counter[tuple[str, ...]] = Counter()  # by the words of their ranges
    numbers: dict[tuple[str, ...], int] = {}  # of the nodes before the last update of these words
    for update in updates:
        number = bisect_right(nodes, update.start_ns, key=lambda node: node[0])
        if number and nodes[number - 1][1] >= update.end_ns:
            return None  # each parameter is updated as soon as it has its gradient
        words = _words(update.text)
        if not nodes or numbers.get(words) != number:
            counts[words] += 1
        numbers[words] = number
    return max(counts.values())


def _of_complete_steps(
    phases: Sequence[PhaseSpan], steps: Sequence[Range]
) -> tuple[Sequence[PhaseSpan], int | None]:
    """Return the phases of complete steps, and the number of these steps if it is known."""
    if steps:
        return _within(phases, steps), len(steps)
    counts = Counter(phase.name for phase in phases)
    if counts[OPTIMIZER]:
        by_step = _split_after_updates(phases)
        return list(chain(*by_step)), len(by_step)
    is_known = len(set(counts.values())) == 1 and counts["forward"] > 0
    return phases, counts["forward"] if is_known else None


def _within(phases: Sequence[PhaseSpan], steps: Sequence[Range]) -> list[PhaseSpan]:
    """Return the phases that begin in a step.

    A phase that never does stays: the range of a user's `step` may be around the optimizer alone.
    """
    starts = [step.start_ns for step in steps]
    inside = []
    for phase in phases:
        index = bisect_right(starts, phase.start_ns) - 1
        if index >= 0 and phase.start_ns <= steps[index].end_ns:
            inside.append(phase)
    names = {phase.name for phase in inside}
    others = [phase for phase in phases if phase.name not in names]
    return sorted(inside + others, key=lambda phase: phase.start_ns)


def _split_after_updates(phases: Sequence[PhaseSpan]) -> list[list[PhaseSpan]]:
    """Return the phases of each complete step, which ends with one or several optimizers.

    Micro-batches repeat the other phases in a step. The trace may begin or end within a step.
    """
    steps: list[list[PhaseSpan]] = [[]]
    for phase in phases:
        if steps[-1] and steps[-1][-1].name == OPTIMIZER != phase.name:
            steps.append([])
        steps[-1].append(phase)
    if steps[-1][-1].name != OPTIMIZER:
        steps.pop()
    if len(steps) > 1 and len(steps[0]) < len(steps[1]):
        return steps[1:]
    return steps
