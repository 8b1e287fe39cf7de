"""Closed forms for parameters, FLOPs and memory of the Transformer. No torch here.

The FLOP formulas count a multiply-add as two operations and matrix products only; they equal what
`torch.utils.flop_counter.FlopCounterMode` counts on this model (tests/model/test_accounting.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from model.config import VOCAB_SIZE, Dimensions

BACKWARD_BEGINS = "as the backward pass begins"
BACKWARD_ENDS = "as the backward pass ends"
IN_OPTIMIZER = "in the optimizer"

_FP32, _INT64 = 4, 8  # bytes


def parameter_count(dims: Dimensions, vocab_size: int = VOCAB_SIZE) -> int:
    """Return the number of parameters.

    Embedding and head, which may be one; per layer four attention projections, three feed-forward
    matrices and two norms; a final norm.
    """
    layer = _projection_parameters(dims) + 2 * dims.d_model
    tables = 1 if dims.is_tied else 2
    return tables * vocab_size * dims.d_model + dims.num_layers * layer + dims.d_model


def _projection_parameters(dims: Dimensions) -> int:
    """Return the parameters of a layer's matrices: those of attention and feed-forward."""
    attention = 2 * dims.d_model**2 + 2 * dims.d_model * dims.kv_width
    return attention + 3 * dims.d_model * dims.d_ff


@cache
def forward_flops(
    dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE
) -> int:
    """Return the FLOPs of one forward pass over `batch_size` sequences of `context_length` tokens.

    The causal mask saves nothing, because naive attention computes the whole square.
    """
    tokens = batch_size * context_length
    projections = dims.num_layers * _projection_parameters(dims)
    head = vocab_size * dims.d_model
    attention = 4 * batch_size * dims.num_layers * context_length**2 * dims.d_model
    return 2 * tokens * (projections + head) + attention


def backward_flops(
    dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE
) -> int:
    """Return the FLOPs of a backward pass: two products for each product of the forward pass."""
    return 2 * forward_flops(dims, batch_size, context_length, vocab_size)


def attention_flops(batch_size: int, length: int, d_head: int, causal: bool) -> int:
    """Return the FLOPs of a forward pass of attention alone: scores, and weights times values.

    Under a causal mask only unmasked pairs count, as in other benchmarks of attention: an
    implementation that computes the whole square does up to twice as much. The backward pass needs
    twice as many, without what a fused kernel computes again.
    """
    pairs = length * (length + 1) // 2 if causal else length**2
    return 4 * batch_size * pairs * d_head


def attention_matmul_flops(batch_size: int, heads: int, length: int, d_head: int) -> int:
    """Return the forward FLOPs of both products of written-out attention, over the whole square."""
    return 4 * batch_size * heads * length**2 * d_head


def softmax_flops(batch_size: int, heads: int, length: int) -> int:
    """Return the forward FLOPs of a written-out softmax: five operations for each score."""
    return 5 * batch_size * heads * length**2


def activation_bytes(
    dims: Dimensions, batch_size: int, context_length: int, vocab_size: int = VOCAB_SIZE
) -> dict[str, int]:
    """Return the bytes that the forward pass saves, by part, in fp32 with naive attention.

    A layer saves ten tensors of `(batch, context, d_model)`, five of `(batch, context, d_ff)` and
    two squares of `(batch, heads, context, context)`. Tensors that are smaller by a factor of the
    width, such as the scales of the norms, are left out.
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
    """Return the exact bytes that one block saves in fp32 with naive causal attention.

    In addition to `activation_bytes`: a scale per token of each norm; of the softmax, the index
    (int64) of the largest score of each row and the row's sum; and the mask, a byte per element.
    """
    tokens, rows = batch_size * context_length, batch_size * dims.num_heads * context_length
    large = 10 * tokens * dims.d_model + 5 * tokens * dims.d_ff + 2 * rows * context_length
    return _FP32 * (large + 2 * tokens + rows) + _INT64 * rows + context_length**2


def residual_stream_bytes(dims: Dimensions, batch_size: int, context_length: int) -> int:
    """Return the bytes of a block's output in fp32: a vector of d_model per token."""
    return _FP32 * batch_size * context_length * dims.d_model


# Formulas of `activation_bytes`: B sequences, S tokens each, D d_model, F d_ff, H heads, L layers,
# V words.
ACTIVATION_FORMULAS = {
    "attention squares": "4·L·2·BHS²",
    "ffn": "4·L·5·BSF",
    "norm": "4·(4L + 2)·BSD",
    "rope": "4·L·2·BSD",
    "attention": "4·L·2·BSD",
    "residual": "4·L·2·BSD",
    "embedding": "4·BSD",
    "loss": "4·BSV",
}


def state_bytes(
    parameters: int, trained: int, phases: Iterable[str], element_bytes: int = _FP32
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and AdamW's two moments, of any model.

    With N parameters in fp32, 4 N, 4 N and 8 N bytes. `trained` parameters have gradients and
    moments, if a phase of the step makes them.
    """
    return {
        "parameters": element_bytes * parameters,
        "gradients": element_bytes * trained * ("backward" in phases),
        "optimizer state": 2 * element_bytes * trained * ("optimizer" in phases),
    }


# Tensors of (sequences, length, length) of attention alone: saved for the backward pass, most
# together in the forward pass, and most together in the backward pass. Elements have the inputs'
# dtype, but fp32 in `math`. A causal mask adds a byte per element for one sequence. Measured on an
# H200 with torch 2.11: within 1 % of a square at 16,384 tokens.
ATTENTION_SQUARES = {
    "naive": (2, 4, 6),  # saved: exponentials and weights
    "torch_softmax": (1, 2, 4),  # saved: weights
    "weights_only": (1, 1, 2),
    "recompute": (0, 1, 2),
    "math": (1, 2, 4),
    "efficient": (0, 0, 0),
    "flash": (0, 0, 0),
    "cudnn": (0, 0, 0),
    "flex": (0, 0, 0),
}


def attention_square_bytes(
    attention: str, batch_size: int, context_length: int, element_bytes: int = _FP32
) -> int:
    """Return the bytes of one such tensor."""
    if attention == "math":
        element_bytes = _FP32
    return batch_size * context_length**2 * element_bytes


@dataclass(frozen=True)
class StepKind:
    """The phases of a step, and its optimizer: `course`, `foreach` or `fused`."""

    phases: tuple[str, ...] = ("forward", "backward", "optimizer")
    optimizer: str = "course"


def training_moments_bytes(
    dims: Dimensions,
    batch_size: int,
    context_length: int,
    vocab_size: int = VOCAB_SIZE,
    step: StepKind = StepKind(),
) -> dict[str, dict[str, int]]:
    """Return the bytes by term at each of three moments of a steady step. The peak is one of them.

    For N parameters, A bytes of activations, L layers, and B, S, V as in ACTIVATION_FORMULAS:

    - as the backward pass begins: 12 N + A + 2·4·BSV, with two temporaries of the logits' size and
      no gradient yet;
    - as it ends: 16 N + A/L, with all gradients and the activations of one layer;
    - in the optimizer: 16 N + T, where T is five temporaries of the embedding's size in the
      course's loop, 4 N in torch's foreach AdamW, and nothing in its fused one.

    Valid for fp32 with naive attention. Compared with a tracker of all storages, the error in the
    course's 20 cells is -0.9 to 0 %, with torch's optimizers or without one -1.1 to +1.2 %. The
    textbook's 16 N + A errs by +1.4 to +22 %, because gradients and activations never peak
    together.
    """
    phases = step.phases
    count = parameter_count(dims, vocab_size)
    state = state_bytes(count, count, phases)
    activations = sum(activation_bytes(dims, batch_size, context_length, vocab_size).values())
    logits = _FP32 * batch_size * context_length * vocab_size
    embedding = _FP32 * vocab_size * dims.d_model
    moments = {
        BACKWARD_BEGINS: {
            **state,
            "gradients": 0,
            "activations": activations,
            "temporary": 2 * logits,
        },
        BACKWARD_ENDS: {**state, "activations": activations // dims.num_layers, "temporary": 0},
    }
    if "optimizer" in phases:
        temporary = {"course": 5 * embedding, "foreach": _FP32 * count, "fused": 0}[step.optimizer]
        moments[IN_OPTIMIZER] = {**state, "activations": 0, "temporary": temporary}
    return moments


def peak_moment(moments: Mapping[str, Mapping[str, int]]) -> str:
    """Return the moment with the most memory."""
    return max(moments, key=lambda moment: sum(moments[moment].values()))
