"""Only what is of our vocabulary gets in; what is printed is kept to the digit."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.hardware.gpu_catalog import peak_tflops
from orchestrator.report.references.devices import devices, find_device
from orchestrator.report.references.records import _numbers, published
from orchestrator.report.references.schema import Writeup, writeups

SECONDS = {"metric": "duration", "phase": "step", "unit": "s"}


def writeup(**changes: Any) -> Writeup:
    table = {
        "name": "timings",
        "title": "Timings",
        "kind": "timings",
        "task": "train_step",
        "device": "h100",
        "params": {"compile": "eager", "precision": ["fp32", "tf32"]},
        "doubts": ["of the table"],
        "columns": ["size", "context_length", SECONDS],
        "rows": [["small", 512, Decimal("0.0500")], ["xl", 512, "OOM"], ["2.7B", 512, "N/A"]],
        **changes,
    }
    return Writeup.model_validate(
        {"name": "w", "title": "W", "source": "nobody", "year": 2025, "table": [table]}
    )


def numbers(**changes: Any) -> list[Any]:
    one = writeup(**changes)
    return list(_numbers(one, one.table[0]))


def test_the_files_load_and_each_says_where_it_is_from() -> None:
    assert [one.name for one in writeups()] == [
        "analysis report",
        "answer.md",
        "assignment report",
        "section 1.2",
        "yyin-dev",
    ]
    assert all(one.source and one.year == 2025 for one in writeups())


def test_a_number_keeps_its_digits_and_names_its_cell() -> None:
    fifty, out_of_memory = numbers()
    assert str(fifty.value) == "0.0500"
    assert fifty.amount == 50.0
    assert fifty.one("size") == "small"
    assert (fifty.one("precision"), fifty.params["precision"]) == (None, ("fp32", "tf32"))
    assert fifty.doubts == ("of the table",)
    assert (out_of_memory.value, out_of_memory.amount, out_of_memory.one("size")) == (
        None,
        None,
        "xl",
    )


def test_doubts_are_of_a_table_a_column_or_a_row() -> None:
    column = {**SECONDS, "doubts": ["of the column"]}
    first, second = numbers(
        columns=["size", "context_length", column],
        row_doubts=[{"where": {"size": "xl"}, "says": "of the row"}],
    )
    assert first.doubts == ("of the table", "of the column")
    assert second.doubts == ("of the table", "of the column", "of the row")


def test_a_cell_may_have_a_unit_of_its_own() -> None:
    (one,) = numbers(columns=["size", {**SECONDS, "unit": "us"}], rows=[["small", "873 ns"]])
    assert (one.value, one.unit) == (Decimal(873), "ns")
    assert one.amount == pytest.approx(0.000873)


def test_several_passes_in_one_number() -> None:
    (one,) = numbers(
        columns=["size", {**SECONDS, "over": 100, "or_unit": "ms"}],
        rows=[["small", Decimal("4.7718")]],
    )
    assert one.amount == pytest.approx(47.718)
    assert one.amount_in("ms") == pytest.approx(4.7718)


def test_a_model_that_is_spelled_out_has_its_size() -> None:
    dims = ["d_model", "d_ff", "num_layers", "num_heads"]
    (one,) = numbers(columns=[*dims, SECONDS], rows=[[1600, 6400, 48, 25, Decimal("1.5")]])
    assert one.params == {"size": ("xl",), "compile": ("eager",), "precision": ("fp32", "tf32")}
    with pytest.raises(ValueError, match="is not"):
        numbers(
            columns=["size", *dims, SECONDS], rows=[["large", 1600, 6400, 48, 25, Decimal("1.5")]]
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"params": {"precision": "float32"}},
        {"params": {"precision": ["fp32", "half"]}},
        {"params": {"colour": "red"}},
        {"params": {"batch_size": "four"}},
        {"rows": [["XL", 512, Decimal("0.05")]]},
        {"rows": [["xl", 512]]},
        {"columns": ["size", "context_length", {**SECONDS, "phase": "sideways"}]},
        {"columns": ["size", "context_length", {**SECONDS, "unit": "fortnights"}]},
        {"columns": ["size", "context_length", {**SECONDS, "params": {"pass": "both"}}]},
        {"device": "abacus"},
        {"task": "matmul"},
        {"kind": "hearsay"},
        {"repeats": "nothing"},
        {"remark": "of no field"},
    ],
    ids=str,
)
def test_an_unknown_word_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        writeup(**changes)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="no number"):
        numbers(rows=[["small", 512, "some"]])


def test_devices_are_held_against_gpus_whose_peaks_are_known() -> None:
    limits = {word: device.limit for word, device in devices().items() if device.limit}
    assert set(limits) == {"a100", "h100", "rtx5090", "rtx-pro-6000", "a800"}
    assert all(peak_tflops(limit, "fp32") for limit in limits.values())
    assert {number.device for number in published()} <= set(devices())


def test_an_unknown_device_is_told_the_known_ones() -> None:
    assert find_device("h100") == "h100"
    with pytest.raises(
        ConfigError,
        match=r"--against h200: .*Did you mean 'h100'\? Published are a100, h100, rtx5090, .*not-named",
    ):
        find_device("h200")
