"""Tests of the width of texts, and of tables in which no text has to break."""

from __future__ import annotations

import pytest

from orchestrator.report.formats.terminal import Screen, _aligned, _folding
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import MISSING, Entry, milliseconds
from orchestrator.report.tables.views import view_of
from tests.support.widths import widest


@pytest.mark.parametrize(
    ("columns", "width"),
    [("80", 80), ("5", 40), ("330", 330), ("0", 100), ("", 100), ("wide", 100)],
)
def test_the_width_is_that_of_columns_and_of_files_without_it(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert Screen.of_stdout().width == width


def test_a_command_stays_in_one_line_and_a_sentence_does_not() -> None:
    command = f"  sweep run CONFIG --where {'x' * 60}"
    sentence = f"a sentence about sweep run {'x' * 60}"
    text = Screen(40).text(command, sentence)
    assert text.splitlines()[0] == command
    assert len(text.splitlines()) > 2
    assert widest(text) <= 40


@pytest.mark.parametrize("gap", [1, 2])
def test_a_table_that_has_room_looks_as_if_rich_had_laid_it_out(gap: int) -> None:
    rows = [
        ({"model": "größe 結果"}, {"mean time of a step": milliseconds(12.5), "end": Entry("ok")}),
        ({"model": ""}, {"mean time of a step": Entry("OOM", status="oom"), "end": MISSING}),
    ]
    view = view_of(text_table("Cells", rows))
    screen = Screen()
    assert screen.text(_aligned(view, gap)) == screen.text(_folding(view, gap))
    assert "\x1b[31m" in Screen(has_color=True).text(_aligned(view, gap))  # red
