"""Tables that commands print fit the screen, and their numbers stay whole."""

from __future__ import annotations

import re

import pytest

from orchestrator.common.units import GIB
from orchestrator.report.formats.terminal import Screen, dense_table_text
from orchestrator.report.tables.formatters import to_gib
from orchestrator.report.tables.layouts import text_table
from orchestrator.report.tables.table import Entry

SETTINGS = {
    "task": "train_step",
    "context_length": "1024",
    "precision": "bf16",
    "pass": "forward_backward",
    "a_setting_of_the_user": "a value of more than forty-two letters, as a path may be",
}


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_the_last_columns_are_left_out_and_no_number_is_shortened(width: int) -> None:
    reason = "a reason that is longer than the screen is wide " * 3
    rows = []
    for verdict in ("fits", "oom"):
        entries = {"verdict": Entry(verdict), "peak": to_gib(1234.5 * GIB), "note": Entry(reason)}
        settings = SETTINGS | {"precision": verdict}
        rows.append((settings, entries | dict.fromkeys("abcde", to_gib(GIB))))
    table = text_table("Example", rows, "verdict")
    text = dense_table_text(table, Screen(width), "all columns: --wide")
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).count(" ".join(f"1. {reason}".split())) == 1
    assert text.count("forward_backward") == 1  # all rows have it in common
    assert len(re.findall(r"^ (?:fits|oom) +(?:fits|oom) +1,?234\.50 ", text, re.M)) == 2


def test_narrow_screens_say_how_many_columns_are_missing() -> None:
    entries = {f"column {letter}": to_gib(GIB) for letter in "abcdefghi"}
    table = text_table("Example", [({"size": size}, entries) for size in ("small", "large")])
    wide, narrow = (dense_table_text(table, Screen(width), "--wide") for width in (100, 40))
    assert "more column" not in wide
    assert re.search(r"^\d more columns: --wide$", narrow, re.M)
    assert "column a" in " ".join(narrow.split()) or "column\n" in narrow


OF_OWN_MODELS = {
    "hidden_size": "256",
    "intermediate_size": "512",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "checkpointing": "selective:2",
}
OF_PRESETS = {"size": "small", "context_length": "1024", "optimizer": "fused", "attention": "sdpa"}


@pytest.mark.parametrize("width", [60, 80, 100, 330])
def test_no_word_breaks_where_cells_differ_in_many_axes(width: int) -> None:
    rows = []
    for precision in ("fp32", "bf16"):
        for task, settings in (("train_step", OF_PRESETS), ("attention", OF_OWN_MODELS)):
            varying = {name: f"{value}{precision[0]}" for name, value in settings.items()}
            entries = {
                "peak": to_gib(1234.5 * GIB),
                "on H200": Entry("borderline"),
                "how": Entry("tracked"),
                "reserved": to_gib(GIB),
            }
            rows.append(({"task": task, "precision": precision, **varying}, entries))
    table = text_table("Example", rows, "on H200")
    text = dense_table_text(table, Screen(width), "--format json")
    assert max(map(len, text.splitlines())) <= width
    words = set(re.split(r"[\s=,.]+", text))
    for settings, _ in rows:
        assert words >= set(settings.values())
        assert all(key in words or words >= set(key.split("_")) for key in settings)
    assert text.count("1,234.50") + text.count("1234.50") == len(rows)
    assert text.count("borderline") == len(rows)
    assert ("more column" in text) == (text.count("tracked") < len(rows) or "1.00" not in text)
