"""Python's garbage collection, kept out of the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_IMMORTAL = 10_000  # objects at most: from 3.12 on Python itself freezes what never dies, and no more than hundreds are that


@contextmanager
def uncollected() -> Iterator[None]:
    """While it lasts nothing is collected, and what there is before is not looked through again and again.

    What a prepared parent has frozen stays so: to look through all that it has imported takes 0.2 s, each time.
    """
    gc.collect()
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
