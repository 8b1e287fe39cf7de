"""The width of texts on a screen."""

from __future__ import annotations

import pytest

from orchestrator.report.formats.terminal import Screen, overview
from tests.orchestrator.report.findings.test_findings import results_of, step
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


def test_the_overview_names_what_its_grids_leave_out() -> None:
    precisions, lengths = ("fp32", "tf32", "bf16", "fp16"), (128, 256, 512)
    results = results_of(
        *(step(100, precision=one, context_length=n) for one in precisions for n in lengths)
    )
    texts = (overview(results, [], [], "", Screen(width)) for width in (99, 50, 20))
    wide, narrow, tiny = (" ".join(text.split()) for text in texts)
    assert "only 3 of 4 values of precision More" in wide
    assert "only 3 of 4 values of precision; no room for tf32 More" in narrow
    assert "; no room for tf32, fp32, bf16 128" in tiny
