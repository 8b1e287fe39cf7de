"""Verdicts on log ratios: Holm's correction, the noise of cells, and symmetries of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.analysis.verdicts import (
    UNKNOWN,
    Noise,
    Rounds,
    RoundsDecision,
    Verdict,
    decide,
    detectable,
    holm,
    noise_of_cells,
    rounds_needed,
)

CALM = Noise(0.004, 30)


def rounds(*percent: float, threshold: float = 0.02, prior: Noise = UNKNOWN) -> Rounds:
    """Return rounds with these changes in percent."""
    return Rounds(tuple(np.log1p(np.array(percent) / 100)), threshold, prior=prior)


def verdict(*percent: float, prior: Noise = UNKNOWN) -> Verdict:
    (decision,) = decide([rounds(*percent, prior=prior)], 0.01)
    return decision.verdict


@pytest.mark.parametrize(
    ("percent", "expected"),
    [
        ((5.0, 5.1, 4.9), Verdict.SLOWER),
        ((-5.0, -5.1, -4.9), Verdict.FASTER),
        ((0.1, 0.0, -0.1), Verdict.SAME),
        ((1.9, 1.9, 1.8), Verdict.SAME),  # real, but below the threshold
        ((5.0,), Verdict.UNDECIDED),  # the noise is not known
        ((0.0,), Verdict.UNDECIDED),
        ((3.0, -1.0, 9.0, 4.0), Verdict.UNDECIDED),  # above the threshold, not significant
        ((10.0, -10.0, 0.0), Verdict.UNDECIDED),  # a change of 4 % cannot be excluded
    ],
)
def test_the_verdict_on_one_cell(percent: tuple[float, ...], expected: Verdict) -> None:
    assert verdict(*percent) is expected


def test_one_round_is_decided_by_noise_that_is_known() -> None:
    assert verdict(5.0, prior=CALM) is Verdict.SLOWER
    assert verdict(0.5, prior=CALM) is Verdict.SAME
    assert verdict(5.0, prior=Noise(0.05, 30)) is Verdict.UNDECIDED


def reference_holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Return Holm's procedure step by step, as in S. Holm, Scand. J. Statist. 6 (1979), p. 66."""
    rejected = [False] * len(p_values)
    remaining = len(p_values)
    for index in sorted(range(len(p_values)), key=lambda one: p_values[one]):
        if p_values[index] > alpha / remaining:
            break
        rejected[index] = True
        remaining -= 1
    return rejected


def test_holm_equals_the_procedure_step_by_step() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 40):
        for _ in range(50):
            p_values = rng.beta(0.2, 1, count)
            assert list(holm(p_values, 0.05)) == reference_holm(list(p_values), 0.05)
    # Bonferroni's correction would reject the first one only.
    assert list(holm(np.array([0.01, 0.02, 0.9]), 0.05)) == [True, True, False]


def families(count: int = 50) -> list[list[Rounds]]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(count):
        sizes = 0.003 * np.exp(rng.normal(size=12))
        effects = rng.choice([0, 0, 0.03, -0.05], 12)
        found.append(
            [
                Rounds(tuple(rng.normal(effect, size, 5)), 0.02)
                for effect, size in zip(effects, sizes, strict=True)
            ]
        )
    return found


def test_mirrored_input_gives_the_mirrored_verdict() -> None:
    mirrored = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    seen = set()
    for cells in families():
        before = [one.verdict for one in decide(cells, 0.01)]
        other = [replace(one, log_ratios=tuple(-x for x in one.log_ratios)) for one in cells]
        after = [one.verdict for one in decide(other, 0.01)]
        assert after == [mirrored.get(one, one) for one in before]
        seen |= set(before)
    assert seen == {Verdict.SLOWER, Verdict.FASTER, Verdict.SAME, Verdict.UNDECIDED}


def test_the_order_of_cells_and_of_rounds_does_not_matter() -> None:
    for cells in families(10):
        verdicts = [one.verdict for one in decide(cells, 0.01)]
        turned = [replace(one, log_ratios=one.log_ratios[::-1]) for one in cells[::-1]]
        assert [one.verdict for one in decide(turned, 0.01)] == verdicts[::-1]


def test_more_cells_make_a_verdict_harder() -> None:
    cell = rounds(2.6, 2.3, 3.1, 2.2)
    assert decide([cell], 0.01)[0].verdict is Verdict.SLOWER
    others = [rounds(0.0, 0.1, threshold=0.02)] * 400
    assert decide([cell, *others], 0.01)[0].verdict is Verdict.UNDECIDED


def test_cells_share_their_noise_if_there_are_eight_with_three_rounds() -> None:
    calm = [Rounds(tuple(0.001 * np.array([1.0, 0.0, -1.0])), 0.02) for _ in range(7)]
    wild = Rounds((0.02, 0.0, -0.02), 0.02)
    own = noise_of_cells([*calm[:6], wild])[-1]
    assert (own.deviation, own.degrees_of_freedom) == (pytest.approx(0.02), 2)
    moderated = noise_of_cells([*calm, wild])[-1]
    assert moderated.deviation < 0.02
    assert moderated.degrees_of_freedom > 2


def test_cells_of_another_kind_or_with_two_rounds_say_nothing_about_the_noise() -> None:
    cells = [Rounds(tuple(0.001 * np.array([1.0, 0.0, -1.0])), 0.02, "step") for _ in range(20)]
    other = Rounds((0.02, 0.0, -0.02), 0.02, "kernels")
    assert noise_of_cells([*cells, other])[-1].degrees_of_freedom == 2
    twice = Rounds((0.02, 0.0), 0.02, "step")
    assert noise_of_cells([*cells, twice])[-1].degrees_of_freedom == 1


def test_cells_with_equal_noise_add_at_most_60_degrees_of_freedom() -> None:
    cells = [Rounds(tuple(0.001 * np.array([1.0, 0.0, -1.0])), 0.02) for _ in range(200)]
    assert noise_of_cells(cells)[0].degrees_of_freedom == 62


def test_equal_rounds_do_not_prove_that_there_is_no_noise() -> None:
    (decision,) = decide([rounds(0.0, 0.0, 0.0)], 0.01)
    assert decision.noise.deviation > 0
    assert decision.half_width > 0


def test_the_rounds_needed_are_enough_and_not_too_many() -> None:
    noise = Noise(0.02, 4)
    needed = rounds_needed(noise, 0.02, 40, 0.01)
    assert 10 < needed < 60
    assert rounds_needed(Noise(0.04, 4), 0.02, 40, 0.01) > needed
    assert rounds_needed(Noise(0.0001, 4), 0.02, 40, 0.01) == 2


def test_a_change_that_is_called_detectable_is_found_in_nine_of_ten_cases() -> None:
    """With ten equal cells, whose noise is known well."""
    rng = np.random.default_rng(0)
    deviation, found = 0.004, []
    decision = RoundsDecision(Verdict.SAME, 0.0, 0.0, Noise(deviation, 60))
    for _ in range(400):
        logs = rng.normal(0, deviation, (10, 5))
        first = decide([Rounds(tuple(row), 0.02) for row in logs], 0.01)[0]
        decision = replace(decision, half_width=first.half_width)
        logs[0] += np.log1p(detectable(decision, 5, 0.02))
        found.append(decide([Rounds(tuple(row), 0.02) for row in logs], 0.01)[0].verdict)
    assert found.count(Verdict.SLOWER) / len(found) == pytest.approx(0.9, abs=0.05)


def test_nothing_to_decide_is_no_error() -> None:
    assert decide([], 0.01) == []
