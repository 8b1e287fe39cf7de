"""What is written is declared in tasks/spec, and what is declared is consistent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import pytest

from orchestrator.execution.measurement import execute
from tasks.instruments import instrument_names, stages_of
from tasks.spec.attempt import BEFORE_ITS_TASK, Attempt
from tasks.spec.axes import Affects, axes_of, axes_without, axis, memory_orders, words_of
from tasks.spec.facts import EVIDENCE, FACTS
from tasks.spec.fields import Dtype, Field, fields_of, name_pattern
from tasks.spec.metrics import METRICS, PREDICTED_METRICS, metric_named
from tasks.spec.outcome import Outcome
from tasks.spec.parameters import ImportedParams, Params, RankedParams, default_values
from tasks.spec.registry import all_axes, all_tasks, value_order
from tasks.spec.status import Status
from tasks.spec.tables import INSTRUMENTS, STAGES, STATUSES, Sample

ALL_PARAMS: tuple[type[Params], ...] = (
    *(task.params for task in all_tasks().values()),
    RankedParams,
    ImportedParams,
)
STATIC_TASKS = ("accumulation", "autocast_dtypes", "norm_sensitivity")


def is_declared(sample: Sample) -> bool:
    try:
        metric = metric_named(sample.instrument, sample.metric)
    except KeyError:
        return False
    has_place = sample.mode in metric.modes and sample.phase in metric.phases
    return has_place and sample.unit == metric.unit


def require_declared(outcome: Outcome) -> None:
    assert all(map(is_declared, outcome.samples))
    assert set(outcome.facts) <= {fact.name for fact in FACTS}
    assert set(outcome.evidence) <= {fact.name for fact in EVIDENCE}


@pytest.mark.process
@pytest.mark.parametrize("timing", ["fixed", "adaptive"])
def test_every_instrument_writes_only_what_is_declared(
    timing: str, make_attempt: Callable[..., Attempt]
) -> None:
    settings = {"instruments": instrument_names()}
    counts = {"warmup_steps": None, "measured_steps": None} if timing == "adaptive" else {}
    outcome = execute(make_attempt(settings=settings, timing=timing, attention="sdpa", **counts))
    assert outcome.status is Status.OK, outcome.evidence
    assert {sample.instrument for sample in outcome.samples} >= {"timing", "memory", "kernels"}
    require_declared(outcome)


@pytest.mark.process
@pytest.mark.parametrize("task", STATIC_TASKS)
def test_static_tasks_write_only_what_is_declared(
    task: str, make_attempt: Callable[..., Attempt]
) -> None:
    params = {"autocast": "bf16"} if task == "autocast_dtypes" else {}
    outcome = execute(make_attempt(task=task, **params))
    assert outcome.status is Status.OK, outcome.evidence
    require_declared(outcome)


@pytest.mark.process
def test_a_failed_attempt_writes_only_declared_evidence(
    make_attempt: Callable[..., Attempt],
) -> None:
    outcome = execute(make_attempt(size=None, model="nowhere:Model"))
    assert outcome.status is Status.FAILED
    require_declared(outcome)


def test_no_metric_or_fact_is_declared_twice() -> None:
    metrics = [(metric.instrument, metric.name) for metric in (*METRICS, *PREDICTED_METRICS)]
    assert len(set(metrics)) == len(metrics)
    for facts in (FACTS, EVIDENCE):
        assert len({fact.name for fact in facts}) == len(facts)


def test_no_column_of_cells_is_declared_twice() -> None:
    declared = [one.name for metric in METRICS for one in metric.columns]
    declared += [one.name for metric in PREDICTED_METRICS for one in metric.columns]
    assert len(set(declared)) == len(declared)


def test_stages_and_instruments_are_declared() -> None:
    stages = {stage.name for stage in stages_of(instrument_names())}
    assert set(STAGES) == {*stages, "build", "rendezvous", *BEFORE_ITS_TASK} - {""}
    assert set(INSTRUMENTS) == {*instrument_names(), "finding"}
    assert set(STATUSES) == set(Status)


def test_a_row_type_without_a_declaration_is_refused() -> None:
    @dataclass
    class Row:
        declared: Annotated[int | None, Field("a number", unit="ms")]
        bare: int

    with pytest.raises(TypeError, match="bare"):
        fields_of(Row)


def test_the_type_of_a_column_follows_from_its_annotation() -> None:
    @dataclass
    class Row:
        number: Annotated[float | None, Field("a number")]

    (field,) = fields_of(Row)
    assert (field.name, field.dtype) == ("number", Dtype.FLOAT)


def test_placeholders_of_a_name() -> None:
    found = name_pattern("{phase}_ms_{statistic}").fullmatch("forward_ms_ci_low")
    assert found is not None
    assert found.groupdict() == {"phase": "forward", "statistic": "ci_low"}
    assert not name_pattern("{phase}_ms_{statistic}").fullmatch("forward_ms_worst")


# ---------------------------------------------------------------------------- axes


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_every_parameter_is_a_declared_axis(params: type[Params]) -> None:
    assert list(axes_of(params)) == list(default_values(params))
    assert all(declared.doc for declared in axes_of(params).values())


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_each_word_of_an_axis_is_in_its_description(params: type[Params]) -> None:
    for name, declared in axes_of(params).items():
        for word in words_of(params, name):
            assert word in declared.doc, (name, word)


@pytest.mark.parametrize("params", ALL_PARAMS)
def test_memory_orders_hold_the_words_of_their_axis(params: type[Params]) -> None:
    for name, order in memory_orders(params).items():
        assert order == words_of(params, name)


def test_a_parameter_that_is_no_axis_is_refused() -> None:
    class Undeclared(Params):
        width: int = 1

    with pytest.raises(TypeError, match="width"):
        axes_of(Undeclared)


def test_a_narrowed_axis_keeps_its_declaration() -> None:
    assert axes_of(all_tasks()["train_step"].params)["compile"].doc == all_axes()["compile"].doc


def test_axes_without_an_effect_exclude_axes_that_declare_this_effect() -> None:
    class Declared(Params):
        label: str = axis("", "a label", affects=Affects.NONE)
        width: int = axis(1, "a width", affects=Affects.MEMORY, unit="elements")

    without_memory = axes_without(Declared, Affects.MEMORY)
    assert "label" in without_memory
    assert "width" not in without_memory
    assert Declared.model_json_schema()["properties"]["width"]["x-unit"] == "elements"


def test_the_order_of_words_is_that_of_the_task_with_most() -> None:
    assert value_order("pass") == ("forward", "forward_grad", "forward_backward", "train_step")
    assert value_order("compile") == ("eager", "blocks", "model")
    assert value_order("context_length") == ()
