"""Where the charts of a large report are drawn, and what their pictures take."""

from __future__ import annotations

import os

import pytest

from orchestrator.report.drawing import MANY, begin, with_short_paths


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


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("", ""),
        ("M0,155.185L50.199,140.374", "M0,155.2L50.2,140.4"),
        ("M1.04,2L1.04,3.5L2.26,3.51L2.31,3.52L-0.04,7", "M1,2V3.5H2.3L0,7"),
        ("M0,0L0,5L0,5ZM0,5L0,6L0,0Z", "M0,0V5ZM0,5V6V0Z"),
        ("M175.375,1.887379141862766e-14h51.75v58.303654906594524h-51.75Z", "M175.4,0h51.8v58.3h-51.8Z"),
        ("M2.739,0A2.739,2.739,0,1,1,-2.739,0L2.739,0L5,0", "M2.7,0A2.7,2.7,0,1,1,-2.7,0L2.7,0H5"),
    ],
)
def test_a_path_goes_where_it_went_in_fewer_letters(path: str, short: str) -> None:
    around = '<path id="M1.234,5" aria-label="GiB: 2.3935508728" d="{}" fill="#54a24b"/>'
    assert with_short_paths(around.format(path)) == around.format(short)
