"""Classify kernels by their names. The first pattern that matches decides."""

from __future__ import annotations

import re
from functools import cache

from tasks.spec.tables import UNKNOWN_CLASS

CLASSES = (
    "GEMM", "attention", "softmax", "norm", "elementwise", "reduction", "copy", "indexing",
    "optimizer", "communication", UNKNOWN_CLASS,
)  # fmt: skip

# Operators of torch that a trace of the CPU has, without `aten::` and the `_` of those in place.
_ELEMENTWISE_OPERATORS = (
    "add|sub|rsub|mul|div|true_divide|floor_divide|remainder|fmod|neg|abs|sign|sgn|reciprocal|"
    "exp2?|expm1|log|log2|log10|log1p|logaddexp|logit|sqrt|rsqrt|square|pow|float_power|erf|erfinv|"
    "sin|cos|tan|sinh|cosh|tanh|asin|acos|atan|atan2|hypot|floor|ceil|round|trunc|frac|"
    "sigmoid|silu|gelu|relu6?|leaky_relu|prelu|rrelu|elu|celu|selu|mish|softplus|"
    "hardtanh|hardswish|hardsigmoid|hardshrink|softshrink|log_sigmoid|glu|threshold|dropout|"
    "native_dropout|feature_dropout|alpha_dropout|clamp|clamp_min|clamp_max|clip|nan_to_num|"
    "maximum|minimum|fmax|fmin|where|lerp|addcmul|addcdiv|masked_fill|tril|triu|"
    "eq|ne|ge|gt|le|lt|isnan|isinf|isfinite|logical_(not|and|or|xor)|"
    "bitwise_(not|and|or|xor|left_shift|right_shift)|"
    "fill|zero|zeros|ones|full|zeros_like|ones_like|full_like|arange|linspace|"
    "normal|uniform|random|bernoulli|exponential|rand|randn|randint|rand_like|randn_like|"
    "(sigmoid|silu|gelu|tanh|threshold|leaky_relu|elu|softplus|hardtanh|hardswish|hardsigmoid|"
    "log_sigmoid|mish|glu|logit|native_dropout)_backward|"
    "(mse|l1|smooth_l1|huber)_loss_backward"
)
_REDUCTION_OPERATORS = (
    "sum|mean|max|amax|min|amin|aminmax|var|std|var_mean|std_mean|norm|prod|argmax|argmin|any|all|"
    "cumsum|cumprod|logcumsumexp|logsumexp|nansum|nanmean|median|count_nonzero|linalg_vector_norm|"
    "cross_entropy_loss|(mse|l1|smooth_l1|huber)_loss|binary_cross_entropy|kl_div"
)
_VIEWS = "unsafe_view|view|reshape|permute|transpose|t|expand|squeeze|unsqueeze|select|slice"

# Derived from 318 different names in traces of real GPUs, of whose time 99.4 % got a class.
_PATTERNS = (
    ("communication", r"nccl|nvshmem|all_?reduce_kernel|all_?gather|reduce_?scatter|c10d::"),
    # Before elementwise: torch copies with kernels whose names contain `elementwise_kernel`.
    ("copy", r"^(CUDA )?(Memcpy|Memset)|^\[CUDA mem|direct_copy_kernel|CatArrayBatchedCopy|"
     r"float(8|16|32)\w*_copy_kernel|"
     r"aten::(copy_|_to_copy|clone|contiguous|cat|stack|to|repeat|pin_memory)$"),
    # Before GEMM: names of flash kernels contain `cutlass`. Before convolutions: cuDNN's attention
    # contains `fprop`.
    ("attention", r"flash|fmha|sdpa|[^a-z]mha|scaled_dot_product|flex_attention|"
     r"efficient_attention|attention_(fwd|bwd|kernel)"),
    ("optimizer", r"multi_tensor_apply|Adam|aten::_(foreach|fused)_|FusedOptimizer"),
    # Before GEMM: names of convolutions contain `gemm`.
    ("other", r"implicit_convolve|conv2d|convolution|_(fprop|dgrad|wgrad)_"),
    ("GEMM", r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|Cijk_|dot_kernel|reduce_1Block_kernel|"
     r"triton_tem_fused_.*mm|aten::(mm|bmm|addmm|baddbmm|linear|matmul|mv|dot|addmv|_scaled_mm)$|"
     r"extern_kernels\.\w*mm"),
    ("softmax", r"[Ss]oft_?[Mm]ax"),
    ("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|RowwiseMoments|GammaBeta|bn_(fw|bw)"),
    # The built-in model looks up its token embeddings with `aten::index`.
    ("indexing", r"vectorized_gather|embedding|indexing_backward|index_?[Ss]elect|"
     r"index_elementwise_kernel|gpu_index_kernel|index_put|compute_grad_weight|sum_and_scatter|"
     r"krn_partial|scatter_gather|aten::(index|gather|take|(index_(add|copy|fill|reduce)|scatter|scatter_(add|reduce))_?)$"),
    # A fused softmax often has no `softmax` in its name: triton_red_fused_div_exp_sub_3.
    ("softmax", r"^triton_(red|per)_fused_.*(max.*_exp_|_exp_.*(sum|div))"),
    # The forward pass, and the backward pass of an RMSNorm.
    ("norm", r"^triton_(red|per)_fused_.*(rsqrt|pow_sum)"),
    ("reduction", r"reduce|Scan|ReduceOp|cumsum|^triton_(red|per|split_scan)_|cunn_Clas|nll_loss|"
     rf"aten::({_REDUCTION_OPERATORS})$"),
    # Operators may begin and end with `_`. No underscore belongs to one of them, so that there is
    # one way to read a name.
    ("copy", rf"^triton_poi_fused__?((to_copy|clone|copy|cat|stack|{_VIEWS})_+)+\d+$"),
    ("elementwise", r"elementwise|Functor|^triton_poi_|masked_fill|fused_dropout|triu_tril|"
     rf"aten::({_ELEMENTWISE_OPERATORS})_?$|distribution|arange|cpp_fused"),
    ("optimizer", r"^triton_for_"),
)  # fmt: skip
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
# The patterns take a time that grows with the square of the length.
_LONGEST = 2000


@cache
def classify(kernel: str, operator: str = "") -> str:
    """Return one of CLASSES, from the kernel's name or else from the operator that launched it."""
    for name in (kernel, operator):
        for kind, pattern in _COMPILED:
            if pattern.search(name, 0, _LONGEST):
                return kind
    return UNKNOWN_CLASS
