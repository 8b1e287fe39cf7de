"""What the forward pass saves: measured and predicted alike to the byte, and as the closed form has it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from model.accounting import residual_stream_bytes, saved_block_bytes
from model.config import Dimensions
from tasks.harness.saved_tensors import SavedTensors, of_all_layers
from tasks.prediction.predictor import track
from tasks.prediction.resizing import trace_by_layers
from tasks.spec.tables import Sample
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

SHAPE: dict[str, Any] = {"context_length": 64, "batch_size": 2, "vocab_size": 500}
DIMS = {"d_model": 96, "d_ff": 256, "num_layers": 3, "num_heads": 3}


def params_of(**values: Any) -> TrainStepParams:
    return TrainStepParams.model_validate(
        {"device": "cpu", **SHAPE, **({} if "model" in values else DIMS), **values}
    )


def measured(**values: Any) -> list[Sample]:
    """Of the second step of two on the CPU."""
    workload = build(params_of(**values))
    workload.step(lambda name: nullcontext())
    saved = SavedTensors(workload)
    workload.step(lambda name: saved.watching())
    return saved.samples("prediction")


def sizes(samples: Sequence[Sample]) -> dict[str, float | None]:
    return {sample.note or sample.metric: sample.value for sample in samples}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pass": "forward_grad"},
        {"attention": "weights_only"},
        {"precision": "bf16_pure"},
        {"context_length": 32},  # as long as a head is wide: nothing tells which are squares
    ],
    ids=lambda values: " ".join(map(str, values.values())) or "naive fp32",
)
def test_predicted_is_measured_to_the_byte(values: dict[str, Any]) -> None:
    found = measured(**values)
    assert len(found) >= 8
    assert track(params_of(**values)).saved == found


@pytest.mark.parametrize(("length", "layers"), [(64, 1), (64, 3), (128, 2)])
def test_a_block_saves_what_the_closed_form_says(length: int, layers: int) -> None:
    found = sizes(measured(context_length=length, num_layers=layers))
    shape = (Dimensions(**{**DIMS, "num_layers": layers}), SHAPE["batch_size"], length)
    assert found["saved_block_bytes"] == saved_block_bytes(*shape)
    assert found["residual_stream_bytes"] == residual_stream_bytes(*shape)
    assert found["saved_squares"] == 2 * layers


def test_operations_have_a_place_and_a_name() -> None:
    found = measured()
    operations = [
        (sample.step, sample.note, sample.value)
        for sample in found
        if sample.metric == "saved_operation_bytes"
    ]
    wide, square = 4 * 2 * 64 * 256, 4 * 2 * 3 * 64 * 64
    assert operations == [
        (1, "ffn: MulBackward0", 3 * wide),
        (2, "attn attention output: BmmBackward0", square + 4 * 2 * 64 * 96),
        (3, "ffn.w2: MmBackward0", wide),
        (4, "ffn: SigmoidBackward0", wide),
        (5, "attn scores: BmmBackward0", 2 * 4 * 2 * 64 * 96),
    ]


def test_sizes_by_module_add_up_all_layers_and_what_is_outside_of_them() -> None:
    """The model that is written out from smaller ones has the same sizes as the one traced whole."""
    whole = track(params_of(num_layers=12))
    wide = 4 * 2 * 64 * 256
    assert whole.module_bytes["layers.*.ffn: MulBackward0"] == 12 * 3 * wide
    assert whole.module_bytes["parameter layers.*.ffn.w1.weight"] == 12 * 4 * 96 * 256
    assert whole.module_bytes["lm_head: MmBackward0"] == 4 * 2 * 64 * 96
    written = trace_by_layers(params_of(num_layers=12), track)
    assert written is not None
    assert written.module_bytes == whole.module_bytes


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.11.ffn", "layers.*.ffn"),
        ("model.layers.0.mlp scores", "model.layers.*.mlp scores"),
        ("h.3", "h.*"),
        ("conv2.norm1", "conv2.norm1"),
        ("", ""),
    ],
)
def test_the_path_of_all_layers_has_no_number(path: str, expected: str) -> None:
    assert of_all_layers(path) == expected


def test_saved_tensors_have_their_module_even_without_a_backward_pass() -> None:
    assert "ffn" in sizes(measured(**{"pass": "forward_grad"}))


def test_a_forward_pass_without_gradients_saves_no_tensors() -> None:
    assert measured(**{"pass": "forward"}) == []
    assert track(params_of(**{"pass": "forward"})).saved == []


class OneLayer(nn.Module):
    """Without a list of blocks: all of it counts as one."""

    def __init__(self, checkpointed: bool = False, use_reentrant: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 16)
        self.checkpointed, self.use_reentrant = checkpointed, use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Any = self.table(tokens)
        if self.checkpointed:
            return functional.linear(
                checkpoint(_exp, hidden, use_reentrant=self.use_reentrant), self.table.weight
            )
        return functional.linear(_exp(hidden), self.table.weight)


def _exp(hidden: Tensor) -> Tensor:
    """Saves three tensors of the size of its input."""
    return hidden.exp().exp().exp()


@pytest.mark.parametrize(
    "how", [{}, {"checkpointed": True}, {"checkpointed": True, "use_reentrant": True}], ids=str
)
def test_a_model_without_blocks_is_one(how: dict[str, Any]) -> None:
    found = measured(model=f"{__name__}:OneLayer", model_args=how)
    assert track(params_of(model=f"{__name__}:OneLayer", model_args=how)).saved == found
    assert sizes(found)["saved_block_bytes"] == sizes(found)["saved_bytes"]
    assert "residual_stream_bytes" not in sizes(found)
    assert "loss: LogSoftmaxBackward0" in sizes(found)


def test_activations_that_the_backward_pass_recomputes_are_not_counted_as_saved() -> None:
    """Either way of checkpointing keeps the input of what it computes again, and its result is saved by what comes next."""
    plain, *checkpointed = (
        sizes(measured(model=f"{__name__}:OneLayer", model_args=how))["saved_bytes"] or 0.0
        for how in (
            {},
            *({"checkpointed": True, "use_reentrant": reentrant} for reentrant in (False, True)),
        )
    )
    hidden = 4 * 2 * 64 * 16
    assert checkpointed == [plain - hidden] * 2


def test_watching_saved_tensors_does_not_keep_them_alive() -> None:
    """A result that is saved, such as that of the softmax, must not keep itself alive."""
    workload = build(params_of(**{"pass": "forward_grad"}))
    kept: list[weakref.ref[Any]] = []
    saved = SavedTensors(workload)
    real = saved._pack

    def keep(tensor: Tensor) -> Any:
        kept.append(weakref.ref(tensor.untyped_storage()))
        return real(tensor)

    saved._pack = keep  # type: ignore[method-assign]
    with saved.watching():
        workload.step(lambda name: nullcontext())
    resident = {tensor.untyped_storage()._cdata for tensor in workload.resident}
    alive = [
        storage
        for storage in (one() for one in kept)
        if storage is not None and storage._cdata not in resident
    ]
    assert kept
    assert not alive
