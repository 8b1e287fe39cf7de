"""Closed forms for parameters, FLOPs and memory of the Transformer. No torch here.

The FLOP formulas count a multiply-add as two operations and matrix products only; they equal what
`torch.utils.flop_counter.FlopCounterMode` counts on this model (tests/model/test_accounting.py).
"""

from __future__ import annotations

from model.config import VOCAB_SIZE, Dimensions

_FP32, _INT64 = 4, 8  # bytes


def parameter_count(dims: Dimensions, vocab_size: int = VOCAB_SIZE) -> int:
    """Embedding and head, four attention projections, three feed-forward matrices and two norms a layer, final norm."""
    layer = 4 * dims.d_model**2 + 3 * dims.d_model * dims.d_ff + 2 * dims.d_model
    return 2 * vocab_size * dims.d_model + dims.num_layers * layer + dims.d_model


def forward_flops(dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE) -> int:
    """FLOPs of one forward pass over `batch_size` sequences of `context_length` tokens.

    The causal mask saves nothing here: naive attention computes the whole square.
    """
    tokens = batch_size * context_length
    projections = dims.num_layers * (4 * dims.d_model**2 + 3 * dims.d_model * dims.d_ff)
    head = vocab_size * dims.d_model
    attention = 4 * batch_size * dims.num_layers * context_length**2 * dims.d_model
    return 2 * tokens * (projections + head) + attention


def backward_flops(dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Each matrix product of the forward pass has two in the backward pass: by its input and by its weight."""
    return 2 * forward_flops(dims, batch_size, context_length, vocab_size)


def attention_flops(batch_size: int, length: int, d_head: int, causal: bool) -> int:
    """FLOPs of one forward pass of attention alone: scores, and weights times values.

    Under a causal mask only what the mask leaves is counted, as benchmarks of attention do: an implementation that
    computes the whole square does up to twice as much. The backward pass needs twice as many; what a fused kernel
    computes again is not counted.
    """
    pairs = length * (length + 1) // 2 if causal else length**2
    return 4 * batch_size * pairs * d_head


def attention_matmul_flops(batch_size: int, heads: int, length: int, d_head: int) -> int:
    """Of scores and of weights times values, forward, over the whole square: what attention written out computes."""
    return 4 * batch_size * heads * length**2 * d_head


def softmax_flops(batch_size: int, heads: int, length: int) -> int:
    """Forward, written out: an element of the square is compared, shifted, exponentiated, summed and divided."""
    return 5 * batch_size * heads * length**2


def activation_bytes(dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    """What the forward pass keeps for the backward pass in fp32 with naive attention, by part of the model.

    A layer keeps ten tensors of (batch, context, d_model), five of (batch, context, d_ff) and two squares of (batch, heads,
    context, context). What is smaller by a factor of the width, such as the scales of the norms, is left out.
    """
    layers, tokens = dims.num_layers, batch_size * context_length
    narrow, wide = _FP32 * tokens * dims.d_model, _FP32 * tokens * dims.d_ff
    return {
        "attention squares": 2 * layers * _FP32 * batch_size * dims.num_heads * context_length**2,
        "ffn": 5 * layers * wide,
        "norm": (4 * layers + 2) * narrow,
        "rope": 2 * layers * narrow,
        "attention": 2 * layers * narrow,
        "residual": 2 * layers * narrow,
        "embedding": narrow,
        "loss": _FP32 * tokens * vocab_size,
    }


def saved_block_bytes(dims: Dimensions, batch_size: int, context_length: int) -> int:
    """What one block keeps for the backward pass in fp32 with naive causal attention, to the byte.

    Beside what `activation_bytes` counts: a scale a token of each norm; of the softmax, the place (int64) of the largest
    score of each row and its sum; and the mask, a byte an element.
    """
    tokens, rows = batch_size * context_length, batch_size * dims.num_heads * context_length
    large = 10 * tokens * dims.d_model + 5 * tokens * dims.d_ff + 2 * rows * context_length
    return _FP32 * (large + 2 * tokens + rows) + _INT64 * rows + context_length**2


def residual_stream_bytes(dims: Dimensions, batch_size: int, context_length: int) -> int:
    """What one block hands to the next in fp32: a vector of d_model a token."""
    return _FP32 * batch_size * context_length * dims.d_model


def training_peak_bytes(dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE) -> dict[str, int]:
    """The steady peak of a training step in fp32 with naive attention and the course's AdamW, by term.

    Parameters take 4 N bytes, gradients 4 N, AdamW's state 8 N, for N parameters; but gradients and activations are never
    both whole. The peak is at one of three moments: when the backward pass begins, with two temporaries of the logits' size
    and no gradient yet; when it ends, with all gradients and the activations of a layer; or when the optimizer updates the
    embedding, with five temporaries of its size.
    """
    weights = _FP32 * parameter_count(dims, vocab_size)
    activations = sum(activation_bytes(dims, batch_size, context_length, vocab_size).values())
    logits, embedding = _FP32 * batch_size * context_length * vocab_size, _FP32 * vocab_size * dims.d_model
    moments = [
        {"gradients": 0, "activations": activations, "temporary": 2 * logits},
        {"gradients": weights, "activations": activations // dims.num_layers, "temporary": 0},
        {"gradients": weights, "activations": 0, "temporary": 5 * embedding},
    ]
    return {"parameters": weights, "optimizer state": 2 * weights, **max(moments, key=lambda terms: sum(terms.values()))}
