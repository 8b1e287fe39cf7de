"""A kernel that writes to an illegal address of the GPU. Apart, since Triton is there only where GPUs may be."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_far_away(pointer):  # type: ignore[no-untyped-def]
    tl.store(pointer + (1 << 40), 1.0)
