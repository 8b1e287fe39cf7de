"""The table of what options save and cost, each compared with a cell without the option."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from orchestrator.analysis.results import Results
from orchestrator.report.tables.registry import lay_out

GIB = 2**30
DEFAULTS: dict[str, Any] = {
    "task": "train_step", "status": "ok", "cell": "c", "size": "small", "context_length": 512,
    "batch_size": 4, "checkpointing": "none", "gradient_accumulation": 1, "optimizer": "fused",
    "loss": "cross_entropy", "lora": None, "optimizer_args.momentum": None,
}  # fmt: skip
AXES = tuple(DEFAULTS)[3:]


def rows_for(*cells: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of the table for cells with these settings, `ms` and `gib`."""
    frame = pd.DataFrame([DEFAULTS | cell for cell in cells])
    peaks = frame.pop("gib") * GIB
    frame = frame.rename(columns={"ms": "step_ms_median"})
    frame = frame.assign(peak_allocated_bytes=peaks).convert_dtypes()
    pages = lay_out(Results(frame, AXES, {}), ["tradeoffs"])
    rows = []
    for page in pages:
        rows += [dict(zip(page.header, map(str, row), strict=True)) for row in page.rows]
    return rows


BASE = {"ms": 100.0, "gib": 8.0}
BLOCKS = {"checkpointing": "blocks", "ms": 130.0, "gib": 2.0}


def test_an_option_is_compared_with_the_same_cell_without_it() -> None:
    (row,) = rows_for(BASE, BLOCKS)
    assert row["option"] == "checkpointing: none → blocks"
    assert [row[title] for title in ("costs ms", "step ratio", "saves GiB", "peak ratio")] == [
        "+30.00", "1.30×", "+6.00", "0.25",
    ]  # fmt: skip
    assert (row["without: peak GiB"], row["without: step ms"]) == ("8.00", "100.0")


def test_a_cell_that_differs_in_two_options_is_compared_with_none() -> None:
    assert rows_for(BASE, BLOCKS | {"loss": "chunked"}) == []
    chunked = {"loss": "chunked", "ms": 110.0, "gib": 7.0}
    found = rows_for(BASE, chunked, BLOCKS | {"loss": "chunked"})
    assert [(row["option"], row["with"], row["costs ms"]) for row in found] == [
        ("checkpointing: none → blocks", "loss=chunked", "+20.00"),
        ("loss: cross_entropy → chunked", "–", "+10.00"),
    ]


def test_micro_batches_are_compared_with_one_batch_of_as_many_sequences() -> None:
    large = BASE | {"batch_size": 16, "ms": 400.0}
    micro = BASE | {"gradient_accumulation": 4, "ms": 420.0}
    (row,) = rows_for(BASE, large, micro)
    assert (row["option"], row["costs ms"]) == ("gradient accumulation: 1 → 4", "+20.00")


def test_an_optimizer_is_compared_with_adamw_whatever_its_arguments() -> None:
    momentum = {"optimizer": "sgd", "optimizer_args.momentum": 0.9, "ms": 90.0, "gib": 5.0}
    (row,) = rows_for(BASE, momentum)
    assert (row["option"], row["with"]) == ("optimizer: fused → sgd", "momentum=0.9")
    assert (row["costs ms"], row["saves GiB"]) == ("-10.00", "+3.00")


@pytest.mark.parametrize("failed", [0, 1])
def test_a_cell_without_a_result_shows_its_status_and_no_difference(failed: int) -> None:
    cells = [dict(BASE), dict(BLOCKS)]
    cells[failed] |= {"status": "oom", "ms": None, "gib": None}
    (row,) = rows_for(*cells)
    assert row[("without: peak GiB", "peak GiB")[failed]] == "OOM"
    assert "saves GiB" not in row  # the column is empty
