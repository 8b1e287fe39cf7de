"""Predicted memory of one rank of several: against the CPU's allocator, whole traces and measured GPUs."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tasks.prediction.allocator import CachingAllocator
from tasks.prediction.operations.kernels import SCRATCH
from tasks.prediction.predictor import Predictor, track
from tasks.prediction.ranks import fullest_rank, ranks_emulated
from tasks.prediction.records import CLOSED_FORM, COMPILED, Prediction, PredictionRequest
from tasks.prediction.replay import Trace, held_by_nccl, replay
from tasks.prediction.resizing import trace_by_layers
from tasks.prediction.tracking import BUFFERS, StorageTracker
from tasks.spec.registry import make_cell
from tasks.training.parameters import TrainStepParams
from tests.conftest import ROOT
from tests.tasks.prediction.test_prediction import measured_peaks

# Torch's ZeroRedundancyOptimizer uses it, on import.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
SHAPE: dict[str, Any] = {
    "d_model": 64, "d_ff": 128, "num_heads": 4, "num_layers": 2, "context_length": 32, "vocab_size": 500,
    "batch_size": 2, "batch": "per_gpu",
}  # fmt: skip
ON_GPUS = SHAPE | {"device": "cuda", "gpus": 2, "precision": "bf16", "optimizer": "fused"}
LAYER_BYTES = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
PARAMETER_BYTES = 4 * (2 * 500 * 64 + 64) + 2 * LAYER_BYTES


def params_of(**values: Any) -> TrainStepParams:
    return TrainStepParams.model_validate(ON_GPUS | values)


def prediction_of(caps_bytes: tuple[int, ...] = (), **values: Any) -> Prediction:
    cell = make_cell("train_step", ON_GPUS | values)
    return Predictor().predict(PredictionRequest(cell, caps_bytes))


def requested_of(trace: Trace) -> dict[str, int]:
    """Return the predicted peak of each step, as tensors request it."""
    found: dict[str, int] = {}
    for (step, _), peaks in replay(trace, CachingAllocator(), 2).items():
        found[step] = max(found.get(step, 0), peaks.requested)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {"parallel": "naive"},
        *(
            pytest.param({"parallel": parallel}, marks=pytest.mark.slow)
            for parallel in ("flat", "overlap", "bucketed", "zero1", "zero1_torch")
        ),
        {"parallel": "ddp"},
        *(
            pytest.param(values, marks=pytest.mark.slow)
            for values in (
                {"parallel": "ddp", "bucket_view": True},
                {"parallel": "ddp", "bucket_mb": 0.05, "gradient_accumulation": 2},
                {"parallel": "bucketed", "bucket_mb": 0.05, "gradient_accumulation": 2},
            )
        ),
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_the_peaks_of_a_rank_are_those_of_the_cpu(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SCRATCH, "_softmax_backward_data")  # the CPU's kernel takes none
    on_cpu = SHAPE | {"device": "cpu", "processes": 2, "optimizer": "foreach"} | values
    params = TrainStepParams.model_validate(on_cpu)
    trace = track(params)
    steps = [step for step in ("first", "second", "steady") if trace.spans[step]]  # type: ignore[index]
    with ranks_emulated(params, 0, StorageTracker()):
        measured = measured_peaks(params, tmp_path, steps)
    peaks = replay(trace, CachingAllocator(), 1)
    predicted = {f"{step} {phase}": one.requested for (step, phase), one in peaks.items() if phase}
    assert len(measured) == len(steps) * len(params.phases)
    assert predicted == pytest.approx(measured, rel=1.5e-3)


@pytest.mark.parametrize(
    "values",
    [
        {"parallel": "naive"},
        *(
            pytest.param(values, marks=pytest.mark.slow)
            for values in (
                {"parallel": "overlap"},
                {"parallel": "fsdp2"},
                {"parallel": "fsdp2", "reshard": False},
                {"parallel": "fsdp2", "checkpointing": "blocks", "optimizer": "foreach"},
                {"parallel": "fsdp2", "precision": "fp32", "gradient_accumulation": 2},
            )
        ),
    ],
    ids=lambda values: " ".join(map(str, values.values())),
)
def test_the_trace_of_a_rank_by_layers_equals_the_whole_trace(values: dict[str, Any]) -> None:
    # Of 9 layers, a whole trace is as long as those of 4 and 5, which some cells need.
    params = params_of(**{"num_layers": 12 if len(values) > 2 else 9} | values)
    whole = track(params, workspace_bytes=1 << 25)
    assert trace_by_layers(params, partial(track, workspace_bytes=1 << 25)) == whole


def test_an_emulated_rank_leaves_no_trace_in_its_process() -> None:
    hook, resize = sys.excepthook, torch.UntypedStorage.resize_
    assert prediction_of(parallel="fsdp2", num_layers=1).how == "tracked"
    assert not dist.is_initialized()
    assert not hasattr(torch, "meta")
    assert (sys.excepthook, torch.UntypedStorage.resize_) == (hook, resize)


def test_strategies_with_tensors_of_several_layers_are_traced_whole() -> None:
    def never(params: TrainStepParams) -> Trace:
        raise AssertionError("a small model was traced")

    for parallel in ("flat", "bucketed", "ddp", "zero1", "zero1_torch"):
        assert trace_by_layers(params_of(parallel=parallel, num_layers=40), never) is None


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_second_step_of_ddp_holds_the_buckets_of_the_first(micro_batches: int) -> None:
    model = {"parallel": "ddp", "num_layers": 1, "gradient_accumulation": micro_batches}
    trace = track(params_of(**model))
    released, held = requested_of(trace), requested_of(held_by_nccl(trace))
    gradients = PARAMETER_BYTES - LAYER_BYTES  # in fp32
    assert held["second"] - released["second"] == gradients
    assert (held["first"], held["steady"]) == (released["first"], released["steady"])
    found = prediction_of(**model)
    assert found.peak_bytes("peak_requested_bytes", "second") == held["second"]
    assert "in some runs it needs less" in found.reason
    by_role = found.role_bytes()
    assert by_role[BUFFERS] == by_role["parameters"] == gradients


def test_a_limit_between_both_second_steps_of_ddp_is_perhaps_enough() -> None:
    model = {"parallel": "ddp", "vocab_size": 1_000_000, "num_layers": 1, "context_length": 2}
    trace = track(params_of(**model))
    low, high = requested_of(trace)["second"], requested_of(held_by_nccl(trace))["second"]
    limits = (round(0.9 * low), (low + 2 * high) // 3, 4 * high)
    assert list(prediction_of(limits, **model).verdicts.values()) == ["oom", "perhaps", "fits"]


def test_a_strategy_without_ddp_has_a_second_step_like_all_later_ones() -> None:
    found = prediction_of(parallel="naive", optimizer="foreach")
    peaks = [found.peak_bytes(mode=mode) or 0 for mode in ("first", "second", "steady")]
    assert 0 < peaks[0] <= peaks[1] == peaks[2]
    assert not found.reason


def test_a_rank_of_fsdp2_has_its_share() -> None:
    found = [prediction_of(parallel="fsdp2", gpus=gpus) for gpus in (4, 8)]
    assert (found[0].peak_bytes() or 0) > (found[1].peak_bytes() or 0) > 0
    by_role = found[0].role_bytes()
    assert by_role["parameters"] == pytest.approx(PARAMETER_BYTES / 4, rel=0.01)
    assert by_role["optimizer state"] == pytest.approx(PARAMETER_BYTES / 2, rel=0.01)


def test_the_rank_with_the_most_parameters_is_that_of_torch() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = params_of(parallel="zero1_torch", gpus=4)
    sizes = [700, 90, 90, 400, 401, 30, 20, 10]
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    with ranks_emulated(params, 0, StorageTracker()):
        zero = ZeroRedundancyOptimizer(weights, torch.optim.SGD)
        shares = [
            sum(one.numel() for group in groups for one in group["params"])
            for groups in zero._partition_parameters()
        ]
    assert shares[fullest_rank(sizes, 4)] == max(shares) > min(shares)


def test_fused_attention_takes_the_dtype_that_fsdp2_gathers() -> None:
    found = prediction_of(parallel="fsdp2", attention="flash")
    assert (found.how, found.reason) == ("modelled", "")


@pytest.mark.compile
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_compiled_blocks_of_ranks_are_predicted_from_their_code(parallel: str) -> None:
    found = prediction_of(parallel=parallel, compile="blocks", num_layers=1)
    assert found.how == COMPILED


def test_a_storage_that_is_resized_is_followed() -> None:
    tracker = StorageTracker()
    with tracker:
        tensor = torch.empty(1000, device="meta")
        storage = tensor.untyped_storage()
        for nbytes in (0, 8000, 8000, 0):
            storage.resize_(nbytes)
        del tensor, storage
    assert tracker.trace.sizes_bytes == [4000, 8000]
    assert list(tracker.trace.events("built")) == [0, ~0, 1, ~1]


def test_storages_of_another_stream_have_its_number() -> None:
    labels = track(params_of(parallel="fsdp2", num_layers=1)).labels
    streams = {label.stream for label in labels if label.role == BUFFERS}
    assert 0 in streams
    assert len(streams) > 1


OWN = {"device": "cuda", "gpus": 2, "vocab_size": 50, "context_length": 32, "optimizer": "fused"}
MODELS = """
import torch.distributed as dist
from torch import nn


class WithoutBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 7)
        self.head = nn.Linear(7, 50)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class AsksOtherRanks(WithoutBlocks):
    def forward(self, tokens):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, "here")
        return super().forward(tokens)
"""


def test_an_own_model_is_predicted_or_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models_of_ranks.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def predict(factory: str, parallel: str) -> Prediction:
        values = {"model": f"models_of_ranks:{factory}", "parallel": parallel}
        return Predictor().predict(PredictionRequest(make_cell("train_step", OWN | values)))

    assert predict("WithoutBlocks", "ddp").how == "tracked"
    sharded = predict("WithoutBlocks", "fsdp2")
    assert not sharded.how
    assert "needs blocks in a torch.nn.ModuleList" in sharded.reason
    asking = predict("AsksOtherRanks", "zero1")
    assert asking.how == CLOSED_FORM
    assert "it does not run without data" in asking.reason
    count = 50 * 7 * 2 + 50
    assert asking.role_bytes("closed_form_bytes")["optimizer state"] == 8 * count // 2
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["naive", "ddp", "zero1", "zero1_torch", "fsdp2"])
def test_models_by_name_are_predicted(parallel: str) -> None:
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 50,
    }  # fmt: skip
    cell = make_cell(
        "train_step", OWN | {"model": "hf:llama", "model_args": sizes, "parallel": parallel}
    )
    found = Predictor().predict(PredictionRequest(cell))
    assert found.how == "modelled"
    peaks = [found.peak_bytes(mode=mode) or 0 for mode in ("first", "second", "steady")]
    assert 0 < peaks[0] <= peaks[2] <= peaks[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("prediction_ranks")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(54))
def test_predicted_peaks_of_ranks_are_those_measured_on_gpus(number: int, benchmark: Any) -> None:
    cells = list(benchmark.measured_cells())
    assert len(cells) == 54
    if "model" in cells[number].values:
        pytest.importorskip("transformers")
    for one in benchmark.compare(cells[number]):
        assert one.is_within, benchmark.row_of(one)


def test_a_peak_beyond_its_bound_is_none_that_was_measured(benchmark: Any) -> None:
    cell = benchmark.Cell("", {}, {}, differs=False)
    for step, bound in benchmark.BOUNDS.items():
        ratios = (1 - 1.01 * bound, 1 - 0.99 * bound, 1 + 0.99 * bound, 1 + 1.01 * bound)
        found = [benchmark.Comparison(cell, step, ratio, 1.0, "").is_within for ratio in ratios]
        assert found == [False, True, True, False]
