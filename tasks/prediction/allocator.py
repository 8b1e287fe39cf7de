"""A model of torch's CUDA caching allocator: the memory it reserves for a sequence of requests.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13 with default settings on one
stream. Requests are rounded up to 512 bytes and served best fit from free blocks, otherwise from a
new segment. Blocks are split and joined again. Imports no torch.
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
        self._small: Pool = []
        self._large: Pool = []
        self._next_address = 0

    def allocate(self, nbytes: int) -> MemoryBlock:
        """Return a block for a request. Raise OutOfMemory."""
        size = max(_ROUNDING, _round_up(nbytes, _ROUNDING))
        pool = self._small if size <= _SMALL else self._large
        block = _take_best_fit(pool, size) or self._new_segment(pool, size)
        rest = block.size - size
        is_split = rest >= _ROUNDING if pool is self._small else rest > _SMALL
        if is_split:
            self._split(block, size)
        block.requested = nbytes
        self.requested += nbytes
        self.allocated += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        self.requested -= block.requested
        self.allocated -= block.size
        block.requested = 0
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                _take(neighbour)
                _join(block, neighbour)
        _put(block)

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
        for pool in (self._small, self._large):
            parts = []
            for size, address, block in pool:
                if block.before is None and block.after is None:
                    self.reserved -= size
                else:
                    parts.append((size, address, block))
            pool[:] = parts

    @staticmethod
    def _split(block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(
            block.size - size, block.address + size, block.pool, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        _put(rest)


def _put(block: MemoryBlock) -> None:
    block.is_free = True
    insort(block.pool, (block.size, block.address, block))


def _take(block: MemoryBlock) -> None:
    block.is_free = False
    del block.pool[bisect_left(block.pool, (block.size, block.address))]


def _take_best_fit(pool: Pool, size: int) -> MemoryBlock | None:
    index = bisect_left(pool, (size,))
    if index == len(pool):
        return None
    block = pool.pop(index)[2]
    block.is_free = False
    return block


def _join(block: MemoryBlock, neighbour: MemoryBlock) -> None:
    """Make the neighbour part of the block."""
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size


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
