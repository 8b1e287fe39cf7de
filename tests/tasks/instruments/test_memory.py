"""Memory that a GPU has in use outside of torch's allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tasks.instruments.memory import _outside


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({"total_bytes": 100, "free_bytes": 30, "reserved_bytes": 60, "allocated_bytes": 50}, [10]),
        ({"allocated_bytes": 50, "rss_bytes": 70}, []),  # a CPU
        ({"allocated_bytes": 50}, []),  # Apple's GPU
    ],
)
def test_memory_outside_of_the_allocator_is_what_is_neither_free_nor_reserved(
    evidence: dict[str, int], expected: list[int]
) -> None:
    samples = _outside(SimpleNamespace(memory_evidence=lambda: evidence))  # type: ignore[arg-type]
    assert [sample.value for sample in samples] == expected
    assert all((one.metric, one.mode) == ("outside_allocator_bytes", "steady") for one in samples)
