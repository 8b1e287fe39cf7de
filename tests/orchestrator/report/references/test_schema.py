"""Tests of the strict format of the write-ups: unknown words are refused, and printed digits are preserved."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.common.errors import ConfigError
from orchestrator.common.reference_devices import DEVICES, find_device
from orchestrator.report.references.records import (
    ReferenceNumber,
    numbers_of,
    published,
    writeups,
)
from tests.orchestrator.report.references.transcription import StrictWriteup

SECONDS = {"metric": "duration", "phase": "step", "unit": "s"}


def content(**changes: Any) -> dict[str, Any]:
    table = {
        "name": "timings",
        "title": "Timings",
        "task": "train_step",
        "device": "h100",
        "cell": {"compile": "eager", "precision": ["fp32", "tf32"]},
        "notes": ["for the table"],
        "columns": ["size", "context_length", SECONDS],
        "rows": [["small", 512, Decimal("0.0500")], ["xl", 512, "OOM"], ["2.7B", 512, "N/A"]],
        **changes,
    }
    return {"name": "w", "title": "W", "source": "nobody", "year": 2025, "table": [table]}


def numbers(**changes: Any) -> list[ReferenceNumber]:
    one = content(**changes)
    return list(numbers_of(one, one["table"][0]))


def test_every_write_up_loads_and_names_its_source() -> None:
    assert [one["name"] for one in writeups()] == [
        "analysis report",
        "answer.md",
        "assignment report",
        "damek",
        "section 1.2",
        "ShibukiZero",
        "torchtitan",
        "writeup.tex",
        "yyin-dev",
    ]
    assert all(one["source"] for one in writeups())


def test_the_transcriptions_have_known_words_alone() -> None:
    for one in writeups():
        of_b200s = one["name"] == "writeup.tex"
        assert StrictWriteup.model_validate(one).year == (2026 if of_b200s else 2025)
    StrictWriteup.model_validate(content())


def test_a_number_preserves_its_digits_and_names_its_cell() -> None:
    fifty, out_of_memory = numbers()
    assert str(fifty.value) == "0.0500"
    assert fifty.amount == 50.0
    assert fifty.only("size") == "small"
    assert (fifty.only("precision"), fifty.axes["precision"]) == (None, ("fp32", "tf32"))
    assert fifty.notes == ("for the table",)
    assert (out_of_memory.value, out_of_memory.amount) == (None, None)
    assert out_of_memory.only("size") == "xl"


def test_notes_belong_to_a_table_or_to_some_of_its_rows() -> None:
    first, second = numbers(row_notes=[{"where": {"size": "xl"}, "note": "for the row"}])
    assert first.notes == ("for the table",)
    assert second.notes == ("for the table", "for the row")


def test_a_mean_has_the_standard_deviation_of_its_row() -> None:
    deviation = {**SECONDS, "statistic": "sd"}
    row = ["small", Decimal("0.05"), Decimal("0.002")]
    mean, sd = numbers(columns=["size", SECONDS, deviation], rows=[row])
    assert (mean.sd, sd.sd) == (2.0, None)


def test_a_table_cell_may_have_its_own_unit() -> None:
    (one,) = numbers(columns=["size", {**SECONDS, "unit": "us"}], rows=[["small", "873 ns"]])
    assert (one.value, one.unit) == (Decimal(873), "ns")
    assert one.amount == pytest.approx(0.000873)


def test_a_number_may_cover_several_passes() -> None:
    (one,) = numbers(
        columns=["size", {**SECONDS, "over": 100}], rows=[["small", Decimal("4.7718")]]
    )
    assert one.amount == pytest.approx(47.718)


def test_a_model_given_by_its_dimensions_gets_its_size() -> None:
    dims = ["d_model", "d_ff", "num_layers", "num_heads"]
    (one,) = numbers(columns=[*dims, SECONDS], rows=[[1600, 6400, 48, 25, Decimal("1.5")]])
    assert one.axes == {"size": ("xl",), "compile": ("eager",), "precision": ("fp32", "tf32")}
    with pytest.raises(ValueError, match="is not"):
        numbers(
            columns=["size", *dims, SECONDS], rows=[["large", 1600, 6400, 48, 25, Decimal("1.5")]]
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"cell": {"precision": "float32"}},
        {"cell": {"precision": ["fp32", "half"]}},
        {"cell": {"colour": "red"}},
        {"cell": {"batch_size": "four"}},
        {"rows": [["XL", 512, Decimal("0.05")]]},
        {"rows": [["xl", 512]]},
        {"columns": ["size", "context_length", {**SECONDS, "phase": "sideways"}]},
        {"columns": ["size", "context_length", {**SECONDS, "unit": "fortnights"}]},
        {"columns": ["size", "context_length", {**SECONDS, "metric": "hearsay"}]},
        {"columns": ["size", "context_length", {**SECONDS, "cell": {"pass": "both"}}]},
        {"device": "abacus"},
        {"task": "matmul"},
        {"repeats": "nothing"},
        {"remark": "no such field"},
    ],
    ids=str,
)
def test_an_unknown_word_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StrictWriteup.model_validate(content(**changes))


def test_a_text_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="no number"):
        numbers(rows=[["small", 512, "some"]])


def test_every_device_has_numbers() -> None:
    assert {number.device for number in published()} == set(DEVICES)


def test_the_error_for_an_unknown_device_lists_the_known_ones() -> None:
    assert find_device("h100") == "h100"
    with pytest.raises(
        ConfigError,
        match=r"--reference h200: .*numbers for it\. Use a100, h100, h100-96gb, rtx5090, .*not-named or all",
    ):
        find_device("h200")
