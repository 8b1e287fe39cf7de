"""Memory that torch's CUDA reductions need besides their result.

A sum over the rows of a large matrix, such as the gradient of a bias, is divided among many blocks
of threads, which leave partial sums in global memory: 128 MiB for a matrix of 8,192 x 2,048.
The arithmetic follows `setReduceConfig` and `global_memory_size` in ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# An H100 or H200. Other GPUs differ: one of 128 multiprocessors for 1,536 threads each takes up to
# a quarter less.
MULTIPROCESSORS = 132
THREADS_PER_MULTIPROCESSOR = 2048

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256


def reduction_scratch(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the bytes of partial results of a reduction (input, dimensions, …).

    Reductions along the innermost dimension count as 0: their partial results are a few bytes for
    each output.
    """
    tensor: Tensor = args[0]
    if not tensor.numel():
        return ()
    reduced = _reduced_dimensions(tensor, args[1] if len(args) > 1 else None)
    remaining = [dim for dim in range(tensor.dim()) if dim not in reduced and tensor.shape[dim] > 1]
    reduced = [dim for dim in reduced if tensor.shape[dim] > 1]
    strides = tensor.stride()
    if not reduced or not remaining:
        return ()
    innermost = min(remaining, key=lambda dim: strides[dim])
    if min(strides[dim] for dim in reduced) < strides[innermost]:
        return ()
    outputs = math.prod(tensor.shape[dim] for dim in remaining)
    vector = 1
    if strides[innermost] == 1:
        others = [strides[dim] for dim in (*remaining, *reduced) if dim != innermost]
        vector = math.gcd(4, tensor.shape[innermost], *others)
    nbytes = _partial_results(outputs, tensor.numel() // outputs, vector) * _accumulator(tensor)
    return (nbytes,) if nbytes else ()


def _reduced_dimensions(tensor: Tensor, dims: object) -> list[int]:
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, Sequence) or not dims:
        return list(range(tensor.dim()))
    return [dim % tensor.dim() for dim in dims]


def _accumulator(tensor: Tensor) -> int:
    """Return the bytes of one partial result: floating-point types below fp32 are added in fp32."""
    if tensor.dtype.is_floating_point:
        return max(4, tensor.element_size())
    return 8


def _partial_results(outputs: int, inputs_per_output: int, vector: int) -> int:
    """Return how many partial results are allocated, if neighbouring threads compute neighbouring
    outputs. vector: outputs per thread.
    """
    max_threads = _MAX_THREADS // vector
    columns = min(_power_of_2_up_to(outputs // vector), max_threads)
    rows = min(_power_of_2_up_to(inputs_per_output), max_threads)
    width = min(columns, _WARP)
    height = min(rows, max_threads // width)
    width = min(columns, max_threads // height)
    if inputs_per_output < min(height * 16, _MAX_VALUES_PER_THREAD):
        return 0
    values_per_thread = -(-inputs_per_output // height)
    grid = -(-(outputs // vector) // width)
    blocks = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if values_per_thread < _MAX_VALUES_PER_THREAD or grid > blocks:
        return 0
    to_fill_the_gpu = -(-blocks // grid)
    at_most = -(-values_per_thread // _MIN_VALUES_PER_THREAD)
    at_least = -(-values_per_thread // _MAX_VALUES_PER_THREAD)
    blocks_per_output = max(min(to_fill_the_gpu, at_most), at_least)
    if blocks_per_output == 1:
        return 0
    # torch allocates this product, which is `width * vector` times what the kernel uses.
    return outputs * blocks_per_output * width * vector


def _power_of_2_up_to(count: int) -> int:
    return 1 << max(count, 1).bit_length() - 1
