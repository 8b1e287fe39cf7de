"""Every implementation against float64, forward and gradients, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import (
    IMPLEMENTATIONS,
    Attention,
    causal_blocks,
    make_attention,
    naive,
    softmax,
)

HERE = torch.device("cpu")
SHAPES = [(3, 33, 16), (2, 2, 64, 32)]
# In units of the dtype's own rounding error, of the largest element. In fp32 the rounding of each term of a sum shows,
# some 17 units at 256 terms on a GPU, where TF32 would be thousands; narrow dtypes sum in fp32 and round at the end.
BOUND = {torch.float32: 64.0, torch.float16: 4.0, torch.bfloat16: 4.0}
ON_THE_CPU = [name for name in IMPLEMENTATIONS if name not in ("efficient", "cudnn")]


def errors_in_eps(
    attend: Attention,
    causal: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> list[float]:
    """Of the output and of the gradients of query, key and value, against naive attention in float64 on the same inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
    found = _results(attend, inputs)
    exact = _results(
        make_attention("naive", shape[-2], causal, device), [x.double() for x in inputs]
    )
    eps = torch.finfo(dtype).eps
    return [
        float((f.double() - e).abs().max() / e.abs().max() / eps)
        for f, e in zip(found, exact, strict=True)
    ]


def _results(attend: Attention, inputs: list[Tensor]) -> list[Tensor]:
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    output = attend(query, key, value)
    output.backward(inputs[3])
    return [output.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


@pytest.mark.parametrize("shape", SHAPES, ids=["no heads", "heads"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_agrees_with_float64(
    name: str, dtype: torch.dtype, causal: bool, shape: tuple[int, ...]
) -> None:
    errors = errors_in_eps(
        make_attention(name, shape[-2], causal, HERE), causal, dtype, shape, HERE
    )
    assert len(errors) == 4
    assert max(errors) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("error", ["scaled by the length", "mask off by one", "a gradient lost"])
def test_wrong_attention_exceeds_the_error_bound(error: str, dtype: torch.dtype) -> None:
    assert max(errors_in_eps(WRONG[error], True, dtype, SHAPES[0], HERE)) > 2 * BOUND[dtype]


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_autocast_reaches_every_implementation(name: str) -> None:
    """A Function is not on autocast's lists: it must cast by itself."""
    query = torch.randn(2, 16, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = make_attention(name, 16, True, HERE)(query, query, query)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flex_agrees_with_float64(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside of a compiled model, where it is traced along, and without its kernel: forward only on the CPU."""
    query, key, value = torch.randn(3, 2, 128, 16, dtype=torch.bfloat16)
    attend = make_attention("flex", 128, causal, HERE)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    exact = naive(query.double(), key.double(), value.double(), causal)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(query.float(), key.float(), value.float())
    assert found.dtype == torch.bfloat16
    assert (
        float((found.double() - exact).abs().max() / exact.abs().max())
        <= BOUND[torch.bfloat16] * 2**-7
    )


@pytest.mark.parametrize("length", [1, 64, 127, 128, 129, 200, 256, 640, 1000])
def test_the_causal_mask_by_blocks_is_that_of_torch(length: int) -> None:
    def not_ahead(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    told, looked_at = (
        causal_blocks(length, HERE),
        create_block_mask(not_ahead, None, None, length, length, "cpu"),
    )
    assert told.mask_mod(*torch.tensor([0, 0, 1, 1]))
    assert not told.mask_mod(*torch.tensor([0, 0, 1, 2]))
    for field, expected in vars(looked_at).items():
        found = getattr(told, field)
        if isinstance(expected, Tensor):
            assert (found.dtype, found.shape, found.stride()) == (
                expected.dtype,
                expected.shape,
                expected.stride(),
            ), field
            assert torch.equal(found, expected), field
        elif field != "mask_mod":
            assert found == expected, field


def test_the_causal_mask_of_a_long_sequence_takes_little() -> None:
    """Of the square of 65,536 tokens there are 4 GiB, of that of its blocks a quarter of a million."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            given = result if isinstance(result, tuple) else (result,)
            largest = max([largest, *(one.nbytes for one in given if isinstance(one, Tensor))])
            return result

    with Watch():
        make_attention("flex", 65_536, True, HERE)
    assert 0 < largest <= 8 * 513**2


@pytest.mark.parametrize(
    ("name", "squares"),
    [
        ("naive", 2),
        ("torch_softmax", 1),
        ("weights_only", 1),
        ("recompute", 0),
        ("math", 1),
        ("flash", 0),
    ],
)
def test_each_attention_saves_a_known_number_of_square_tensors(name: str, squares: int) -> None:
    """The whole point of the ladder: how many tensors of (length, length) outlive the forward pass."""
    length, seen = 32, set[int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (length, length) and tensor.is_floating_point():
            seen.add(tensor.untyped_storage().data_ptr())
        return tensor

    inputs = [torch.randn(2, length, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = make_attention(name, length, False, HERE)(*inputs)
    assert output.requires_grad
    assert len(seen) == squares


def _scaled_by_the_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return naive(query * (query.shape[-1] / query.shape[-2]) ** 0.5, key, value, causal=True)


def _mask_off_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    length = query.shape[-2]
    mask = torch.ones(length, length, dtype=torch.bool).tril(-1)
    mask[0, 0] = True
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return softmax(scores.masked_fill(~mask, float("-inf"))) @ value


def _a_gradient_lost(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What forgetting the row sums in the backward pass of the softmax comes to."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True).detach()).masked_fill(
        ~mask, 0.0
    )
    return exponentials / exponentials.sum(-1, keepdim=True).detach() @ value


WRONG: dict[str, Attention] = {
    "scaled by the length": _scaled_by_the_length,
    "mask off by one": _mask_off_by_one,
    "a gradient lost": _a_gradient_lost,
}


@pytest.mark.parametrize(
    "name", ["naive", "torch_softmax", "weights_only", "recompute", "math", "sdpa", "flash"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_query_heads_share_keys_and_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, 16, 8, dtype=dtype)
    key, value = torch.randn(2, 2, 2, 16, 8, dtype=dtype)
    attend = make_attention(name, 16, True, HERE)
    whole = attend(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))
    torch.testing.assert_close(attend(query, key, value), whole)
