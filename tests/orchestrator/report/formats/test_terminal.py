"""Tests of the width of texts."""

from __future__ import annotations

import pytest

from orchestrator.report.formats.terminal import Screen


@pytest.mark.parametrize(
    ("columns", "width"),
    [("80", 80), ("5", 40), ("330", 330), ("0", 100), ("", 100), ("wide", 100)],
)
def test_the_width_is_that_of_columns_and_of_files_without_it(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert Screen.of_stdout().width == width
