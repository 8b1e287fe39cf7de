"""Strikes at random moments on cells with several ranks: see tests/killing_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killing_ranks import torture


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_is_struck_the_row_names_it_and_nothing_is_left(tmp_path: Path) -> None:
    assert not torture(tmp_path, rounds=20, seed=1)
