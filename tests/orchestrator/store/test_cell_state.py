"""Which attempts of a cell count, and which one is shown."""

from __future__ import annotations

import pytest

from orchestrator.store.cell_state import PENDING, CellState, StoredAttempt, states_of
from orchestrator.store.run import INCOMPLETE
from tasks.spec.status import Status
from tests.support.fake_sweep import state_of

S = Status


@pytest.mark.parametrize(
    ("statuses", "shown"),
    [
        ([S.OK, S.CRASHED], 1),
        ([S.OK, S.OK, S.OOM], 2),
        ([S.OOM, S.LOST], 1),
        ([S.OOM, S.TIMEOUT, S.LOST], 2),
        ([S.LOST, S.LOST], 2),
        ([S.OOM, INCOMPLETE], 1),
        ([INCOMPLETE, S.LOST], 1),
        ([INCOMPLETE, INCOMPLETE], 2),
    ],
)
def test_the_shown_attempt_says_most_about_the_cell(statuses: list[Status], shown: int) -> None:
    state = state_of(statuses)
    assert state.shown is not None
    assert (state.shown.number, state.status) == (shown, statuses[shown - 1])


def test_a_cell_without_an_attempt_is_pending() -> None:
    empty = CellState()
    assert (empty.status, empty.shown, empty.valid, empty.failures) == (PENDING, None, (), 0)


@pytest.mark.parametrize(
    ("statuses", "marks", "valid", "before", "left"),
    [
        ([S.OK, S.OK], (), (1, 2), 0, False),
        ([S.OK, S.OK], (1,), (2,), 1, False),
        ([S.OK, S.OK], (2,), (1, 2), 2, True),  # nothing succeeded since
        ([S.OK, S.OK, S.CRASHED], (2,), (1, 2), 2, True),
        ([S.OK, S.OK, S.CRASHED, S.OK], (2,), (4,), 2, True),  # one of two repetitions
        ([S.OK, S.OK, S.OK], (1, 3), (2, 3), 2, True),  # the first mark was fulfilled
        ([S.OK, S.FAILED], (1, 2), (1,), 1, True),  # the first mark was not
        ([S.FAILED, S.OK], (1,), (2,), 0, False),
        ([S.OK], (0,), (1,), 0, False),  # --fresh of a cell that was new
    ],
)
def test_successes_after_the_last_fulfilled_mark_count(
    statuses: list[Status], marks: tuple[int, ...], valid: tuple[int, ...], before: int, left: bool
) -> None:
    state = state_of(statuses, marks=marks)
    assert (state.valid, state.successes_before_mark) == (valid, before)
    assert state.is_to_be_replaced == left
    assert not valid or (state.shown is not None and state.shown.number == valid[-1])


def test_only_failures_since_the_mark_count() -> None:
    state = state_of([S.FAILED, S.CRASHED, S.OOM, S.TIMEOUT, S.LOST, INCOMPLETE], marks=(2,))
    assert (state.failures, state.misses) == (1, 2)


def test_a_success_of_an_older_version_names_what_it_replaces() -> None:
    rows = [(1, S.OK, 0), (2, S.FAILED, 1), (3, S.OK, 1), (4, S.OK, None)]
    attempts = [StoredAttempt("a", *row) for row in reversed(rows)]
    (state,) = states_of(attempts, {}).values()
    assert (state.valid, state.marks, state.last_number) == ((3, 4), (1,), 4)
    failed = states_of(attempts[2:], {})["a"]  # an attempt that failed replaces nothing
    assert (failed.valid, failed.marks) == ((1,), ())


def test_obsolete_attempts_are_left_out_but_their_numbers_stay() -> None:
    attempts = [StoredAttempt("a", 1, S.OK), StoredAttempt("a", 2, S.FAILED)]
    state = states_of(attempts, {"a": [1]}, {("a", 2)})["a"]
    assert (state.status, state.last_number, state.obsolete) == (S.OK, 2, 1)
    assert state.since_mark.status == PENDING
