"""Labels of cells: short where that cannot be misread."""

from __future__ import annotations

from typing import Any

from orchestrator.config.cell_labels import CellLabels, shared_settings
from tasks.spec.registry import make_cell


def labels(*cells: dict[str, Any], axis: str = "") -> list[str]:
    made = [make_cell("train_step", values) for values in cells]
    label = CellLabels(made, axis)
    return [label(cell) for cell in made]


def test_a_key_and_a_class_are_shown_alone() -> None:
    own = {"model": "mine.models:Gpt", "model_args": {"n_layer": 2, "n_head": 4}}
    assert labels(
        own, {**own, "model_args": {"n_layer": 4, "n_head": 4}}, {**own, "model_args": {}}
    ) == ["train_step n_layer=2 n_head=4", "train_step n_layer=4 n_head=4", "train_step"]
    hub = {"model": "hf:Qwen/Qwen2.5-0.5B"}
    assert labels(own, hub)[1] == "train_step attention=sdpa model=Qwen2.5-0.5B"
    assert labels({"size": "tiny"}, {"size": "tiny", "checkpointing": "groups:2"}) == [
        "train_step checkpointing=none",
        "train_step checkpointing=groups:2",
    ]


def test_names_that_would_look_alike_stay_whole() -> None:
    first, second = {"model": "a:Gpt"}, {"model": "b:Gpt"}
    assert labels(first, second) == ["train_step model=a:Gpt", "train_step model=b:Gpt"]
    keys = {"model_args": {"depth": 1}, "optimizer_args": {"depth": 1}, "optimizer": "sgd"}
    assert labels({**first, **keys}, first)[0] == (
        "train_step model_args.depth=1 optimizer=sgd optimizer_args.depth=1"
    )


def test_a_long_value_is_cut_and_an_axis_can_be_asked_for() -> None:
    long = {"model": "a:B", "model_args": {"text": "x" * 80}}
    assert labels(long, {"model": "a:B"}) == [f"train_step text={'x' * 59}…", "train_step"]
    assert labels({"size": "tiny"}, axis="batch_size") == ["train_step batch_size=4"]


def test_the_settings_that_all_cells_share_fit_in_one_line() -> None:
    own = {"size": "medium", "context_length": 2048, "device": "cpu"}
    cells = [make_cell("train_step", {**own, "precision": name}) for name in ("fp32", "bf16")]
    assert shared_settings(cells, ["seed", "precision"]) == (
        "all cells: seed=0 size=medium context_length=2048 batch_size=4 attention=naive device=cpu"
    )
    assert "precision=fp32" in shared_settings(cells[:1])
    long = {"optimizer": "sgd", "optimizer_args": {"a": "x" * 50, "b": "y" * 50}}
    line = shared_settings([make_cell("train_step", {**own, **long})])
    assert line.endswith(" …")
    assert len(line) <= 100
    other = make_cell("accumulation", {})
    assert shared_settings([cells[0], other], ["size"]) == "all cells: nothing in common"
