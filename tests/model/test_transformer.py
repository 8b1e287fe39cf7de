from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from model.attention import softmax
from model.config import SIZES, Dimensions
from model.layers import RMSNorm, RotaryEmbedding, SwiGLU
from model.transformer import TransformerLM

TINY = SIZES[2025]["tiny"]


def test_parameter_names_are_those_of_a_course_checkpoint() -> None:
    model = TransformerLM(Dimensions(8, 16, 2, 2), 4, vocab_size=10)
    layer = [
        f"layers.{n}.{part}.weight"
        for n in range(2)
        for part in (
            "ln1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ln2", "ffn.w1", "ffn.w2", "ffn.w3",
        )
    ]  # fmt: skip
    expected = {"token_embeddings.weight", *layer, "ln_final.weight", "lm_head.weight"}
    assert set(model.state_dict()) == expected


def test_logits_equal_an_independent_computation() -> None:
    """The whole model against torch's own modules and complex rotation, in float64."""
    torch.manual_seed(0)
    model = TransformerLM(TINY, 12, vocab_size=50).double()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    tokens = torch.randint(50, (2, 12))
    # the norm is computed in fp32 by design, so that fp32's precision bounds the agreement
    torch.testing.assert_close(model(tokens), _reference(model, tokens), rtol=1e-5, atol=1e-5)


def _reference(model: TransformerLM, tokens: Tensor) -> Tensor:
    heads, d = TINY.num_heads, TINY.d_head
    x = nn.functional.embedding(tokens, model.token_embeddings.weight)
    sequence = x.shape[1]
    powers = torch.arange(0, d, 2, dtype=torch.float64) / d
    angles = torch.arange(sequence, dtype=torch.float64)[:, None] / 10_000**powers
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], d // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(y, (y.shape[-1],), weight, 1e-5)

    def split(y: Tensor) -> Tensor:
        return y.view(2, sequence, heads, d).transpose(1, 2)

    for layer in model.layers:
        attn, ffn = layer.attn, layer.ffn
        y = norm(x, layer.ln1.weight)
        q, k, v = (split(y @ p.weight.T) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(2, sequence, -1) @ attn.output_proj.weight.T
        y = norm(x, layer.ln2.weight)
        x = x + (nn.functional.silu(y @ ffn.w1.weight.T) * (y @ ffn.w3.weight.T)) @ ffn.w2.weight.T
    return norm(x, model.ln_final.weight) @ model.lm_head.weight.T


def test_a_token_does_not_see_what_comes_after_it() -> None:
    model = TransformerLM(TINY, 8, vocab_size=20)
    tokens = torch.randint(20, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 20
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_rope_turns_adjacent_pairs() -> None:
    rope = RotaryEmbedding(d_head=4, context_length=3)
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(3, 4)
    turned = rope(x)
    slow = 10_000 ** (-2 / 4)
    expected = [
        [math.cos(p), math.sin(p), -math.sin(p * slow), math.cos(p * slow)] for p in range(3)
    ]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_softmax_withstands_large_scores() -> None:
    scores = torch.tensor([[1e4, 1e4 + 1, float("-inf")]])
    torch.testing.assert_close(softmax(scores), torch.softmax(scores, -1))


def test_rms_norm_is_computed_in_fp32() -> None:
    """300² overflows fp16: a norm computed there would give zeros."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    y = RMSNorm(64)(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, torch.ones_like(y))


def test_swiglu_saves_five_wide_tensors() -> None:
    """The silu written out keeps its sigmoid as well: the closed form of memory counts on five."""
    ffn, x, wide = SwiGLU(8, 32), torch.randn(3, 8), set[int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == (3, 32):
            wide.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = ffn(x)
    assert len(wide) == 5
    y.sum().backward()


@pytest.mark.parametrize(
    ("dims", "expected"), [((10, 8, 1, 3), "not divisible"), ((6, 8, 1, 2), "even")]
)
def test_head_dimensions_that_are_not_whole_and_even_are_refused(
    dims: tuple[int, int, int, int], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        TransformerLM(Dimensions(*dims), 4)


def test_the_sizes_of_the_course_and_of_published_models_have_whole_heads() -> None:
    for sizes in SIZES.values():
        for dims in sizes.values():
            dims.require_whole_heads()


def test_built_on_the_device_that_is_current() -> None:
    with torch.device("meta"):
        model = TransformerLM(SIZES[2026]["10B"], 1024)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
