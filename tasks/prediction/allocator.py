"""A model of torch's CUDA caching allocator: the memory it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13 with default settings. Requests are
rounded up to 512 bytes and served best fit from free blocks of the same stream, otherwise from a new
segment. Blocks are split and joined again. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_MIB = 1024**2
_ROUNDING = 512
# Up to this size a request is served from the small pool. A large block is split if the rest is
# larger.
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_SEPARATE_SEGMENT = 10 * _MIB  # a request of this size or more gets a segment of the same size
_SEGMENT_ROUNDING = 2 * _MIB


class OutOfMemory(Exception):
    """The limit is too small, even after all free segments are released."""


# Free blocks by size, then address. No two blocks have the same address, so that the blocks
# themselves are never compared.
Pool = list[tuple[int, int, "MemoryBlock"]]


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A block of a segment, with its neighbours in that segment."""

    size: int
    address: int
    pool: Pool = field(repr=False)
    is_free: bool = False
    requested: int = 0
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


class CachingAllocator:
    """The allocator's state, in bytes.

    allocated: whole blocks in use. requested: requested sizes of these. reserved: all segments.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.requested = self.allocated = self.reserved = 0
        self._cap = cap_bytes
        self._small: dict[int, Pool] = {}  # by stream
        self._large: dict[int, Pool] = {}
        self._next_address = 0

    # Both methods run tens of thousands of times in a step, so that they call few others.

    def allocate(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """Return a block for a request. Raise OutOfMemory."""
        size = -(-nbytes // _ROUNDING) * _ROUNDING or _ROUNDING
        is_small = size <= _SMALL
        pools = self._small if is_small else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = []
        best_fit = bisect_left(pool, (size,))
        if best_fit < len(pool):
            block = pool.pop(best_fit)[2]
            block.is_free = False
        else:
            block = self._new_segment(pool, size)
        rest = block.size - size
        if rest >= _ROUNDING if is_small else rest > _SMALL:
            _split(block, size)
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Return a block to its pool, joined with its free neighbours."""
        self.requested -= block.requested
        self.allocated -= block.size
        block.requested = 0
        pool, before, after = block.pool, block.before, block.after
        if before is not None and before.is_free:
            del pool[bisect_left(pool, (before.size, before.address))]
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            del pool[bisect_left(pool, (after.size, after.address))]
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        block.is_free = True
        insort(pool, (block.size, block.address, block))

    def _new_segment(self, pool: Pool, size: int) -> MemoryBlock:
        segment = _segment_size(size)
        if not self._has_room(segment):
            self._release_whole_segments()
        if not self._has_room(segment):
            raise OutOfMemory(f"{size} bytes requested, {self.reserved} of {self._cap} reserved")
        self.reserved += segment
        self._next_address += segment + 1  # blocks of two segments are never neighbours
        return MemoryBlock(segment, self._next_address - segment, pool)

    def _has_room(self, segment: int) -> bool:
        return self._cap is None or self.reserved + segment <= self._cap

    def _release_whole_segments(self) -> None:
        for pool in (*self._small.values(), *self._large.values()):
            parts = []
            for size, address, block in pool:
                if block.before is None and block.after is None:
                    self.reserved -= size
                else:
                    parts.append((size, address, block))
            pool[:] = parts


def _split(block: MemoryBlock, size: int) -> None:
    """Shorten the block to this size, and put the rest of it into its pool."""
    pool, after = block.pool, block.after
    rest = MemoryBlock(block.size - size, block.address + size, pool, True, 0, block, after)
    if after is not None:
        after.before = rest
    block.after, block.size = rest, size
    insort(pool, (rest.size, rest.address, rest))


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _SEPARATE_SEGMENT else _round_up(size, _SEGMENT_ROUNDING)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def cublas_workspace_bytes(compute_capability: float | None) -> int:
    """Return the workspace of cuBLAS for each thread that multiplies
    (ATen/cuda/CublasHandlePool.cpp).

    32 MiB on Hopper and, in the newest version, Blackwell; 8.125 MiB on older GPUs. An unknown GPU
    counts as new.
    """
    if compute_capability is None or compute_capability >= 9:
        return 32 * _MIB
    return 2 * 4 * _MIB + 8 * 16 * 1024


def attention_capability(compute_capability: float | None) -> float:
    """Return the lowest compute capability with the same choice of attention kernels.

    It is 7.0, 8.0, 8.6 or 9.0. An unknown GPU counts as an H100. Consumer GPUs of Blackwell (12.0)
    choose like those of Ampere (8.6). The checks are in ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if compute_capability is None or 9 <= compute_capability < 11:
        return 9.0
    if compute_capability < 8:
        return 7.0
    return 8.6 if 8.6 <= compute_capability < 9 or compute_capability >= 12 else 8.0
