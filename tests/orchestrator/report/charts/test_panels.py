"""Choice of panels if a chart has too many."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pandas as pd
import pytest

from orchestrator.report.charts.panels import MOST_PANELS, PanelChoice, Shown, choose_panels

SIZES = ("small", "medium", "large", "xl", "2.7B")
PASSES = ("forward", "forward_backward", "train_step")

Rows = Sequence[tuple[object, ...]]


def chosen(
    axes: Sequence[str],
    rows: Rows,
    much: Sequence[float] | None = None,
    marks: Sequence[str] | None = None,
) -> PanelChoice:
    """Return the choice among panels whose labels are their rows. marks: letters for each row."""
    panels = pd.DataFrame(rows, columns=list(axes)).set_index(pd.Index(rows, tupleize_cols=False))
    shown = Shown(
        dict(zip(rows, much or [1.0] * len(rows), strict=True)),
        {
            row: frozenset(letters)
            for row, letters in zip(rows, marks or [""] * len(rows), strict=True)
        },
    )
    return choose_panels(panels, axes, shown)


def test_all_panels_are_drawn_without_a_note_if_they_fit() -> None:
    rows = [(size, run) for size in SIZES for run in ("full", "again")]
    assert chosen(["size", "run"], rows) == PanelChoice(frozenset(rows))


def test_repetitions_of_another_run_are_removed_first() -> None:
    rows = [(size, run) for run in ("full", "again", "once-more") for size in SIZES]
    choice = chosen(["size", "run"], rows)
    assert choice.chosen == {(size, "full") for size in SIZES}
    assert (
        choice.note == "5 of 15 panels: none that repeats another run's; the tables have the others"
    )


def test_a_panel_with_a_new_mark_is_no_repetition() -> None:
    rows = [(size, run) for run in ("full", "again", "more") for size in SIZES]
    marks = ["ab"] * len(SIZES) + ["b"] * len(SIZES) + ["bc"] + ["a"] * (len(SIZES) - 1)
    assert chosen(["size", "run"], rows, marks=marks).chosen == {
        *((size, "full") for size in SIZES),
        ("small", "more"),
    }


def test_panels_that_differ_only_in_the_run_are_no_repetitions() -> None:
    rows = [(f"run {number:02}",) for number in range(MOST_PANELS + 1)]
    choice = chosen(["run"], rows)
    assert len(choice.chosen) == MOST_PANELS
    assert choice.note == "12 of 13 panels: the most different first; the tables have the others"


def test_every_size_has_the_same_panels() -> None:
    rows = list(product(SIZES, ("eager", "blocks"), PASSES))
    choice = chosen(["size", "compile", "pass"], rows)
    assert choice.chosen == set(product(SIZES, ("eager", "blocks"), ("train_step",)))
    assert choice.note.startswith(
        "10 of 30 panels: equally many of each size, the most different first;"
    )


def test_the_ends_of_an_axis_are_chosen_before_the_middle() -> None:
    rows = list(product(SIZES, ("fp32", "tf32", "bf16"), PASSES))
    choice = chosen(["size", "precision", "pass"], rows)
    assert choice.chosen == set(product(SIZES, ("fp32", "bf16"), ("train_step",)))


def test_among_equally_different_panels_those_that_show_most_are_chosen() -> None:
    rows = list(product(SIZES, ("eager", "blocks"), PASSES))
    much = [2.0 if passed == "forward" else 1.0 for _, _, passed in rows]
    assert {passed for _, _, passed in chosen(["size", "compile", "pass"], rows, much).chosen} == {
        "forward"
    }


def test_a_side_experiment_of_one_size_replaces_no_panel_that_all_sizes_have() -> None:
    """A size with few panels does not reduce the panels of the others."""
    side = [("small", "model", "train_step"), ("10B", "model", "forward")]
    choice = chosen(
        ["size", "compile", "pass"], [*product(SIZES, ("eager", "blocks"), PASSES), *side]
    )
    assert choice.chosen == {
        *product(SIZES, ("eager", "blocks"), ("train_step",)),
        ("10B", "model", "forward"),
    }


def test_null_counts_as_a_value_of_an_axis() -> None:
    rows = list(product((None, 24.0, 80.0), ("fp32", "bf16"), PASSES))
    choice = chosen(["memory_limit_gib", "precision", "pass"], rows)
    assert {
        limit: sum(row[0] == limit for row in choice.chosen) for limit in (None, 24.0, 80.0)
    } == {None: 4, 24.0: 4, 80.0: 4}


@pytest.mark.parametrize("values", [MOST_PANELS + 1, 5 * MOST_PANELS])
def test_the_largest_values_are_drawn_if_not_all_fit(values: int) -> None:
    rows = [(number, seed) for number in range(values) for seed in (0, 1)]
    choice = chosen(["context_length", "seed"], rows, much=[float(number) for number, _ in rows])
    assert sorted(number for number, _ in choice.chosen) == list(
        range(values - MOST_PANELS, values)
    )
    assert choice.note.startswith(f"12 of {2 * values} panels: the most different first")
