"""Exposed communication by hand-made intervals whose answers are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.traces.overlap import DeviceKernels, Interval, Parts, by_kind, divide, transfers_of
from tasks.traces.timeline import covered_ns

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_collective_behind_the_computing_is_exposed_and_one_beside_it_is_not() -> None:
    # computing 0-10 and 14-20; collectives 5-12, of which the first 3 are waiting, and 15-18
    kernels = DeviceKernels([(0, 10), (14, 20)], [(5, 12), (15, 18)], [(20, 22)])
    assert divide(kernels, [4, 3]) == Parts(
        profiled_step=22,
        compute=16,
        exposed_transfer=2,
        exposed_wait=0,
        exposed_copies=2,
        idle=2,
        communication=10,
        transfer=7,
        wait=3,
    )


def test_what_waits_for_another_rank_is_exposed_waiting() -> None:
    parts = divide(DeviceKernels([(0, 10)], [(10, 30)], []), [5])
    assert (parts.exposed_wait, parts.exposed_transfer, parts.idle) == (15, 5, 0)


def test_collectives_that_overlap_each_other_count_once() -> None:
    """Count their union: the sum would be more than the step."""
    parts = divide(DeviceKernels([(0, 1)], [(1, 5), (2, 5), (3, 5)], []), [4, 3, 2])
    assert (parts.profiled_step, parts.exposed_transfer, parts.communication) == (5, 4, 4)
    assert parts.transfer == 9


def test_kernels_are_told_apart_by_their_names() -> None:
    found = by_kind([("ampere_gemm", 3, 4), (NCCL, 0, 2), ("Memcpy DtoD", 5, 6), ("fill", 1, 2)])
    assert found == DeviceKernels([(1, 2), (3, 4)], [(0, 2)], [(5, 6)])


def test_the_transfer_is_the_shortest_duration_of_a_call() -> None:
    assert transfers_of([[5, 9], [7, 4]]) == [5, 4]
    with pytest.raises(ValueError, match=r"different numbers of collectives: \[2, 1\]"):
        transfers_of([[5, 9], [7]])


INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda one: (one[0], sum(one))),
    max_size=8,
)


@given(INTERVALS)
def test_what_intervals_cover_is_the_size_of_their_union(intervals: list[Interval]) -> None:
    moments = {moment for begin, end in intervals for moment in range(begin, end)}
    assert covered_ns(intervals) == len(moments)


@given(INTERVALS, INTERVALS)
def test_what_is_exposed_is_what_no_kernel_computes(
    computing: list[Interval], calls: list[Interval]
) -> None:
    busy = {moment for begin, end in computing for moment in range(begin, end)}
    called = {moment for begin, end in calls for moment in range(begin, end)}
    parts = divide(DeviceKernels(computing, calls, []), [end - begin for begin, end in calls])
    assert (parts.exposed_transfer, parts.exposed_wait) == (len(called - busy), 0)


@given(INTERVALS, INTERVALS, INTERVALS, st.data())
def test_the_parts_of_a_step_add_up_to_it(
    computing: list[Interval], calls: list[Interval], copies: list[Interval], data: st.DataObject
) -> None:
    transfers = [data.draw(st.integers(0, end - begin)) for begin, end in calls]
    parts = divide(DeviceKernels(computing, calls, copies), transfers)
    parted = (
        parts.compute,
        parts.exposed_transfer,
        parts.exposed_wait,
        parts.exposed_copies,
        parts.idle,
    )
    assert min(parted) >= 0
    assert sum(parted) == parts.profiled_step
    assert parts.transfer + parts.wait == sum(end - begin for begin, end in calls)
