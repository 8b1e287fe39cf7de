"""The model of the caching allocator, on sequences small enough to follow by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prediction.allocator import CachingAllocator, OutOfMemory, cublas_workspace_bytes

MIB = 1024**2


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not worth a block
        (19 * MIB, 20 * MIB, 20 * MIB),
        (21 * MIB + 1, 22 * MIB, 22 * MIB),
    ],
)
def test_an_allocation_is_rounded_up_to_blocks_and_segments(
    asked: int, allocated: int, reserved: int
) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (
        asked,
        allocated,
        reserved,
    )


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved == 4 * MIB


def test_a_free_block_serves_its_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB)
    assert (allocator.allocated, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.allocate(30 * MIB, stream=1)
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 60 * MIB)


def test_free_segments_of_all_streams_are_released_at_the_limit() -> None:
    allocator = CachingAllocator(50 * MIB)
    allocator.free(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 40 * MIB


def test_the_allocator_reuses_the_free_block_that_fits_best() -> None:
    allocator = CachingAllocator()
    large, _, small, _ = (allocator.allocate(size * MIB) for size in (40, 30, 20, 30))
    for block in (large, small):
        allocator.free(block)
    allocator.allocate(18 * MIB)  # into the 20, split: 2 are left
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 120 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 120 * MIB


def test_free_neighbouring_blocks_are_merged_and_reused() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(60 * MIB)
    allocator.free(whole)
    thirds = [allocator.allocate(20 * MIB) for _ in range(3)]
    assert allocator.reserved == 60 * MIB
    for place in (0, 2, 1):
        allocator.free(thirds[place])
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_under_a_cap_whole_segments_are_given_back_and_split_ones_are_not() -> None:
    allocator = CachingAllocator(cap_bytes=100 * MIB)
    whole, split = allocator.allocate(40 * MIB), allocator.allocate(60 * MIB)
    allocator.free(whole)
    allocator.free(split)
    allocator.allocate(30 * MIB)  # of the 40: that segment is now in two
    allocator.allocate(60 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(20 * MIB)
    allocator = CachingAllocator(cap_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 100 * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64 * MIB)), max_size=60))
def test_nothing_is_lost(moves: list[tuple[bool, int]]) -> None:
    allocator = CachingAllocator()
    blocks = []
    for is_free, size in moves:
        if is_free and blocks:
            allocator.free(blocks.pop(size % len(blocks)))
        else:
            blocks.append(allocator.allocate(size))
        assert allocator.requested <= allocator.allocated <= allocator.reserved
    for block in blocks:
        allocator.free(block)
    assert (allocator.requested, allocator.allocated) == (0, 0)
    reserved = allocator.reserved
    allocator.allocate(1)
    assert allocator.reserved <= reserved + 2 * MIB


def test_workspaces_by_generation() -> None:
    assert (
        cublas_workspace_bytes(9.0)
        == cublas_workspace_bytes(12.0)
        == cublas_workspace_bytes(None)
        == 32 * MIB
    )
    assert cublas_workspace_bytes(8.9) == 8_519_680
