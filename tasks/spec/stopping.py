"""Adaptive timing: decides when enough steps were measured.

Warm-up ends when the steps are steady, and measuring ends when their median is known well enough.
The decisions depend on durations only, so that tests can try them on any sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Literal

from tasks.spec.order_statistics import FEWEST, half_width
from tasks.spec.parameters import StopRule

StoppedBy = Literal["half-width", "out of reach", "steps", "seconds", "beaten"]

# Without these, six very short steps would end before the GPU's clocks have risen. The values are
# those of triton.testing.do_bench: 25 ms of warm-up, then 100 ms.
LEAST_WARM_UP_MS = 25.0
LEAST_MEASURED_MS = 100.0
# A step is not steady yet if it is slower than the median of the later ones by more than this
# share.
STEADY = 0.02
# Growth of the number of steps between two looks at the interval. Looking after each step would
# stop at the first step at which the interval happens to be narrow: for samples with 2 % scatter it
# would then cover the median in 92 % of cases, and in 94 % with these looks
# (tests/tasks/spec/test_stopping.py).
_BETWEEN_LOOKS = 1.5
# A cell ends after this number of steady steps if each is slower than this factor times the limit.
# If the median of independent steps were below it, the chance of five slower ones would be 1 in 32.
# Of 33,587 published pairs of neighbouring steps, 12 took more than twice the median of their cell,
# all of them less than 60 ms.
_BEATEN = ((2, 2.0), (5, 1.0))
_MAD_TO_SD = 1.4826  # standard deviation over median absolute deviation, of normal samples
# Half-width of a 95 % interval of the median over the samples' standard deviation, times √n: the
# standard error of a median of normal samples is √(π/2) times that of the mean.
_MEDIAN_TO_HALF_WIDTH = 1.96 * math.sqrt(math.pi / 2)


@dataclass
class StepDurations:
    """Durations of the steps after the first one, in ms, and the decision to stop.

    The interval is examined when there are 6, 9, 14, 21, 32, 48, 72, … steps, and at the end.
    beaten_ms: measuring also ends when five steady steps take longer, or two more than twice as long.
    """

    rule: StopRule
    beaten_ms: float | None = None
    durations: list[float] = field(default_factory=list)
    stopped_by: StoppedBy | None = None
    _next_look: int = FEWEST

    def add(self, duration_ms: float) -> None:
        self.durations.append(duration_ms)
        self.stopped_by = self._stop_reason()

    @property
    def warm_up(self) -> int:
        """Number of first steps that are warm-up, such that at least six others remain.

        A beaten cell has fewer: those that were slower than its limit.
        """
        fewest = 1 if self.stopped_by == "beaten" else FEWEST
        return warm_up_steps(self.durations, leaving=fewest)

    @property
    def steady(self) -> list[float]:
        return self.durations[self.warm_up :]

    def _stop_reason(self) -> StoppedBy | None:
        if self.beaten_ms is not None and self._is_beaten(self.beaten_ms):
            return "beaten"
        if self._is_time_to_look():
            if half_width(self._so_far) <= self.rule.half_width:
                return "half-width"
            if steps_needed(self._so_far, self.rule.half_width) > self._affordable:
                return "out of reach"
        limit = self._limit()
        # At a limit no regular look may be due, but the interval may be narrow enough.
        if limit and self._is_narrow_at_the_end():
            return "half-width"
        return limit

    def _is_beaten(self, limit_ms: float) -> bool:
        return any(self._are_slower(count, factor * limit_ms) for count, factor in _BEATEN)

    def _are_slower(self, count: int, limit_ms: float) -> bool:
        """Return True if there are `count` steady steps and all are slower than the limit."""
        # This check comes first because it is cheap.
        last = self.durations[-count:]
        if len(last) < count or min(last) <= limit_ms:
            return False
        steady = self._so_far
        enough = len(steady) >= count and sum(steady) >= LEAST_MEASURED_MS
        return enough and min(steady) > limit_ms

    def _limit(self) -> StoppedBy | None:
        measured = len(self.durations) - _before_clocks_rise(self.durations)
        if measured >= self.rule.most_steps:
            return "steps"
        is_too_long = sum(self.durations) >= 1e3 * self.rule.most_seconds
        if is_too_long and measured >= FEWEST:
            return "seconds"
        return None

    def _is_narrow_at_the_end(self) -> bool:
        steady = self._so_far
        enough = len(steady) >= FEWEST and sum(steady) >= LEAST_MEASURED_MS
        return enough and half_width(steady) <= self.rule.half_width

    def _is_time_to_look(self) -> bool:
        # This check comes first because it is cheap: between short steps nothing may take time.
        if len(self.durations) < self._next_look or sum(self.durations) < LEAST_MEASURED_MS:
            return False
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
        """Number of steps that the limits allow."""
        return min(self.rule.most_steps, 1e3 * self.rule.most_seconds / median(self.durations))


def steps_needed(durations_ms: Sequence[float], share: float) -> float:
    """Return how many steps give a half-width of `share` of the median, with 95 % confidence.

    Uses the standard error of a median of normal samples.
    """
    middle = median(durations_ms)
    # A single interrupted step does not change the median absolute deviation.
    scatter = _MAD_TO_SD * median(abs(duration - middle) for duration in durations_ms) / middle
    return (_MEDIAN_TO_HALF_WIDTH * scatter / share) ** 2


def warm_up_steps(durations_ms: Sequence[float], leaving: int) -> int:
    """Return how many of the first steps are not steady yet, such that at least `leaving` remain.

    These are the steps of the first 25 ms, and all up to the last one until which every step was
    slower than every later step, and by more than 2 % than the later steps' median. Steps look like
    this while caches fill, memory is allocated and clocks rise, and seldom by chance. Steps that
    become slower towards the end are not warm-up.
    """
    most = max(len(durations_ms) - leaving, 0)
    rising = min(_before_clocks_rise(durations_ms), most)
    fastest = list(accumulate(durations_ms[rising:], min))  # of the steps up to each one
    slowest = list(accumulate(reversed(durations_ms), max))[::-1]  # of the steps from each one on
    for count in range(most, rising, -1):
        before, after = fastest[count - rising - 1], slowest[count]
        if before > after and before > (1 + STEADY) * median(durations_ms[count:]):
            return count
    return rising


def _before_clocks_rise(durations_ms: Sequence[float]) -> int:
    """Return how many steps end within the first 25 ms."""
    return sum(passed < LEAST_WARM_UP_MS for passed in accumulate(durations_ms))
