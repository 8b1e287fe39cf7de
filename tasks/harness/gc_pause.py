"""Pause Python's garbage collection while steps are timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# From 3.12 on Python itself freezes immortal objects, but only hundreds of them. A fork server
# freezes everything it has imported, which is far more.
_IMMORTAL = 10_000


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, and exclude the objects that exist already from later ones."""
    gc.collect()
    # Objects that a fork server has frozen stay frozen: each later collection would examine
    # everything it has imported, which takes 0.2 s.
    is_frozen = gc.get_freeze_count() > _IMMORTAL
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
