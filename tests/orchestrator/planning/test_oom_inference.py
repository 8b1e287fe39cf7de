"""Which cells run out of memory because another did: along growing axes alone, and never where anything else differs."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.planning.oom_inference import OomInference
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell

RAN_OUT: dict[str, Any] = {
    "device": "cpu", "d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 4, "context_length": 512, "batch_size": 4,
    "pass": "forward_backward", "memory_limit_gib": 8.0,
}  # fmt: skip


def cell(**params: Any) -> Cell:
    return make_cell("train_step", {**RAN_OUT, **params})


@pytest.mark.parametrize(
    "more",
    [
        {"context_length": 513},
        {"batch_size": 8},
        {"num_layers": 5},
        {"vocab_size": 20_000},
        {"pass": "train_step"},
        {"pass": "train_step", "context_length": 1024, "batch_size": 32},
        {},
    ],
)
def test_more_of_anything_runs_out_too(more: dict[str, Any]) -> None:
    assert OomInference([cell()]).find_smaller(cell(**more)) == cell()


@pytest.mark.parametrize(
    "other",
    [
        {"context_length": 511},
        {"pass": "forward_grad"},
        {"context_length": 4096, "batch_size": 2},  # more of one and less of another
        {"context_length": 1024, "compile": "blocks"},
        {"context_length": 1024, "precision": "bf16"},
        {"context_length": 1024, "attention": "sdpa"},
        {"context_length": 1024, "memory_limit_gib": 16.0},
        {"context_length": 1024, "memory_limit_gib": None},
        {"context_length": 1024, "optimizer": "fused"},
        {"context_length": 1024, "d_model": 128},
    ],
)
def test_oom_is_not_inferred_for_smaller_or_otherwise_different_cells(
    other: dict[str, Any],
) -> None:
    assert OomInference([cell()]).find_smaller(cell(**other)) is None


def test_a_size_is_not_compared_with_a_number_of_layers() -> None:
    sized = make_cell("train_step", {"device": "cpu", "size": "small", "context_length": 512})
    assert OomInference([sized]).find_smaller(cell(memory_limit_gib=None)) is None
    assert OomInference([cell(memory_limit_gib=None)]).find_smaller(sized) is None


def test_every_declared_axis_is_one() -> None:
    from tasks.spec.axes import memory_orders
    from tasks.spec.registry import all_tasks

    for task in all_tasks().values():
        fields = {field.alias or name for name, field in task.params.model_fields.items()}
        assert set(memory_orders(task.params)) <= fields
