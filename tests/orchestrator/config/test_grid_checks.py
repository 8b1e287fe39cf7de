"""Zipped axes, whose lists advance together, and single values as axes."""

from __future__ import annotations

import pytest

from orchestrator.common.errors import ConfigError
from orchestrator.config.grid import Expansion, expand
from orchestrator.config.schema import parse_config
from orchestrator.config.selection import parse_selection

AXES = "axes: {precision: [bf16, fp32], seed: 3}"
ZIP = "zip: [{size: [tiny, mini, small], batch_size: [4, 2, 1]}]"


def expanded(grid: str, *sets: str, where: str = "precision=bf16") -> Expansion:
    text = f"name: x\ngrids:\n  - {{task: train_step, {grid}}}"
    return expand(*parse_config(text, "C.yaml"), parse_selection(sets, [where]))


def shapes(expansion: Expansion) -> list[tuple[str, int]]:
    rows = [cell.params.values() for cell in expansion.cells]
    assert {row["seed"] for row in rows} <= {0, 3}
    return [(row["size"], row["batch_size"]) for row in rows]


def test_zipped_axes_advance_together_and_are_multiplied_by_the_others() -> None:
    one_precision = [("tiny", 4), ("mini", 2), ("small", 1)]
    assert shapes(expanded(f"{AXES}, {ZIP}")) == one_precision
    both = expanded(f"{AXES}, {ZIP}", where="precision=bf16|fp32")
    assert shapes(both) == [*one_precision, *one_precision]
    assert shapes(expanded(f"{AXES}, {ZIP}", where="size=mini"))[0] == ("mini", 2)


def test_a_group_has_the_ids_of_its_cells_spelled_out() -> None:
    zipped = expanded("zip: [{size: [tiny, mini], batch_size: [4, 2]}], axes: {precision: bf16}")
    spelled = expanded(
        "fixed: {precision: bf16, size: tiny, batch_size: 4}, include: [{size: mini, batch_size: 2}]"
    )
    assert [cell.id for cell in zipped.cells] == [cell.id for cell in spelled.cells]


def test_set_replaces_all_axes_of_a_group_together() -> None:
    pairs = ("size=tiny,small", "batch_size=8,9")
    assert shapes(expanded(f"{AXES}, {ZIP}", *pairs)) == [("tiny", 8), ("small", 9)]
    with_include = f"{AXES}, {ZIP}, include: [{{size: medium, precision: bf16}}]"
    assert shapes(expanded(with_include, *pairs)) == [("tiny", 8), ("small", 9)] * 2


@pytest.mark.parametrize(
    ("grid", "sets", "expected"),
    [
        (
            "zip: [{size: [tiny, mini, small], batch_size: [1, 2]}]",
            (),
            r"C.yaml:3: grids\[0\].zip\[0\]: size has 3 values, but batch_size has 2. "
            "The lists of one group must have the same length",
        ),
        (ZIP, ("size=tiny",), "--set: batch_size is zipped with size. Set both, or use --where"),
        (
            "zip: [{size: [tiny], seed: [1], batch_size: [1]}]",
            ("seed=2",),
            "--set: size, batch_size are zipped with seed. Set all, or use --where",
        ),
        (
            ZIP,
            ("size=tiny", "batch_size=1,2"),
            "--set: size has 1 value, but batch_size has 2. The lists of one group",
        ),
        (f"{ZIP}, axes: {{size: mini}}", (), r"zip\[0\].size: is also under axes. Leave one of"),
        (f"{ZIP}, fixed: {{size: mini}}", (), r"zip\[0\].size: is also under fixed. Leave one of"),
        (
            "zip: [{size: [tiny], seed: [1]}, {seed: [2]}]",
            (),
            r"zip\[1\].seed: is also under zip\[0\]. Leave one of them out",
        ),
        ("zip: [{sizes: [tiny]}]", (), r"zip\[0\].sizes: train_step has no axis 'sizes'"),
        (
            "zip: [{size: [tiny, tinny]}]",
            (),
            r"zip\[0\].size\[1\]: 'tinny' is not allowed. Did you mean 'tiny'",
        ),
        ("zip: [{}], fixed: {size: tiny}", (), r"zip\[0\]: Dictionary should have at least 1 item"),
    ],
)
def test_axes_that_cannot_be_zipped_are_refused(
    grid: str, sets: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        expanded(grid, *sets)
