"""When enough steps were measured: `timing: adaptive`.

How many steps a cell takes is decided by the steps: warm-up ends when they are steady, measuring when their median is known
well enough. What is decided here is decided by durations alone, so that it can be tried on any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Literal

from tasks.spec.order_statistics import FEWEST, half_width

StoppedBy = Literal["half-width", "out of reach", "steps", "seconds"]

# For steps so short that six are over before clocks have risen: what triton.testing.do_bench takes, 25 ms and then 100 ms.
LEAST_WARM_UP_MS = 25.0
LEAST_MEASURED_MS = 100.0
STEADY = (
    0.02  # what step is not steady yet: slower by more than this than the median of those after it
)
_BETWEEN_LOOKS = 1.5
_MAD_TO_SD = 1.4826  # of normal samples
_MEDIAN_TO_HALF_WIDTH = 1.96 * math.sqrt(
    math.pi / 2
)  # its standard error is this root times that of the mean


@dataclass(frozen=True)
class StopRule:
    """half_width: of the 95 % interval of the median at which to stop, as a fraction of the median. most_steps, most_seconds:
    where to stop all the same, or at once where it is plain that even so many would not do; the seconds are those of the
    steps themselves.
    """

    half_width: float
    most_steps: int
    most_seconds: float


@dataclass
class StepDurations:
    """The durations of the steps after the first one, in ms, as they come, and what they say.

    The interval is looked at when there are 6, 9, 14, 21, 32, 48, 72, … steps, and where they end. Who looks after each step
    stops at the first one at which the interval happens to be narrow: of samples that scatter by 2 % it then holds the median
    92 % of the times, and 94 % with these looks (see tests/tasks/spec/test_stopping.py).
    """

    rule: StopRule
    durations: list[float] = field(default_factory=list)
    stopped_by: StoppedBy | None = None
    _next_look: int = FEWEST

    def add(self, duration_ms: float) -> None:
        self.durations.append(duration_ms)
        self.stopped_by = self._why_stop()

    @property
    def warm_up(self) -> int:
        """How many of the first were warm-up. At least six are left, once so many were taken."""
        return warm_up_steps(self.durations, leaving=FEWEST)

    @property
    def steady(self) -> list[float]:
        return self.durations[self.warm_up :]

    def _why_stop(self) -> StoppedBy | None:
        if self._is_time_to_look():
            if half_width(self._so_far) <= self.rule.half_width:
                return "half-width"
            if steps_needed(self._so_far, self.rule.half_width) > self._affordable:
                return "out of reach"
        limit = self._limit()
        return "half-width" if limit and self._is_known_after_all() else limit

    def _limit(self) -> StoppedBy | None:
        """The one that is reached."""
        taken = len(self.durations) - _before_clocks_rise(self.durations)
        if taken >= self.rule.most_steps:
            return "steps"
        too_long = sum(self.durations) >= 1e3 * self.rule.most_seconds
        return "seconds" if too_long and taken >= FEWEST else None

    def _is_known_after_all(self) -> bool:
        """A last look, which need not be one of those that are due."""
        steady = self._so_far
        enough = len(steady) >= FEWEST and sum(steady) >= LEAST_MEASURED_MS
        return enough and half_width(steady) <= self.rule.half_width

    def _is_time_to_look(self) -> bool:
        if len(self.durations) < self._next_look or sum(self.durations) < LEAST_MEASURED_MS:
            return False  # at once: between short steps nothing else should pass
        steady = self._so_far
        if len(steady) < self._next_look or sum(steady) < LEAST_MEASURED_MS:
            return False
        self._next_look = math.ceil(_BETWEEN_LOOKS * len(steady))
        return True

    @property
    def _so_far(self) -> list[float]:
        return self.durations[warm_up_steps(self.durations, leaving=1) :]

    @property
    def _affordable(self) -> float:
        """How many steps the limits allow."""
        return min(self.rule.most_steps, 1e3 * self.rule.most_seconds / median(self.durations))


def steps_needed(durations_ms: Sequence[float], share: float) -> float:
    """How many such steps it takes until the 95 % interval of their median is this share of it to each side.

    After the standard error of a median of normal samples. How they scatter is read from their median absolute deviation, which
    one step that was held up does not move.
    """
    middle = median(durations_ms)
    scatter = _MAD_TO_SD * median(abs(duration - middle) for duration in durations_ms) / middle
    return (_MEDIAN_TO_HALF_WIDTH * scatter / share) ** 2


def warm_up_steps(durations_ms: Sequence[float], leaving: int) -> int:
    """How many of the first steps are not steady yet, at least `leaving` of them being left.

    Those of the first 25 ms, and all up to the last one until which every step was slower than every step since, and by more
    than 2 % than their median: so it is while caches fill, memory is asked for and clocks rise, and seldom by chance. What
    becomes slower in the end is no warm-up.
    """
    most = max(len(durations_ms) - leaving, 0)
    rising = min(_before_clocks_rise(durations_ms), most)
    fastest = list(accumulate(durations_ms[rising:], min))  # of those up to each
    slowest = list(accumulate(reversed(durations_ms), max))[::-1]  # of those from each on
    for count in range(most, rising, -1):
        before, after = fastest[count - rising - 1], slowest[count]
        if before > after and before > (1 + STEADY) * median(durations_ms[count:]):
            return count
    return rising


def _before_clocks_rise(durations_ms: Sequence[float]) -> int:
    """How many steps are over before so much time has passed."""
    return sum(passed < LEAST_WARM_UP_MS for passed in accumulate(durations_ms))
