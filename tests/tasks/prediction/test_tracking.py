"""Operations that tensors without data would get wrong: defaults, counters, values, fused optimizers, repeated phases."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tasks.prediction import tracking
from tasks.prediction.allocator import CachingAllocator
from tasks.prediction.composition import compose
from tasks.prediction.operations.emulation import gpu_emulated
from tasks.prediction.operations.known_values import KnownValues
from tasks.prediction.operations.shapes import ShapeMemory
from tasks.prediction.predictor import Predictor
from tasks.prediction.records import Prediction, PredictionRequest
from tasks.prediction.replay import Label, TensorLifetime, Trace, replay
from tasks.prediction.tracking import StorageTracker
from tasks.spec.registry import make_cell
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

MIB = 1024**2


def prediction_of(**values: Any) -> Prediction:
    shape = {"context_length": 64, "batch_size": 2, "vocab_size": 500}
    return Predictor().predict(PredictionRequest(make_cell("train_step", shape | values), ()))


def test_a_prediction_does_not_depend_on_the_dtype_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "_MEMORY", ShapeMemory())
    first = prediction_of(size="mini", precision="fp32")
    monkeypatch.setattr(tracking, "_MEMORY", ShapeMemory())
    prediction_of(size="mini", precision="bf16_pure")
    assert prediction_of(size="mini", precision="fp32") == first


def test_a_tensor_with_data_changes_in_each_call() -> None:
    memory, count = ShapeMemory(), torch.zeros(1)
    for _ in range(3):
        memory.call(torch.ops.aten.add_.Tensor, (count, 1), {})
    assert count.item() == 3


def test_values_of_positions_and_masks_are_known_and_those_of_data_are_not() -> None:
    with StorageTracker(), torch.device("meta"):
        positions = torch.arange(4)
        mask = positions[:, None] >= positions
        assert not mask.all()
        assert (positions[-1].item(), (positions * 2).sum().item()) == (3, 12)
        positions += 1
        assert positions[0].item() == 1
        positions[0] = torch.rand(4).argmax()  # of data: from here on it is not known
        with pytest.raises(RuntimeError):
            positions.sum().item()


def test_a_mask_of_numbers_is_known_and_weights_are_not() -> None:
    with StorageTracker(), torch.device("meta"):
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        assert (mask == torch.full((4, 4), -torch.inf).triu(1)).all()
        weight = torch.empty(4, 4)
        assert weight.new_zeros(4).sum().item() == 0.0
        for unknown in (weight, weight.normal_(), torch.rand(4), mask + weight, weight + mask):
            with pytest.raises(RuntimeError):
                unknown.sum().item()
        mask += weight
        with pytest.raises(RuntimeError):
            mask.sum().item()


def test_large_masks_are_not_computed() -> None:
    values, large = KnownValues(), torch.zeros(1 << 25, dtype=torch.bool, device="meta")
    values.follow(torch.ops.aten.zeros.default, ([1 << 25],), {"dtype": torch.bool}, large)
    assert values.read(large) is None


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9, fused=True), 1),
        (lambda parameters: torch.optim.Adagrad(parameters, fused=True), 1),
        (lambda parameters: torch.optim.AdamW(parameters, foreach=False), 2),
        (lambda parameters: torch.optim.Adafactor(parameters, foreach=False), 0),
    ],
    ids=["sgd", "momentum", "adagrad", "loop", "adafactor"],
)
def test_optimizers_run_without_data(optimizer: Any, states: int) -> None:
    """Their state per parameter, in copies of it. Steps are counted on the CPU, and Adafactor reads norms."""
    tracker = StorageTracker()
    with gpu_emulated(tracker.labelling), tracker:
        parameter = nn.Parameter(torch.zeros(256, 1024, device="meta"))
        trained = optimizer([parameter])
        for step in ("first", "steady"):
            tracker.begin(step)  # type: ignore[arg-type]
            parameter.grad = torch.zeros_like(parameter)
            tracker.enter("optimizer")
            trained.step()
            tracker.leave("optimizer")
    held = replay(tracker.trace, CachingAllocator(), 1)["steady", "optimizer"].held_allocated
    assert held / MIB == pytest.approx(2 + states, abs=0.02)


class PythonSum(torch.autograd.Function):
    """Adds two tensors in its backward pass, and uses one of them again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        double = grad * 2
        return (double + grad * 3) * double


@pytest.mark.parametrize(
    ("use", "created"),
    [
        (lambda w: w * 2 + w * 3 + w * 4, 3),  # a product for each use, and sums in place
        (lambda w: w.exp() + w.exp().view(-1).exp().view_as(w), 3),
        (lambda w: w * 2 + w.t().exp(), 3),  # the first gradient is a view
        (lambda w: (w.add(1) + w) * 3, 2),  # both gradients are the same tensor
        (PythonSum.apply, 4),
    ],
    ids=["three uses", "views", "transposed", "one tensor", "own code"],
)  # torch.profiler reports these numbers on the CPU
def test_autograd_adds_gradients_in_place_if_nothing_else_refers_to_them(
    use: Callable[[torch.Tensor], torch.Tensor], created: int
) -> None:
    with StorageTracker() as tracker:
        weight = torch.ones(512, 512, device="meta", requires_grad=True)
        loss = use(weight).sum()
        tracker.begin("steady")
        loss.backward()  # type: ignore[no-untyped-call]
    sizes = tracker.trace.sizes_bytes
    events = tracker.trace.events("steady")
    assert sum(event >= 0 and sizes[event] == MIB for event in events) == created


def test_the_peak_of_a_phase_that_runs_twice_is_the_higher_one() -> None:
    sizes = [MIB, 8 * MIB, 2 * MIB]
    labels = [Label("forward", "", role) for role in ("first", "high", "last")]
    trace = Trace(sizes, labels)
    trace.spans["built"].append(TensorLifetime(""))
    trace.spans["first"].append(TensorLifetime("forward"))
    for events in ([0], [1, ~1], [2, ~2]):
        trace.spans["steady"] += [TensorLifetime("forward", array("q", events))]
    peak = replay(trace, CachingAllocator(), 1)["steady", "forward"]
    assert (peak.allocated, peak.held_allocated, peak.span) == (9 * MIB, MIB, 1)
    assert compose(trace, peak) == {"high": 8 * MIB, "first": MIB, "slack": 0}


def test_checkpoints_and_micro_batches_are_predicted() -> None:
    """Fewer activations at the peak, in the order of what is stored; gradients next to activations."""
    cell = {"size": "mini", "context_length": 256, "attention": "sdpa", "precision": "bf16"}
    peaks = {}
    for how in ("none", "groups:2", "selective", "blocks"):
        prediction = prediction_of(**cell, checkpointing=how)
        assert prediction.how == "modelled", prediction.reason
        peaks[how] = prediction.peak_bytes() or 0
    assert sorted(peaks, key=peaks.__getitem__, reverse=True) == list(peaks)

    def peak(count: int) -> float:
        return prediction_of(**cell, gradient_accumulation=count).peak_bytes() or 0

    tokens_bytes = 2 * 8 * 2 * 256
    two = peak(2)
    assert peaks["none"] < two
    assert peak(4) - two == pytest.approx(2 * tokens_bytes, abs=1024)


def flops_of(metric: str = "flops", **values: Any) -> dict[str, float]:
    shape = {"size": "mini", "context_length": 256}
    samples = prediction_of(**shape | values).samples
    return {one.phase: one.value or 0 for one in samples if one.metric == metric}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"attention": "sdpa", "precision": "bf16"},
        {"attention": "sdpa", "num_kv_heads": 1, "precision": "bf16"},
        {"gradient_accumulation": 3},
        {"checkpointing": "blocks"},
        {"pass": "forward"},
    ],
    ids=str,
)
def test_counted_flops_are_those_of_the_closed_form(values: dict[str, Any]) -> None:
    cell = {"device": "cpu", "size": "mini", "context_length": 256, "batch_size": 2}
    workload = build(TrainStepParams.model_validate(cell | {"vocab_size": 500} | values))
    assert flops_of(**values) == workload.flops


def test_flops_that_checkpoints_repeat_are_counted_separately() -> None:
    forward = flops_of()["forward"]
    repeated = flops_of("recomputed_flops", checkpointing="blocks")
    assert repeated.keys() == {"backward"}
    assert 0.5 * forward < repeated["backward"] < forward  # neither the head nor the last product
    assert flops_of("recomputed_flops", checkpointing="selective") == {}


def test_frozen_weights_need_no_product_for_their_gradient() -> None:
    """Adapters of rank 2 cost next to nothing, and the backward pass about as much as the forward one."""
    adapted = flops_of(lora=2)
    assert 0.85 < adapted["backward"] / adapted["forward"] < 1.2


def test_the_matrix_products_of_an_optimizer_are_no_work_of_the_model() -> None:
    assert flops_of(optimizer="muon") == flops_of()


@torch.library.custom_op("example::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _double_without_data(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class WithKernel(nn.Module):
    """A model with an operation that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return double(self.table(tokens)) @ self.table.weight.T


def test_flops_of_own_operations_are_not_known() -> None:
    prediction = prediction_of(
        model=f"{__name__}:WithKernel", vocab_size=500, **{"pass": "forward"}
    )
    flops = [one for one in prediction.samples if one.metric == "flops"]
    assert [(one.value, one.note) for one in flops] == [
        (None, "FLOPs undercounted: 1 operation unknown: example::double")
    ]


class Quantised(torch.Tensor):
    """A float tensor that is stored in one byte per element."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, device=codes.device, dtype=torch.float32
        )
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Quantised:
        return Quantised(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            return args[0]
        wide = [one.codes.float() if isinstance(one, Quantised) else one for one in args]
        return func(*wide, **(kwargs or {}))


class QuantisedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            codes = torch.zeros_like(parameter, dtype=torch.uint8)
            state = self.state[parameter]
            state.setdefault("momentum", Quantised(codes))
            state["momentum"].copy_(state["momentum"] + parameter.grad)


def test_the_state_of_quantised_optimizers_counts_as_it_is_stored() -> None:
    prediction = prediction_of(size="mini", optimizer=f"{__name__}:QuantisedMomentum")
    assert prediction.how == "modelled", prediction.reason
    roles = prediction.role_bytes()
    assert roles["optimizer state"] == pytest.approx(roles["parameters"] / 4)
