from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat

import pytest

from tasks.spec import stopping
from tasks.spec.order_statistics import half_width, median_rank
from tasks.spec.parameters import StopRule
from tasks.spec.stopping import StepDurations, warm_up_steps

RULE = StopRule(half_width=0.01, most_steps=100, most_seconds=1e9)
TRIALS = 600


def measured(
    durations_ms: Iterable[float], rule: StopRule = RULE, beaten_ms: float | None = None
) -> StepDurations:
    steps = StepDurations(rule, beaten_ms)
    for duration in durations_ms:
        steps.add(duration)
        if steps.stopped_by:
            return steps
    raise AssertionError("it never stops")


@pytest.mark.parametrize(
    ("durations_ms", "beaten_ms", "ended"),
    [
        (repeat(100.0), 99.0, ("beaten", 5, 0)),
        (repeat(100.0), 100.0, ("half-width", 6, 0)),
        (chain([99.0], repeat(100.0)), 99.5, ("half-width", 6, 0)),
        # What is slow before the steady state says nothing, and five others are needed.
        (chain([900.0, 700.0], repeat(100.0)), 99.0, ("beaten", 7, 2)),
        (chain([900.0, 700.0], repeat(90.0)), 99.0, ("half-width", 8, 2)),
        # The clocks rise in the first 25 ms, and 100 ms follow.
        (repeat(5.0), 4.0, ("beaten", 24, 4)),
        # Two steps that are far slower are enough, if they are steady and last 100 ms.
        (repeat(100.0), 49.0, ("beaten", 2, 0)),
        (repeat(100.0), 50.0, ("beaten", 5, 0)),
        (chain([900.0, 700.0], repeat(100.0)), 49.0, ("beaten", 4, 2)),
        (repeat(30.0), 14.0, ("beaten", 4, 0)),
    ],
)
def test_a_cell_of_which_all_steady_steps_are_slower_is_beaten(
    durations_ms: Iterable[float], beaten_ms: float, ended: tuple[str, int, int]
) -> None:
    steps = measured(durations_ms, beaten_ms=beaten_ms)
    assert (steps.stopped_by, len(steps.durations), steps.warm_up) == ended


def jumping(sd: float) -> Iterator[float]:
    """Around 100 ms, and beyond any half-width below `sd`."""
    return chain.from_iterable(repeat([100 * (1 + sd), 100 * (1 - sd)]))


def test_steady_timings_stop_after_six_steps() -> None:
    steps = measured(chain.from_iterable(repeat([100.0, 100.4, 99.6])))
    assert (steps.stopped_by, len(steps.durations), steps.warm_up) == ("half-width", 6, 0)


def test_noise_takes_more_up_to_the_limits() -> None:
    """Of samples of two values the interval is as wide as they are apart, however many there are."""
    assert len(measured(jumping(0.02)).durations) == 100
    assert measured(jumping(0.02)).stopped_by == "steps"
    short = measured(jumping(0.011), StopRule(0.01, 100, 2.0))
    assert (short.stopped_by, len(short.durations)) == ("seconds", 20)
    assert (
        len(measured(jumping(0.05), StopRule(0.01, 100, 0.05)).durations) == 6
    )  # fewer have no interval
    assert measured(jumping(0.05), StopRule(0.06, 100, 2.0)).stopped_by == "half-width"


@pytest.mark.parametrize(("most_steps", "most_seconds"), [(13, 1e9), (100, 1.3)])
def test_a_half_width_reached_at_the_last_step_is_not_reported_as_a_limit(
    most_steps: int, most_seconds: float
) -> None:
    """The next look would be after the fourteenth. Four in thirteen are held up or fast: outside of the interval."""
    durations = [100.0, 104.0, 100.0, 96.0, 100.0, 100.0, 104.0, 100.0, 96.0, *repeat(100.0, 4)]
    steps = measured(durations, StopRule(0.01, most_steps, most_seconds))
    assert (steps.stopped_by, len(steps.durations)) == ("half-width", 13)
    unknown = measured([*durations[:-1], 104.0], StopRule(0.01, most_steps, most_seconds))
    assert unknown.stopped_by == ("steps" if most_steps == 13 else "seconds")


def test_timing_stops_early_if_the_half_width_is_out_of_reach() -> None:
    noisy = measured(jumping(0.05))  # 330 steps would do, were it normal noise
    assert (noisy.stopped_by, len(noisy.durations)) == ("out of reach", 6)
    assert measured(jumping(0.05), StopRule(0.01, 400, 1e9)).stopped_by == "steps"
    assert (
        measured(jumping(0.05), StopRule(0.01, 400, 20.0)).stopped_by == "out of reach"
    )  # 200 steps


def test_one_step_that_was_held_up_is_no_noise() -> None:
    held_up = measured([100.0, 100.2, 150.0, *[99.9, 100.1] * 10])
    assert (held_up.stopped_by, len(held_up.durations)) == ("half-width", 9)


def test_the_interval_is_looked_at_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        stopping, "half_width", lambda steady: looks.append(len(steady)) or half_width(steady)
    )
    measured(jumping(0.02))
    assert looks == [6, 9, 14, 21, 32, 48, 72, 100]  # the last where the steps end


@pytest.mark.parametrize(
    ("first", "warm_up"),
    [
        ([], 0),
        ([140.0], 1),
        ([300.0, 310.0, 180.0, 103.0], 4),  # the second slower than the first
        ([101.5], 0),  # as near as steady ones are to each other
        ([60.0], 0),  # faster is no warm-up
    ],
)
def test_warm_up_is_what_is_slower_than_all_since(first: list[float], warm_up: int) -> None:
    steps = measured([*first, *[100.0, 100.2, 99.9] * 10])
    assert steps.warm_up == warm_up
    assert steps.steady == steps.durations[warm_up:]
    assert len(steps.steady) >= 6


def test_short_steps_last_until_clocks_have_risen() -> None:
    steps = measured(repeat(4.0))
    assert steps.warm_up == 6  # those of the first 25 ms
    assert sum(steps.steady) >= 100.0
    tiny = measured(repeat(0.1))  # so short that 25 ms hold more than the most steps
    assert tiny.stopped_by == "steps"
    assert len(tiny.steady) == 100


def test_timings_that_never_become_steady_stop_after_100_steps() -> None:
    steps = measured(1e6 * 0.9**step for step in range(1000))
    assert (steps.stopped_by, len(steps.durations), len(steps.steady)) == ("steps", 100, 6)


def test_one_fast_step_at_the_end_is_no_end_of_a_warm_up() -> None:
    assert warm_up_steps([*[100.0, 101.0] * 10, 50.0], leaving=6) == 0


@pytest.mark.parametrize(
    ("sd", "covered", "steps"),
    [(0.003, 0.969, 6), (0.02, 0.943, 39), (0.03, 0.95, 57), (0.06, 0.969, 10)],
)
def test_the_interval_at_the_stop_still_covers_the_median(
    sd: float, covered: float, steps: int
) -> None:
    """By simulation, lognormal: where it is reached, about to be given up, and given up. Looking after every step it would
    be 0.92 of samples that scatter by 2 %."""
    draw = noise(random.Random(1), sd)
    found = [measured(draw() for _ in repeat(0)) for _ in range(TRIALS)]
    assert sum(covers(one.steady, 100.0) for one in found) / TRIALS == pytest.approx(
        covered, abs=0.025
    )
    assert sum(len(one.steady) for one in found) / TRIALS == pytest.approx(steps, rel=0.1)


def noise(chance: random.Random, sd: float) -> Callable[[], float]:
    return lambda: 100 * math.exp(chance.gauss(0, sd))


def covers(samples: list[float], true: float) -> bool:
    ordered, rank = sorted(samples), median_rank(len(samples))
    return ordered[rank - 1] <= true <= ordered[-rank]
