"""The tasks that find something out once: the write-ups' values, and what narrow dtypes do to a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.execution.measurement import execute
from tasks import accumulation, autocast_dtypes, norm_sensitivity
from tasks.harness.device import CpuDevice
from tasks.harness.workload import StaticResult
from tasks.spec.attempt import Attempt
from tasks.spec.registry import all_tasks, make_cell
from tasks.spec.status import Status


def values(finding: StaticResult) -> dict[str, float | None]:
    return {sample.metric: sample.value for sample in finding.samples}


@pytest.mark.parametrize(
    ("params", "printed"),
    [
        ({}, "10.000133514"),
        ({"accumulator": "fp16", "addend": "fp16"}, "9.953125000"),
        ({"addend": "fp16"}, "10.002136230"),
        ({"addend": "fp16", "upcast": True}, "10.002136230"),
        ({"accumulator": "bf16", "addend": "bf16"}, "4.000000000"),
        ({"addend": "bf16"}, "10.009765625"),
        ({"value": 0.001, "count": 10_000}, "10.000411034"),
        ({"accumulator": "fp16", "addend": "fp16", "value": 0.001, "count": 10_000}, "4.000000000"),
        ({"accumulator": "bf16", "addend": "bf16", "value": 0.001, "count": 10_000}, "0.500000000"),
    ],
)
def test_accumulation_gives_the_published_values(params: dict[str, Any], printed: str) -> None:
    finding = accumulation.build(
        accumulation.AccumulationParams.model_validate({"device": "cpu", **params})
    )
    found = values(finding)
    assert f"{found['sum']:.9f}" == printed
    assert found["error"] == pytest.approx((found["sum"] or 0.0) - 10.0)


def test_torchs_own_sum_accumulates_wide() -> None:
    params = {"device": "cpu", "accumulator": "bf16", "addend": "bf16", "at_once": True}
    assert (
        values(accumulation.build(accumulation.AccumulationParams.model_validate(params)))["sum"]
        == 10.0
    )
    wide = values(
        accumulation.build(
            accumulation.AccumulationParams.model_validate({**params, "accumulator": "fp32"})
        )
    )
    assert (
        wide["sum"] == 1000 * 0.010009765625
    )  # what bf16 makes of a hundredth: the sum is never in it
    with pytest.raises(ValidationError, match="cannot go with at_once"):
        accumulation.AccumulationParams.model_validate({**params, "upcast": True})


@pytest.mark.parametrize(("autocast", "low"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_autocast_on_the_cpu_leaves_the_norm_narrow(autocast: str, low: str) -> None:
    params = autocast_dtypes.AutocastDtypesParams.model_validate(
        {"device": "cpu", "autocast": autocast}
    )
    facts = autocast_dtypes.build(params).facts
    assert facts == {
        "dtype_parameters": "float32", "dtype_fc1": low, "dtype_relu": low, "dtype_norm": low, "dtype_logits": low,
        "dtype_loss": "float32", "dtype_gradients": "float32",
    }  # fmt: skip


def sensitivity(**params: Any) -> dict[str, float]:
    made = norm_sensitivity.NormSensitivityParams.model_validate({"device": "cpu", **params})
    return {
        name: float("nan") if value is None else value
        for name, value in values(norm_sensitivity.build(made)).items()
    }


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_narrow_norm_overflows_where_its_squares_do(norm: str) -> None:
    ordinary, large = sensitivity(norm=norm, scale=1.0), sensitivity(norm=norm, scale=1000.0)
    assert large["narrow_error"] > 1 > 0.1 > ordinary["narrow_error"]
    assert large["wide_error"] < 0.003
    assert sensitivity(norm=norm, scale=1000.0, dtype="bf16")["narrow_error"] < 1


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_narrow_accumulator_loses_more_the_longer_the_row(norm: str) -> None:
    errors = [
        sensitivity(norm=norm, dtype="bf16", width=width)["narrow_error"]
        for width in (64, 512, 4096)
    ]
    assert errors == sorted(errors)
    assert errors[-1] > 1
    assert sensitivity(norm=norm, dtype="bf16", width=4096)["library_error"] < 0.02


def test_an_eps_below_the_smallest_number_divides_by_zero() -> None:
    lost = sensitivity(scale=1e-4, eps=1e-8)
    assert lost["narrow_nonfinite"] == 1.0
    assert lost["narrow_error"] != lost["narrow_error"]
    assert sensitivity(scale=1e-4, eps=1e-8, dtype="bf16")["narrow_nonfinite"] == 0.0


def test_in_fp32_nothing_is_lost() -> None:
    assert all(
        sensitivity(dtype="fp32", width=512)[f"{way}_error"] < 1e-4
        for way in ("narrow", "wide", "library")
    )


@pytest.mark.process
def test_a_finding_is_a_row_like_any_other(make_attempt: Callable[..., Attempt]) -> None:
    outcome = execute(make_attempt(task="accumulation", addend="bf16"))
    assert outcome.status is Status.OK, outcome.evidence
    assert [(sample.instrument, sample.metric) for sample in outcome.samples] == [
        ("finding", "sum"),
        ("finding", "error"),
    ]
    assert outcome.facts["fingerprint"]["torch"] == outcome.facts["torch"]


@pytest.mark.parametrize("task", ["accumulation", "autocast_dtypes", "norm_sensitivity"])
def test_a_cap_on_memory_is_of_findings_too(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[float] = []
    monkeypatch.setattr(CpuDevice, "limit_memory", lambda device, gib: caps.append(gib))
    for cap in (None, 1.5):
        cell = make_cell(task, {"device": "cpu", "memory_limit_gib": cap})
        all_tasks()[task].build(cell.params)
    assert caps == [1.5]


@pytest.mark.process
def test_a_sum_that_the_cap_refuses_is_out_of_memory(make_attempt: Callable[..., Attempt]) -> None:
    outcome = execute(
        make_attempt(task="accumulation", at_once=True, count=100_000_000, memory_limit_gib=0.1)
    )
    assert outcome.status is Status.OOM, outcome.evidence
    assert outcome.evidence["asked_bytes"] == 400_000_000
