from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tasks.harness.gc_pause import _IMMORTAL, uncollected


@pytest.fixture(autouse=True)
def _frozen_as_before() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_garbage_collection_is_off_and_frozen_only_during_the_pause() -> None:
    with uncollected():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > _IMMORTAL
    assert gc.isenabled()
    assert gc.get_freeze_count() < _IMMORTAL


def test_objects_frozen_before_a_gc_pause_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    for _ in range(2):
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() == pytest.approx(
            before, rel=0.01
        )  # some of it has been let go
