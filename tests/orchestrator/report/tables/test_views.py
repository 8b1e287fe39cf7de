"""Views of tables: which rows and columns a reader sees first, and what the caption says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from orchestrator.report.tables.formatters import number
from orchestrator.report.tables.layouts import cell_rows
from orchestrator.report.tables.table import (
    MISSING,
    Entry,
    RenderedTable,
    Table,
    TableGrid,
    grid_of_rows,
    milliseconds,
)
from orchestrator.report.tables.views import FEWEST_MEASURES, narrowed, view_of

SIZES, LENGTHS, PASSES = ("small", "xl"), ("128", "256", "512"), ("forward", "train_step")


def table_of(grid: TableGrid) -> RenderedTable:
    return RenderedTable(
        Table("t", "Title", "How to read.", cell_rows(("MFU", number("mfu")))), grid, ""
    )


def grid_of(*compiles: str, measures: int = 1) -> TableGrid:
    rows = []
    for keys in product(SIZES, LENGTHS, compiles, PASSES):
        rows.append([*map(Entry, keys), *[milliseconds(1.0)] * measures])
    titles = [f"m{number}" for number in range(measures)]
    return grid_of_rows(["size", "context_length", "compile", "pass"], titles, rows)


def names_of_keys(view: RenderedTable) -> list[str]:
    return [key.name for key in view.grid.keys]


def test_a_setting_of_all_rows_is_in_the_caption() -> None:
    view = view_of(table_of(grid_of("blocks")))
    assert names_of_keys(view) == ["size", "context_length", "pass"]
    assert len(view.rows) == 12
    assert view.caption == "How to read. All rows: compile=blocks."
    page = replace(table_of(grid_of("blocks")), settings={"batch_size": "4"})
    assert view_of(page).caption.endswith("All rows: batch_size=4, compile=blocks.")


def test_a_long_table_shows_the_default_slice_and_says_so() -> None:
    view = view_of(table_of(grid_of("eager", "blocks")))
    assert names_of_keys(view) == ["size", "context_length", "compile"]
    assert (len(view.rows), view.hidden_rows) == (12, 12)
    assert view.caption.endswith("Shown: pass=train_step.")
    whole = view_of(table_of(grid_of("eager", "blocks")), max_rows=None)
    assert (len(whole.rows), whole.hidden_rows) == (24, 0)


def test_long_names_are_short_for_readers_where_no_two_look_alike() -> None:
    values = [("a:Gpt", "torch.optim:Adagrad"), ("b:Gpt", "fused"), ("c:Net", "groups:2")]
    rows = [[*map(Entry, (*pair, pair[0])), milliseconds(1.0)] for pair in values]
    keys = ["model", "optimizer", "model_args.n_layer"]
    page = table_of(grid_of_rows(keys, ["step"], rows))
    view = view_of(page)
    assert view.titles[:3] == ["model", "optimizer", "n_layer"]
    assert [[str(entry) for entry in row[:2]] for row in view.rows] == [
        ["a:Gpt", "Adagrad"],
        ["b:Gpt", "fused"],
        ["Net", "groups:2"],
    ]
    assert str(view_of(page, None, None).rows[0][1]) == "torch.optim:Adagrad"


def test_compared_values_are_not_sliced() -> None:
    grid = grid_of("eager", "blocks")._replace(compared="pass")
    view = view_of(table_of(grid))
    assert "pass" in names_of_keys(view)
    assert view.caption.endswith("Shown: compile=eager.")


def test_implementations_of_attention_are_compared_at_one_context() -> None:
    names = [Entry(f"way {number}") for number in range(9)]
    lengths = [Entry("256"), Entry("512"), Entry("1024")]
    rows = [[name, length, milliseconds(1.0)] for name, length in product(names, lengths)]
    keys = ["attention", "context_length"]
    view = view_of(table_of(grid_of_rows(keys, ["m"], rows, compared="attention")))
    assert len(view.rows) == len(names)
    assert view.caption.endswith("Shown: context_length=256.")


def test_attention_is_sliced_where_most_implementations_are() -> None:
    """Most rows are training steps with naive attention, which compare nothing."""
    rows = [[Entry("train_step"), Entry("naive"), Entry(str(n)), MISSING] for n in range(30)]
    for name in ("naive", "flash"):
        rows.append([Entry("forward"), Entry(name), Entry("512"), milliseconds(1.0)])
    keys = ["pass", "attention", "context_length"]
    view = view_of(table_of(grid_of_rows(keys, ["m"], rows, compared="attention")))
    assert [str(row[0]) for row in view.rows] == ["naive", "flash"]
    assert view.caption.endswith("Shown: pass=forward.")


def test_a_measure_without_a_value_in_the_shown_rows_takes_no_room() -> None:
    grid = grid_of("eager", "blocks", measures=9)
    rows = grid.rows
    for row in rows:
        if row[3].text == "train_step":
            row[4] = MISSING  # the first measure, of the rows that are shown
    names = [one.name for one in grid.columns]
    view = view_of(table_of(grid_of_rows(names[:4], names[4:], rows)))
    assert [measure.name for measure in view.grid.measures] == ["m1", "m2", "m3", "m4", "m5"]


def test_the_first_measures_are_the_most_important() -> None:
    view = view_of(table_of(grid_of("blocks", measures=9)))
    assert [measure.name for measure in view.grid.measures] == ["m0", "m1", "m2", "m3", "m4"]
    assert len(view.hidden_measures) == 4


def test_many_keys_leave_room_for_measures() -> None:
    keys, measures = [f"k{number}" for number in range(7)], [f"m{number}" for number in range(5)]
    rows = [[*[Entry(text)] * 7, *[milliseconds(1.0)] * 5] for text in "abcd"]
    page = table_of(grid_of_rows(keys, measures, rows))
    assert len(view_of(page, None).titles) == 7 + FEWEST_MEASURES
    assert len(narrowed(page, None, lambda view: len(view.titles) < 9).titles) == 8


def test_a_caption_explains_the_shown_columns_alone() -> None:
    page = table_of(grid_of("blocks", measures=9))
    notes = {"m1": "M1: shown.", "m7|m8": "M8: left out."}
    page = replace(page, table=replace(page.table, column_notes=notes))
    assert "M1: shown." in view_of(page).caption
    assert "M8" not in view_of(page).caption
    assert view_of(page).left_out == "columns left out: m5 (ms), m6 (ms), m7 (ms), m8 (ms)"
    whole = view_of(page, None, None)
    assert "How to read. M1: shown. M8: left out." in whole.caption
    assert whole.left_out == ""


def test_a_comparison_comes_before_other_measures_of_the_baseline() -> None:
    """The baseline has no comparison, so its columns do not have the order of priorities."""
    titles = [("fp32", "ms"), ("fp32", "GiB")]
    titles += [("bf16", title) for title in ("ms", "speed-up", "GiB")]
    titles += [("fp16", "ms")]  # without a counterpart in fp32
    rows = [[Entry("small"), *[milliseconds(1.0)] * 5, MISSING]]
    view = view_of(table_of(grid_of_rows(["size"], titles, rows)), max_columns=4)
    assert view.titles == ["size", "fp32 ms", "bf16 ms", "bf16 speed-up (ms)"]


def test_numbers_and_flags_stand_at_the_right() -> None:
    flag, interval = Entry("yes", True), Entry("2.0", 2.0, low=1.5, high=2.5)
    rows = [
        [Entry("a"), milliseconds(12.5), flag, interval, Entry("why")],
        [Entry("b"), *[MISSING] * 4],
    ]
    titles = ("step", "bound", "gain", "reason")
    view = view_of(table_of(grid_of_rows(["size"], titles, rows)))
    assert [measure.is_text for measure in view.grid.measures] == [False, False, False, True]
    assert view.sides == ["left", "right", "right", "right", "left"]
    assert view.grid.measures[0].unit == "ms"
    assert view.grid.measures[0].title == "step (ms)"
