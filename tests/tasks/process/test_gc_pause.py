from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tasks.process import gc_pause
from tasks.process.gc_pause import frozen_imports, uncollected

MANY = 10_000  # more than Python itself freezes


@pytest.fixture(autouse=True)
def _frozen_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_pause, "_imports_are_frozen", False)
    # It would examine all that the tests before this one have imported, which takes a second.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.unfreeze()
    yield
    gc.freeze()


def test_garbage_collection_is_off_and_frozen_only_during_the_pause() -> None:
    with uncollected():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > MANY
    assert gc.isenabled()
    assert gc.get_freeze_count() < MANY


def test_imports_of_a_fork_server_stay_frozen_after_a_pause() -> None:
    with frozen_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    before = gc.get_freeze_count()
    assert before > MANY
    for _ in range(2):
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        # Objects that were freed are no longer frozen.
        assert gc.get_freeze_count() == pytest.approx(before, rel=0.01)
