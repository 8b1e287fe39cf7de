"""Predictions of models that people bring, against plain PyTorch and against counting by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.torch_version import TorchVersion

from tasks.harness.saved_tensors import SavedTensors
from tasks.prediction.allocator import attention_capability
from tasks.prediction.operations.autocast import CAST, autocast_operations
from tasks.prediction.operations.emulation import gpu_emulated
from tasks.prediction.predictor import Predictor
from tasks.prediction.records import Prediction, PredictionRequest
from tasks.spec.registry import make_cell
from tasks.train_step import build
from tasks.training.parameters import TrainStepParams

VOCABULARY, LENGTH, BATCH = 100, 64, 2
SHAPE = {"vocab_size": VOCABULARY, "context_length": LENGTH, "batch_size": BATCH}


class Model(nn.Module):
    """An embedding, layers whose results are added to their inputs, and a head."""

    def __init__(self, layer: str, count: int = 2, width: int = 64, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.ModuleList(LAYERS[layer](width, **options) for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        logits: Tensor = self.head(x)
        return logits


class Attention(nn.Module):
    """mask: none, causal, or a window of booleans. in_place: merge heads with `transpose_`."""

    def __init__(self, width: int, mask: str = "causal", in_place: bool = False) -> None:
        super().__init__()
        self.mask, self.in_place = mask, in_place
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, 4, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.mask == "written out":
            hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            hidden = hidden.unsqueeze_(0).unsqueeze_(0) if self.in_place else hidden[None, None]
            scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            window = None
            if self.mask == "window":
                at = torch.arange(t, device=x.device)
                window = ((at[:, None] >= at) & (at[:, None] - at < 8))[None, None]
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=window, is_causal=window is None
            )
        y = y.transpose_(1, 2) if self.in_place else y.transpose(1, 2)
        result: Tensor = self.out(y.reshape(b, t, w))
        return result


class Decoder(nn.Module):
    """torch's own layer, or the same arithmetic with the attention call written out."""

    def __init__(self, width: int, builtin: bool) -> None:
        super().__init__()
        self.builtin = builtin
        self.layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        if not builtin:
            self.attend = Attention(width)
            self.layer.self_attn = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        if self.builtin:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            result: Tensor = layer(x, src_mask=mask, is_causal=True)
            return result
        x = layer.norm1(x + self.attend(x))
        narrow: Tensor = layer.norm2(x + layer.linear2(functional.relu(layer.linear1(x))))
        return narrow


class Stack(nn.Module):
    """torch's own stack of one such layer, which finds out that its mask is causal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        result: Tensor = self.layers(x, mask=mask)
        return result


class Tangled(nn.RMSNorm):
    """A norm that leaves an unused weight behind, which refers to itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        spare: Any = nn.Linear(1024, 1024)
        spare.weight.itself = [spare]


class Experts(nn.Module):
    """Each of 4 experts computes as many rows as the others."""

    def __init__(self, width: int, grouped: bool) -> None:
        super().__init__()
        self.grouped, self.weight = grouped, nn.Parameter(torch.zeros(4, width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        each = rows.shape[0] // 4
        if not self.grouped:
            return torch.bmm(rows.view(4, each, -1), self.weight).view_as(x)
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * each
        return functional.grouped_mm(rows, self.weight, offs=ends).view_as(x)


class Ternary(nn.Linear):
    """Its weights are rounded, and trained through a straight-through estimator."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        rounded = (weight / weight.abs().mean()).round().clamp(-1, 1)
        return functional.linear(x, weight + (rounded - weight).detach(), self.bias)


class Inner(nn.Module):
    """Takes a gradient within its forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.key = nn.Parameter(torch.eye(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(x)
        slope = torch.func.grad(lambda weight: ((keys @ weight - x) ** 2).mean())(self.weight)
        return x @ (self.weight - 0.1 * slope)


class Penalty(nn.Module):
    """Differentiates within its forward pass, and differentiates the result again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(x)
        (slope,) = torch.autograd.grad((energy**2).sum(), energy, create_graph=True)
        mapped: Tensor = self.out(slope)
        return mapped


class Rotary(nn.Module):
    """Complex positions, and a norm that is fp32 on purpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH), torch.arange(width // 2)).float()
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))
        self.norm = nn.LayerNorm(width, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self.rotation).flatten(-2)
        normed: Tensor = self.norm(turned).to(x.dtype)
        return normed


class Causal(nn.Module):
    """A convolution of each channel over the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Conv1d(width, width, 4, groups=width, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.map(x.transpose(1, 2))
        return mapped[..., :-3].transpose(1, 2)


class Spectrum(nn.Module):
    """A filter of the frequencies along the positions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)


class Sorted(nn.Module):
    """Sorts 4 MiB of distances."""

    def forward(self, x: Tensor) -> Tensor:
        distances = (x[:, :, None] - x[:, None]).flatten(2)
        return x + distances.sort(-1).values[..., : x.shape[-1]]


class Inverse(nn.Linear):
    """Multiplies with the inverse of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.linalg.inv(self.weight)


class Products(nn.Module):
    """A product that has no formula."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Bilinear(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.map(x, x)
        return mapped


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "attention": Attention,
    "decoder": Decoder,
    "stack": Stack,
    "tangled": Tangled,
    "experts": Experts,
    "ternary": Ternary,
    "inner": Inner,
    "penalty": Penalty,
    "rotary": Rotary,
    "gru": lambda width: nn.GRU(width, width, batch_first=True),
    "convolution": Causal,
    "spectrum": lambda width: Spectrum(),
    "inverse": Inverse,
    "sorted": lambda width: Sorted(),
    "bilinear": Products,
    "norm": lambda width: nn.RMSNorm(width),
}


def values_of(layer: str, **options: Any) -> dict[str, Any]:
    given = {name: options.pop(name) for name in ("precision", "lora") if name in options}
    args = {"layer": layer, **options}
    return {
        "model": f"{__name__}:Model",
        "model_args": args,
        **SHAPE,
        "optimizer": "fused",
        **given,
    }


def predicted(layer: str, **options: Any) -> Prediction:
    cell = make_cell("train_step", values_of(layer, **options))
    return Predictor().predict(PredictionRequest(cell))


def sample_of(prediction: Prediction, metric: str, phase: str = "") -> tuple[float | None, str]:
    (found,) = (
        sample
        for sample in prediction.samples
        if (sample.mode, sample.metric, sample.phase) == ("steady", metric, phase)
    )
    return found.value, found.note


def held(layer: str, **options: Any) -> int:
    """Return the bytes that the graph holds at the end of the forward pass, in plain PyTorch."""
    model, tokens = Model(layer, **options), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    targets = torch.zeros(BATCH * LENGTH, dtype=torch.long)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Packed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        alive.add(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets)
    gc.collect()
    resident = (*model.parameters(), *model.buffers(), tokens, targets)
    own = {tensor.untyped_storage().data_ptr() for tensor in resident}
    storages = [packed.tensor.untyped_storage() for packed in alive]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert loss.requires_grad
    return sum(nbytes for address, nbytes in sizes.items() if address not in own)


def saved_tensors(layer: str, **options: Any) -> SavedTensors:
    """Return what the product counts in a step on the CPU."""
    params = TrainStepParams.model_validate({**values_of(layer, **options), "device": "cpu"})
    workload = build(params)
    saved = SavedTensors(workload)
    workload.step(lambda name: saved.watching())
    return saved


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_a_layer_of_torch_takes_what_its_arithmetic_takes(precision: str) -> None:
    own, written = (predicted("decoder", builtin=one, precision=precision) for one in (True, False))
    assert own.how == written.how == "tracked"
    assert sample_of(own, "saved_bytes") == sample_of(written, "saved_bytes")


def test_a_layer_of_torch_copies_the_result_of_efficient_attention() -> None:
    """On an H100, 4 layers of width 1,024 in fp32 peak at 2.016 and 1.891 GiB: 4 results more."""
    saved = [
        sample_of(predicted("decoder", builtin=one, precision="fp32"), "saved_bytes")[0] or 0
        for one in (True, False)
    ]
    assert saved[0] - saved[1] == 2 * 4 * BATCH * LENGTH * 64


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ("attention", {"mask": "window"}),
        ("attention", {"mask": "written out"}),
        ("attention", {"mask": "written out", "in_place": True}),
        ("ternary", {}),
        ("penalty", {}),
        ("experts", {"grouped": False}),
    ],
)
def test_saved_bytes_are_those_that_the_graph_holds(layer: str, options: dict[str, Any]) -> None:
    expected = held(layer, **options)
    # Of each call, the GPU's fused kernel saves two numbers for its random generator.
    generators = 2 * 16 if options.get("mask") == "window" else 0
    value, _ = sample_of(predicted(layer, **options), "saved_bytes")
    assert value == expected + generators
    for _ in range(2):
        (total,) = (
            sample.value
            for sample in saved_tensors(layer, **options).samples("memory")
            if sample.metric == "saved_bytes"
        )
        assert total == expected


def test_each_layer_converts_a_mask_of_booleans() -> None:
    few, many = (sample_of(predicted("attention", mask="window", count=n), "saved_bytes")[0] or 0
                 for n in (2, 4))  # fmt: skip
    plain = [sample_of(predicted("attention", count=n), "saved_bytes")[0] or 0 for n in (2, 4)]
    assert (many - few) - (plain[1] - plain[0]) == 2 * 4 * LENGTH * LENGTH


def test_shapes_changed_in_place_are_followed() -> None:
    samples = [predicted("attention", mask="written out", in_place=one).samples for one in (0, 1)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("grouped", [True, False])
def test_grouped_products_count(precision: str, grouped: bool) -> None:
    prediction = predicted("experts", grouped=grouped, precision=precision)
    rows = BATCH * LENGTH
    forward = 2 * 2 * rows * 64 * 64 + 2 * rows * 64 * VOCABULARY
    assert sample_of(prediction, "flops", "forward")[0] == forward
    assert sample_of(prediction, "flops", "backward")[0] == 2 * forward


def test_a_product_without_a_formula_is_named() -> None:
    value, note = sample_of(predicted("bilinear"), "flops", "forward")
    assert value is None
    assert note == "FLOPs undercounted: 1 operation unknown: aten::_trilinear"


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ("gru", "gru"),
        ("convolution", "convolution"),
        ("spectrum", "_fft_c2c, _fft_c2r, _fft_r2c"),
        ("inverse", "linalg_inv_ex"),
        ("sorted", "sort"),
    ],
)
def test_kernels_of_unknown_memory_are_named(layer: str, names: str) -> None:
    prediction = predicted(layer)
    assert prediction.how == "may take more"
    assert prediction.reason == f"kernels of CUDA's libraries have memory of unknown size: {names}"
    assert sample_of(prediction, "peak_allocated_bytes", "forward")[1] == "may take more"


def test_a_norm_saves_its_input_and_a_number_for_each_row() -> None:
    """The first norm saves the embedded tokens, the second one the sums; counted by hand."""
    more = [sample_of(predicted("norm", count=n), "saved_bytes")[0] or 0 for n in (2, 3)]
    assert more[1] - more[0] == 4 * BATCH * LENGTH * (64 + 1)


def test_code_that_refuses_hooks_costs_only_what_they_count() -> None:
    (sample,) = saved_tensors("inner").samples("memory")
    assert (sample.metric, sample.value) == ("saved_bytes", None)
    assert sample.note.startswith("not counted: torch.func.")
    prediction = predicted("inner")
    assert prediction.how == "tracked"
    assert sample_of(prediction, "saved_bytes") == (None, sample.note)


def test_adapters_of_a_layer_whose_weight_is_read_are_trained() -> None:
    values = values_of("decoder", builtin=True, lora=2)
    workload = build(TrainStepParams.model_validate({**values, "device": "cpu"}))
    workload.step(lambda name: nullcontext())
    assert workload.model is not None
    trained = {n: p for n, p in workload.model.named_parameters() if p.requires_grad}
    assert any("out_proj.lora_b" in name for name in trained)
    # Those of the first step, in which the second matrix is 0.
    state = workload.optimizers[0].state
    without = [name for name, one in trained.items() if one not in state]
    assert without == []
    assert predicted("decoder", builtin=True, lora=2).how == "tracked"


@pytest.mark.parametrize(("precision", "dtypes"), [("fp32", "float32"), ("bf16_pure", "bfloat16, float32")])  # fmt: skip
def test_the_harness_changes_no_model(precision: str, dtypes: str) -> None:
    values = {**values_of("rotary", precision=precision), "device": "cpu"}
    workload = build(TrainStepParams.model_validate(values))
    assert workload.model is not None
    layer: Any = workload.model.get_submodule("layers.0")
    assert layer.rotation.dtype == torch.complex64
    assert layer.rotation[3, 1].imag.item() == pytest.approx(0.14112, abs=1e-5)  # sin 3
    assert layer.norm.weight.dtype == torch.float32
    assert workload.facts["parameter_dtype"] == dtypes
    workload.step(lambda name: nullcontext())


def test_autocast_has_a_kernel_for_each_function_of_torch() -> None:
    for func in autocast_operations():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), CAST.name)


def expressions(device: str) -> dict[str, Callable[[], Tensor]]:
    y = torch.empty(2, 8, 16, device=device, dtype=torch.bfloat16)
    x, square = torch.empty(2, 8, 16, device=device), torch.empty(16, 16, device=device)
    index = torch.zeros(2, 8, 16, device=device, dtype=torch.long)
    rows = torch.empty(8, 16, device=device, dtype=torch.bfloat16)
    low, wide = (torch.empty(16, device=device, dtype=one) for one in (y.dtype, x.dtype))
    column, slope = torch.empty(16, 1, device=device), torch.empty(1, device=device)
    places, targets = (torch.zeros(n, device=device, dtype=torch.long) for n in (1, 8))
    axes = torch.empty(2, 3, device=device)
    return {
        "normalize": lambda: functional.normalize(y, dim=-1),
        "vector_norm": lambda: torch.linalg.vector_norm(y, dim=-1),
        "vector_norm to bf16": lambda: torch.linalg.vector_norm(y, dtype=torch.bfloat16),
        "linalg.norm": lambda: torch.linalg.norm(y, dim=-1),
        "norm": lambda: y.norm(dim=-1),
        "reciprocal": lambda: 1 / y,
        "gumbel_softmax": lambda: functional.gumbel_softmax(y, dim=-1),
        "softmin": lambda: functional.softmin(y, -1),
        "softmax": lambda: torch.softmax(y, -1),
        "softmax to bf16": lambda: torch.softmax(y, -1, dtype=torch.bfloat16),
        "interpolate": lambda: functional.interpolate(y, scale_factor=2),
        "pairwise_distance": lambda: functional.pairwise_distance(y, y),
        "cosine_similarity": lambda: functional.cosine_similarity(y, y),
        "tensordot": lambda: torch.tensordot(y, column, dims=1),
        "scatter_add": lambda: x.scatter_add(1, index, y),
        "index_put": lambda: x.index_put((places,), y.new_empty(1, 8, 16)),
        "addcmul": lambda: torch.addcmul(x, y, y),
        "atan2": lambda: torch.atan2(y, x),
        "dot": lambda: torch.dot(low, wide),
        "vdot": lambda: torch.vdot(low, wide),
        "cross": lambda: torch.linalg.cross(axes.bfloat16(), axes),
        "cat": lambda: torch.cat([x, y]),
        "mv": lambda: torch.mv(square, low),
        "addmm": lambda: torch.addmm(square, square, square),
        "multi_dot": lambda: torch.linalg.multi_dot([square, square, square]),
        "einsum": lambda: torch.einsum("bij,jk->bik", x, square),
        "conv1d": lambda: functional.conv1d(x, torch.empty(4, 8, 3, device=device)),
        "prelu": lambda: functional.prelu(x, slope),
        "double": lambda: x.double() @ square.double(),
        "mse_loss": lambda: functional.mse_loss(y, y),
        "kl_div": lambda: functional.kl_div(y, y, reduction="sum"),
        "cross_entropy": lambda: functional.cross_entropy(rows, targets),
        "group_norm": lambda: functional.group_norm(y, 2),
        "rms_norm": lambda: functional.rms_norm(y, (16,)),
        "cumsum": lambda: y.cumsum(-1),
        "prod": lambda: y.prod(-1),
        "cumsum of counts": lambda: index.cumsum(-1),
        "logsumexp": lambda: y.logsumexp(-1),
        "pow": lambda: 2**y,
        "mean": lambda: y.mean(),
        "gelu": lambda: functional.gelu(y),
        "matmul": lambda: y @ square,
        "baddbmm": lambda: torch.baddbmm(x, y, square.expand(2, 16, 16)),
    }  # fmt: skip


@pytest.mark.parametrize("low", [torch.bfloat16])
def test_dtypes_are_those_of_the_autocast_of_torch(low: torch.dtype) -> None:
    """Torch's own runs without a GPU on fake tensors."""
    expected, found = {}, {}
    with torch.no_grad(), FakeTensorMode():
        calls = expressions("cuda")
        torch.set_autocast_dtype("cuda", low)
        torch.set_autocast_enabled("cuda", True)
        try:
            expected = {name: call().dtype for name, call in calls.items()}
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)
    with torch.no_grad(), gpu_emulated(lambda role: nullcontext()) as emulation, emulation:
        calls = expressions("meta")
        with torch.autocast("cuda", low):
            found = {name: call().dtype for name, call in calls.items()}
    assert found == expected


def test_autocast_narrows_attention_whose_query_is_narrow_already() -> None:
    """Biases that `nn.MultiheadAttention` appends make keys and values fp32."""
    query = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    attend, emulated = (
        functional.scaled_dot_product_attention,
        gpu_emulated(lambda _: nullcontext()),
    )
    with emulated as emulation, emulation, torch.autocast("cuda", torch.bfloat16):
        assert attend(query, query.float(), query.float()).dtype == torch.bfloat16


def test_a_stack_of_torch_saves_what_its_layer_does() -> None:
    stack, layer = predicted("stack"), predicted("decoder", builtin=True)
    assert stack.how == "tracked", stack.reason
    assert sample_of(stack, "saved_bytes") == sample_of(layer, "saved_bytes")


def test_what_only_cycles_keep_is_released_before_the_first_step() -> None:
    assert predicted("tangled").peak_bytes() == predicted("norm").peak_bytes()


def test_autocast_refuses_what_that_of_torch_refuses() -> None:
    half = torch.empty(4, device="meta", dtype=torch.bfloat16)
    with (
        gpu_emulated(lambda role: nullcontext()) as emulation,
        emulation,
        torch.autocast("cuda", torch.bfloat16),
        pytest.raises(RuntimeError, match="unsafe to autocast"),
    ):
        functional.binary_cross_entropy(half, half)


FLASH, CUDNN, EFFICIENT = "ScaledDotProductFlash", "ScaledDotProductCudnn", "ScaledDotProductEffic"
# cuDNN's kernel rounds the share of dropout to 1/16. From 2.12 on, torch avoids it otherwise.
ROUNDED = CUDNN if TorchVersion(torch.__version__) < "2.12" else EFFICIENT
# The last one: halves are multiplied in fp32.
WRITTEN = ("UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")


@pytest.mark.parametrize(
    ("expected", "dtype", "options"),
    [
        (FLASH, torch.bfloat16, {}),
        (FLASH, torch.float16, {"keys": 2, "gqa": True}),
        (EFFICIENT, torch.float32, {}),
        (CUDNN, torch.bfloat16, {"mask": "bool"}),
        (CUDNN, torch.bfloat16, {"mask": "bool", "dropout": 0.125}),
        (ROUNDED, torch.bfloat16, {"mask": "bool", "dropout": 0.1}),
        (CUDNN, torch.bfloat16, {"value": 32}),
        (EFFICIENT, torch.bfloat16, {"mask": "trained"}),
        (EFFICIENT, torch.float32, {"mask": "trained"}),
        (EFFICIENT, torch.bfloat16, {"width": 512}),
        (EFFICIENT, torch.float32, {"mask": "bool", "value": 32}),
        (WRITTEN, torch.float32, {"keys": 2, "gqa": True}),
        (WRITTEN, torch.float32, {"width": 50}),
        (WRITTEN, torch.float64, {}),
        ("SliceBackward0", torch.bfloat16, {"width": 50}),  # padded for flash
        (CUDNN, torch.bfloat16, {"width": 192, "value": 128}),
        # The checks of other GPUs, in sdp_utils.cpp: [sm86, sm89] and [sm120, sm121] train with flash
        # up to a width of 192, and without dropout above 224; below sm80 it does not exist.
        (EFFICIENT, torch.bfloat16, {"width": 192, "value": 128, "capability": 8.0}),
        (FLASH, torch.bfloat16, {"width": 208, "capability": 8.0}),
        (FLASH, torch.bfloat16, {"width": 192, "dropout": 0.1, "capability": 8.6}),
        (EFFICIENT, torch.bfloat16, {"width": 208, "capability": 8.9}),
        (EFFICIENT, torch.bfloat16, {"width": 224, "capability": 12.0}),
        (FLASH, torch.bfloat16, {"width": 256, "capability": 12.0}),
        (EFFICIENT, torch.bfloat16, {"width": 256, "dropout": 0.1, "capability": 8.6}),
        (FLASH, torch.bfloat16, {"width": 208, "capability": 10.0}),
        (CUDNN, torch.bfloat16, {"mask": "bool", "capability": 8.6}),
        (EFFICIENT, torch.float16, {"capability": 7.5}),
        (EFFICIENT, torch.float16, {"mask": "bool", "capability": 7.5}),
        (WRITTEN, torch.float16, {"width": 60, "capability": 7.5}),
        (EFFICIENT, torch.float32, {"width": 50, "capability": 7.5}),
        (WRITTEN, torch.bfloat16, {"capability": 7.5}),
    ],
)
def test_the_kernel_of_attention_is_that_of_torch(
    expected: str | tuple[str, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    width, heads = options.get("width", 64), options.get("keys", 4)

    def made(heads: int, width: int) -> Tensor:
        return torch.empty(2, heads, 24, width, dtype=dtype, device="meta", requires_grad=True)

    mask = None
    if "mask" in options:
        kind = dtype if options["mask"] == "trained" else torch.bool
        mask = torch.empty(24, 24, dtype=kind, device="meta")
        mask.requires_grad_(options["mask"] == "trained")
    given = made(4, width), made(heads, width), made(heads, options.get("value", width))
    capability = attention_capability(options.get("capability"))
    emulated = gpu_emulated(lambda role: nullcontext(), capability=capability)
    with emulated as emulation, emulation:
        result = functional.scaled_dot_product_attention(
            *given,
            attn_mask=mask,
            dropout_p=options.get("dropout", 0.0),
            enable_gqa=options.get("gqa", False),
        )
    assert type(result.grad_fn).__name__.startswith(expected)
    if isinstance(expected, str):
        result.sum().backward()  # type: ignore[no-untyped-call]
        assert mask is None or not mask.requires_grad or mask.grad is not None
