"""Models that do what two steps without a device do not show: it is followed, or the row says why not."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.planning.prediction_requests import predict_memory
from tasks.prediction.predictor import Predictor
from tasks.prediction.records import Prediction, PredictionRequest
from tasks.spec.cell import Cell
from tasks.spec.registry import make_cell
from tests.conftest import ROOT

WIDTH, BATCH, LENGTH, VOCABULARY = 32, 2, 64, 100
MIB = 2**20
MORE_BYTES = 64 * MIB
FEW_BYTES = 1024  # two blocks; with torch 2.11 the first trace of a process has one more number
FORWARD = {"pass": "forward"}


def more(device: torch.device) -> Tensor:
    return torch.zeros(MORE_BYTES // 4, device=device)


class Block(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.map = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if "put" in self.how:
            return x + self.put(functional.gelu(self.map(x)))
        if self.how == "cuda.amp":
            with torch.cuda.amp.autocast(enabled=False):
                return x + self.map(x.float())
        if self.how == "amp":
            with torch.amp.autocast("cuda", enabled=False):
                return x + self.map(x.float())
        return x + self.map(x)

    def put(self, x: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for number in range(8):
            at = (torch.arange(number % 2, x.shape[0], device=x.device),)
            if self.how == "put, cloned":
                changed = x.clone()
                changed.index_put_(at, torch.zeros((), device=x.device))
            else:
                changed = x.index_put(at, torch.zeros((), device=x.device))
            total = total + (changed * changed).mean()
        return x + total


class Ratio(torch.autograd.Function):
    """Allocates in its backward pass what a number says that only the data have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        count = int(ctx.saved_tensors[0].item() * 100)
        return grad + torch.zeros(count, *grad.shape, device=grad.device).sum(0), None


@lru_cache
def remembered(length: int, device: torch.device) -> Tensor:
    return torch.zeros(length, MORE_BYTES // length // 4, device=device)


class Model(nn.Module):
    """Model from token ids to logits that does something on the way, which `how` names."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.seen: list[Tensor] = []
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Block(how) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("work", torch.empty(0), persistent=False)
        self.register_buffer("share", torch.rand(1))
        if how == "made on the CPU":
            self.cache = torch.zeros(MIB, device="cpu")
        if how == "large":
            self.weights = nn.Parameter(torch.zeros(1024, 1024))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            if self.how != "layer drop" or random.random() < 0.5:
                x = layer(x)
        x = getattr(self, f"_{self.how.replace(' ', '_')}", lambda x: x)(x)
        if self.how == "out":
            out = torch.empty(0, device=x.device)
            return torch.matmul(x, self.head.weight.t(), out=out)
        if self.how == "no out":
            return torch.matmul(x, self.head.weight.t())
        logits: Tensor = self.head(x)
        return logits

    def _grows(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        return x

    def _has_the_last(self, x: Tensor) -> Tensor:
        self.seen = [x.detach()]
        return x

    def _counts(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + more(x.device).sum() if self.calls % 4 == 0 else x

    def _asks_the_tensor(self, x: Tensor) -> Tensor:
        return x + more(x.device).sum() if x.is_cuda else x

    def _asks_torch(self, x: Tensor) -> Tensor:
        return x + more(x.device).sum() if torch.cuda.is_available() else x

    def _resized(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.work.resize_(MORE_BYTES // 4)
        return x

    def _large(self, x: Tensor) -> Tensor:
        return x + self.weights.diagonal()[:WIDTH]

    def _remembers(self, x: Tensor) -> Tensor:
        return x + remembered(x.shape[1], x.device).sum()

    def _reads_out(self, x: Tensor) -> Tensor:
        torch.amax(x.detach().abs(), dim=(0, 1, 2), out=self.largest)
        return self._if_above_zero(x, self.largest)

    def _reads_copied(self, x: Tensor) -> Tensor:
        torch._foreach_copy_([self.largest], [x.detach().abs().amax()])
        return self._if_above_zero(x, self.largest)

    def _reads_a_mean(self, x: Tensor) -> Tensor:
        x = self.norm(x.mT).mT
        assert self.norm.running_mean is not None
        return self._if_above_zero(x, self.norm.running_mean.abs().sum())

    def _if_above_zero(self, x: Tensor, number: Tensor) -> Tensor:
        return x + more(x.device).sum() if number.item() > 0 else x

    def _reads_in_backward(self, x: Tensor) -> Tensor:
        read: Tensor = Ratio.apply(x, self.share)
        return read


def cell_of(how: str, **values: Any) -> Cell:
    shape = {"context_length": LENGTH, "batch_size": BATCH, "vocab_size": VOCABULARY}
    own = {"model": f"{__name__}:Model", "model_args": {"how": how}, "device": "cuda", **shape}
    return make_cell("train_step", {**own, **values})


def predicted(how: str, **values: Any) -> Prediction:
    return Predictor().predict(PredictionRequest(cell_of(how, **values), (2**40,)))


def peak(how: str, **values: Any) -> float:
    prediction = predicted(how, **values)
    assert (prediction.how, prediction.reason) == ("tracked", "")
    assert prediction.verdicts == {2**40: "fits"}
    return prediction.peak_bytes() or 0.0


def require_caveat(prediction: Prediction, reason: str) -> None:
    assert prediction.how == "may take more"
    assert reason in prediction.reason
    assert prediction.verdicts == {2**40: "perhaps"}


def test_what_a_model_holds_after_each_step_is_named() -> None:
    size = BATCH * LENGTH * WIDTH * 4 / MIB
    require_caveat(predicted("grows"), f"each step leaves {size:.1f} MiB more than the one before")
    peak("has the last")


def test_a_model_that_counts_its_steps_is_named() -> None:
    require_caveat(predicted("counts"), "in later steps, because these attributes change: calls")


def test_a_model_that_asks_a_tensor_for_its_device_does_what_it_does_on_a_gpu() -> None:
    assert peak("asks the tensor") >= peak("") + MORE_BYTES - 10 * MIB


def test_a_model_that_asks_torch_for_a_gpu_is_named() -> None:
    require_caveat(predicted("asks torch"), "asks torch.cuda for a GPU")
    require_caveat(predicted("made on the CPU"), "tensors of more than 1 MiB on the CPU")


def test_a_storage_that_torch_resizes_counts() -> None:
    assert peak("out", **FORWARD) == pytest.approx(peak("no out", **FORWARD), abs=FEW_BYTES)
    assert peak("resized") >= peak("") + MORE_BYTES - 10 * MIB


def test_the_older_name_of_autocast_is_the_same() -> None:
    old, new = (peak(how, precision="bf16") for how in ("cuda.amp", "amp"))
    assert old == pytest.approx(new, abs=FEW_BYTES)


def test_what_a_checkpoint_computes_again_is_not_made_in_place() -> None:
    again = {"checkpointing": "blocks"}
    assert peak("put", **again) == peak("put, cloned", **again)


def test_what_an_optimizer_does_after_some_steps_counts() -> None:
    """RAdam makes two further tensors from its sixth step on."""
    plain = {"optimizer_args": {"foreach": False}}
    later = peak("large", optimizer="torch.optim:RAdam", **plain)
    assert later >= peak("large", optimizer="torch.optim:Adam", **plain) + 3 * MIB


@pytest.mark.parametrize("how", ["reads out", "reads copied", "reads a mean", "reads in backward"])
def test_a_number_that_only_the_data_have_is_not_made_up(how: str) -> None:
    prediction = predicted(how)
    assert prediction.how == "closed form"
    assert "does not run without data" in prediction.reason


def test_random_numbers_are_named_and_the_same_each_time() -> None:
    first, second = predicted("layer drop"), predicted("layer drop")
    require_caveat(first, "it draws random numbers")
    assert first == second


@pytest.mark.process
def test_no_cell_is_predicted_with_what_another_one_has_remembered() -> None:
    cells = [cell_of("remembers", optimizer=name) for name in ("fused", "foreach", "sgd")]
    together = predict_memory(cells, None, (str(ROOT),))
    for cell in cells:
        alone = predict_memory([cell], None, (str(ROOT),))[cell.id].peak_bytes()
        assert together[cell.id].peak_bytes() == alone
        assert (alone or 0) > MORE_BYTES
