"""Where the charts of a large report are drawn."""

from __future__ import annotations

import os

from orchestrator.report.drawing import MANY, begin


def test_of_many_cells_in_a_process_of_its_own() -> None:
    assert begin(MANY - 1, os.getpid)() == os.getpid()
    assert begin(MANY, os.getpid)() != os.getpid()


def test_one_at_a_time_and_each_is_there_however_often_it_is_asked_for() -> None:
    first, second = begin(MANY, divmod, 7, 2), begin(MANY, divmod, 9, 2)
    assert (second(), first(), first()) == ((4, 1), (3, 1), (3, 1))


def test_few_cells_are_drawn_once_and_when_they_are_asked_for() -> None:
    drawn: list[int] = []
    picture = begin(1, drawn.append, 1)
    assert drawn == []
    assert (picture(), picture()) == (None, None)
    assert drawn == [1]
