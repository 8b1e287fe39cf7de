"""Signals and the time limit: they stop the sweep once, and not what saves its results."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from orchestrator.sweep.interruption import SAVING_S, Interruption, StopReason

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_body_and_a_second_one_interrupts_nothing(number: int) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    steps = []
    with Interruption(None) as interruption:
        with interruption.stops_here():
            steps.append("measured")
            os.kill(os.getpid(), number)
            steps.append("measured more")
        os.kill(os.getpid(), number)  # in impatience
        steps.append("saved")
    assert steps == ["measured", "saved"]
    assert interruption.reason == StopReason[signal.Signals(number).name]
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_signal_whose_exception_is_lost_ends_the_body_after_the_outcome() -> None:
    stored = []
    with Interruption(None) as interruption, interruption.stops_here():
        for outcome in interruption.until_stopped(["first", "second"]):
            with suppress(KeyboardInterrupt):  # as in a finalizer
                os.kill(os.getpid(), signal.SIGINT)
            stored.append(outcome)
    assert stored == ["first"]
    assert interruption.reason is StopReason.SIGINT


def test_the_deadline_ends_the_body() -> None:
    interruption = Interruption(SAVING_S + 0.05)
    with interruption, interruption.stops_here(), interruption.timer():
        time.sleep(5)
    assert interruption.reason is StopReason.TIME_LIMIT


def test_a_deadline_after_the_last_cell_stops_nothing() -> None:
    with Interruption(SAVING_S + 0.05) as interruption:
        with interruption.stops_here(), interruption.timer():
            pass
        time.sleep(0.1)
    assert interruption.reason is None


def test_a_deadline_ends_the_body_however_early_its_signal_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "setitimer", lambda *_: os.kill(os.getpid(), signal.SIGALRM))
    limit_s = SAVING_S + 100.0
    with Interruption(limit_s) as interruption, interruption.stops_here(), interruption.timer():
        pytest.fail("the body was entered")
    assert interruption.reason is StopReason.TIME_LIMIT


def test_handlers_can_be_installed_again_when_something_replaced_them() -> None:
    with Interruption(None) as interruption, interruption.stops_here():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does when it starts
        interruption.install()
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the body went on after the signal")
    assert interruption.reason is StopReason.SIGTERM


def test_a_foreign_interrupt_and_an_error_are_raised() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for error in (KeyboardInterrupt, ValueError):
        interruption = Interruption(None)
        with pytest.raises(error), interruption, interruption.stops_here():
            raise error
        assert interruption.reason is None
        assert signal.getsignal(signal.SIGTERM) == before


def test_saving_has_a_share_of_the_time_limit() -> None:
    assert Interruption(None).deadline is None
    left_s = Interruption(60.0).deadline - time.monotonic()
    assert left_s == pytest.approx(60.0 - SAVING_S, abs=1.0)


@pytest.mark.parametrize(("limit_s", "number"), [(0.0, None), (None, signal.SIGINT)])
def test_nothing_begins_after_the_deadline_or_a_signal(
    limit_s: float | None, number: int | None
) -> None:
    """An exception in the middle of what opens a connection would leave it open."""
    steps = []
    with Interruption(limit_s, is_shared=True) as interruption:
        interruption.install()
        if number is not None:
            os.kill(os.getpid(), number)
        with interruption.stops_here(), interruption.timer():
            steps.append("begun")
    assert not steps
    expected = StopReason.SIGINT if number else StopReason.TIME_LIMIT
    assert interruption.reason is expected
