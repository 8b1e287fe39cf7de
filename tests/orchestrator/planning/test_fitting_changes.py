"""The cheapest changes that fit, with predictions that a test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from orchestrator.hardware.gpu_catalog import GpuModel
from orchestrator.planning.fitting_changes import MOST_PREDICTIONS, find_changes
from tasks.prediction.records import Prediction, unknown
from tasks.spec.cell import Cell
from tasks.spec.metrics import metric_named
from tasks.spec.registry import make_cell

GPU = GpuModel("test", 1000, 9.0)
Size = Callable[[dict[str, object]], float | None]


def cell(**values: object) -> Cell:
    return make_cell(
        "train_step", {"device": "cuda", "size": "small", "precision": "bf16", **values}
    )


class Predictor:
    """Predicts the memory of cells by a function of their parameters, and counts them."""

    def __init__(self, size: Size) -> None:
        self.size, self.cells = size, list[Cell]()

    def __call__(self, cells: Sequence[Cell]) -> dict[str, Prediction]:
        self.cells += cells
        return {one.id: self._prediction(one) for one in cells}

    def _prediction(self, one: Cell) -> Prediction:
        values = one.params.values()
        nbytes = self.size(values)
        if nbytes is None:
            return unknown("it is not followed")
        again = 2.0  # such as fused attention in its backward pass
        again += {"none": 0.0, "selective": 5.0, "blocks": 25.0}[values["checkpointing"]]
        samples = (
            metric_named("prediction", "peak_allocated_bytes").sample(nbytes, "steady", "step"),
            metric_named("prediction", "flops").sample(100.0, "steady", "forward"),
            metric_named("prediction", "recomputed_flops").sample(again, "steady", "backward"),
        )
        verdict = "fits" if nbytes <= GPU.usable_bytes else "oom"
        return Prediction(samples=samples, verdicts={GPU.usable_bytes: verdict}, how="tracked")


def changed(cell_: Cell, size: Size) -> tuple[list[dict[str, object]], Predictor]:
    predict = Predictor(size)
    return [one.values for one in find_changes(cell_, GPU, predict)], predict


def test_single_options_that_fit_are_listed_by_their_cost() -> None:
    def size(values: dict[str, object]) -> float:
        saved = {"none": 0, "selective": 600, "blocks": 900}[str(values["checkpointing"])]
        return 1500 - saved - (550 if values["batch_size"] == 1 else 0)

    found, predict = changed(cell(), size)
    assert found == [
        {"batch_size": 1, "gradient_accumulation": 4},
        {"checkpointing": "selective"},
        {"checkpointing": "blocks"},
    ]
    assert all(one.params.precision == "bf16" for one in predict.cells)
    more = [one.more_flops for one in find_changes(cell(), GPU, predict)]
    assert more == pytest.approx([0, 5 / 102, 25 / 102])
    tokens = {one.params.tokens for one in predict.cells}
    assert tokens == {cell().params.tokens}  # the same work in every step


def test_pairs_are_tried_only_if_no_single_option_fits() -> None:
    def size(values: dict[str, object]) -> float:
        is_smaller = [values["checkpointing"] == "blocks", values["loss"] == "chunked"]
        return 1800 - 450 * sum(is_smaller)

    found, predict = changed(cell(), size)
    assert found == [{"checkpointing": "blocks", "loss": "chunked"}]
    assert len(predict.cells) <= MOST_PREDICTIONS


def test_if_nothing_fits_the_nearest_one_is_named() -> None:
    found, predict = changed(cell(), lambda values: 5000 if values["loss"] == "chunked" else 9000)
    assert len(found) == 1
    assert found[0]["loss"] == "chunked"
    assert len(predict.cells) == MOST_PREDICTIONS


def test_what_cannot_be_predicted_is_not_listed() -> None:
    def size(values: dict[str, object]) -> float | None:
        return 10 if values["attention"] == "sdpa" else None

    assert changed(cell(), size)[0] == [{"attention": "sdpa"}]
    assert changed(cell(), lambda values: None)[0] == []


@pytest.mark.parametrize("values", [{"attention": "sdpa"}, {"checkpointing": "blocks"}])
def test_what_a_cell_has_already_is_no_change(values: dict[str, object]) -> None:
    found, _ = changed(cell(**values), lambda _: 10)
    assert values not in found
    assert found
