from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planning.cell_decisions import make_plan
from orchestrator.planning.invocation import RunOptions
from orchestrator.store.cell_state import PENDING, CellState
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tests.support.fake_sweep import state_of

S = Status


DEFAULT = RunOptions()


def cell(**params: Any) -> Cell:
    return make_cell("train_step", {"size": "tiny", "device": "cpu", **params})


def decide(
    past: tuple[Status, ...], choice: RunOptions = DEFAULT, attempts: int = 3
) -> tuple[bool, str]:
    one = cell()
    decision = make_plan([one], {one.id: state_of(past)}, choice, attempts).decisions[0]
    return decision.repetitions > 0, decision.reason


@pytest.mark.parametrize("status", [S.FAILED, S.CRASHED, S.TIMEOUT, S.HOST_OOM, S.LOST])
def test_what_failed_is_tried_again(status: Status) -> None:
    assert decide((status,)) == (True, f"retry: was {status}")


@pytest.mark.parametrize("status", [S.OK, S.OOM, S.SKIPPED])
def test_a_cell_that_is_ok_oom_or_skipped_is_not_measured_again(status: Status) -> None:
    assert decide((status,)) == (False, f"done: {status}")
    assert decide((S.FAILED, status)) == (False, f"done: {status}")


def test_retry_cpu_contended_measures_only_such_cells_again() -> None:
    one, other = cell(), cell(batch_size=2)
    history = {
        one.id: state_of((S.OK,), flags={"cpu-contended"}),
        other.id: state_of((S.OK,)),
    }
    assert make_plan([one, other], history, DEFAULT, 3).to_run == []
    plan = make_plan([one, other], history, RunOptions(retry=frozenset({"cpu-contended"})), 3)
    assert plan.to_run == [one]
    assert (plan.decisions[0].reason, plan.decisions[0].is_marked) == (
        "retry: was cpu-contended",
        True,
    )
    assert (
        make_plan([one, other], history, RunOptions(retry=frozenset({"interval-wide"})), 3).to_run
        == []
    )


def test_a_success_that_was_replaced_is_no_repetition() -> None:
    one = cell()
    history = {one.id: state_of((S.OK, S.OK, S.CRASHED), marks=(1,))}
    decision = make_plan([one], history, RunOptions(repeat=3), 3).decisions[0]
    assert (decision.repetitions, decision.is_marked, decision.reason) == (
        2,
        False,
        "repeat: measured 1 of 3 times",
    )


@pytest.mark.parametrize(
    "choice", [RunOptions(retry=frozenset({"ok"}), repeat=3), RunOptions(fresh=True, repeat=3)]
)
def test_a_cell_measured_again_gets_the_requested_number_of_repetitions(choice: RunOptions) -> None:
    one = cell()
    decision = make_plan([one], {one.id: state_of((S.OK,))}, choice, 3).decisions[0]
    assert (decision.repetitions, decision.is_marked) == (3, True)
    # A cell that failed is marked too, so that earlier failures no longer count.
    failed = make_plan([one], {one.id: state_of((S.FAILED,))}, choice, 3).decisions[0]
    assert failed.is_marked == choice.fresh


@pytest.mark.parametrize(
    ("choice", "flags", "repetitions", "is_marked"),
    [
        (
            RunOptions(retry=frozenset({"cpu-contended"})),
            {"cpu-contended"},
            3,
            True,
        ),  # no less often than before
        (
            RunOptions(only=frozenset({"ok"}), retry=frozenset({"cpu-contended"})),
            {"cpu-contended"},
            3,
            True,
        ),
        (RunOptions(only=frozenset({"ok"}), retry=frozenset({"cpu-contended"})), set(), 0, False),
        (RunOptions(only=frozenset({"ok"}), repeat=3), set(), 3, True),
        (RunOptions(only=frozenset({"ok"}), repeat=5), set(), 2, False),
        (RunOptions(only=frozenset({"ok"}), fresh=True, repeat=5), set(), 5, True),
    ],
)
def test_repetitions_are_kept_in_number(
    choice: RunOptions, flags: set[str], repetitions: int, is_marked: bool
) -> None:
    one = cell()
    history = {one.id: state_of((S.OK,) * 3, flags=flags)}
    decision = make_plan([one], history, choice, 3).decisions[0]
    assert (decision.repetitions, decision.is_marked) == (repetitions, is_marked)


def test_up_to_the_limit_of_attempts() -> None:
    assert decide((S.FAILED, S.CRASHED))[0]
    run, reason = decide((S.FAILED, S.CRASHED, S.TIMEOUT))
    assert not run
    assert "given up after 3 attempts: timeout" in reason
    assert decide((S.FAILED, S.CRASHED, S.TIMEOUT), RunOptions(retry=frozenset({"timeout"})))[0]


def test_lost_attempts_do_not_count() -> None:
    assert decide((S.LOST,) * 7)[0]


def test_a_success_is_never_overshadowed() -> None:
    assert state_of((S.OK, S.CRASHED)).status == S.OK
    assert state_of((S.OOM, S.LOST)).status == S.OOM
    assert CellState().status == PENDING


@pytest.mark.parametrize(
    ("choice", "past", "runs"),
    [
        (RunOptions(retry=frozenset({"oom"})), (S.OOM,), True),
        (RunOptions(retry=frozenset({"oom"})), (S.OK,), False),
        (RunOptions(only=frozenset({"failed"})), (), False),
        (RunOptions(only=frozenset({"failed"})), (S.FAILED,), True),
        (RunOptions(only=frozenset({"failed"})), (S.CRASHED,), False),
        (RunOptions(only=frozenset({PENDING})), (), True),
        (RunOptions(only=frozenset({"oom"})), (S.OOM,), True),
        (RunOptions(only=frozenset({"crashed"})), (S.CRASHED,) * 9, True),
        (RunOptions(fresh=True), (S.OK,), True),
        (RunOptions(fresh=True, only=frozenset({"oom"})), (S.OK,), False),
    ],
)
def test_retry_only_and_fresh_decide_which_cells_are_measured(
    choice: RunOptions, past: tuple[Status, ...], runs: bool
) -> None:
    assert decide(past, choice)[0] is runs


def test_repetitions_come_in_rounds_and_count_what_is_there() -> None:
    first, second, oom = (
        cell(context_length=128),
        cell(context_length=512),
        cell(context_length=1024),
    )
    history = {first.id: state_of((S.OK,)), oom.id: state_of((S.OOM,))}
    plan = make_plan([first, second, oom], history, RunOptions(repeat=3), 3)
    assert plan.to_run == [first, second, first, second, second]
    assert plan.decisions[0].reason == "repeat: measured 1 of 3 times"
    assert (
        make_plan([first], {first.id: state_of((S.OK,) * 3)}, RunOptions(repeat=3), 3).to_run == []
    )
